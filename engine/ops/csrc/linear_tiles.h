// Rows against the tiles of a linear's weights, by matrix tiles. Knows no thread.
//
// Rows are on the left: tile 4 the first sixteen, tile 5 those behind them; 6 and 7 are columns, 0 to 3 sums.
#pragma once

#include <vector>

#include "linear_job.h"
#include "tiles.h"

constexpr int ROWS_TOGETHER = 2 * TILE;
constexpr long ROWS_AT_ONCE = 256;  // rows laid out at a time: they stay in the second-level cache
static_assert(NT == WIDE_TILE && BLOCK_PAIRS == TILE);

// Of the rows of a part by the columns of one weight tile, or of at most TILE rows by two beside each other.
struct Sums {
  static constexpr long STRIDE = 2 * NT;
  alignas(64) float at[ROWS_TOGETHER * STRIDE];
};

static void shape_rows(TileShapes& shapes, long rows) {
  const int first = int(std::min<long>(rows, TILE)), second = int(std::max(rows - TILE, 1L));
  for (int tile : {0, 1, 4}) shapes.set(tile, first);
  for (int tile : {2, 3}) shapes.set(tile, rows > TILE ? second : first);
  shapes.set(5, second);
  for (int tile : {6, 7}) shapes.set(tile, TILE);
  shapes.use();
}

INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// A block of pairs of more than TILE rows, against one weight tile; x: rows of `stride` bytes.
INLINE void multiply_tall(const void* x, long stride, const char* w) {
  _tile_loadd(4, x, stride);
  _tile_loadd(6, w, 4 * NT);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, w + TILE_BYTES, 4 * NT);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, (const char*)x + TILE * stride, stride);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Of at most TILE rows, against one weight tile or two.
INLINE void multiply_flat(const void* x, long stride, const char* w, const char* beside) {
  _tile_loadd(4, x, stride);
  _tile_loadd(6, w, 4 * NT);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, w + TILE_BYTES, 4 * NT);
  _tile_dpbf16ps(1, 4, 7);
  if (!beside) return;
  _tile_loadd(6, beside, 4 * NT);
  _tile_dpbf16ps(2, 4, 6);
  _tile_loadd(7, beside + TILE_BYTES, 4 * NT);
  _tile_dpbf16ps(3, 4, 7);
}

INLINE void multiply_block(bool is_tall, const void* x, long stride, const char* w, const char* beside) {
  if (is_tall) multiply_tall(x, stride, w);
  else multiply_flat(x, stride, w, beside);
}

INLINE void store_sums(bool is_tall, bool is_pair, float* to, long stride) {
  const long bytes = stride * 4;
  _tile_stored(0, to, bytes);
  _tile_stored(1, to + TILE, bytes);
  if (is_tall) {
    _tile_stored(2, to + TILE * stride, bytes);
    _tile_stored(3, to + TILE * stride + TILE, bytes);
  } else if (is_pair) {
    _tile_stored(2, to + 2 * TILE, bytes);
    _tile_stored(3, to + 3 * TILE, bytes);
  }
}

// Sums of x · w for laid rows, [blocks][rows][TILE] pairs with zeros behind K, go to rows of `stride`; with `beside` of two
// weight tiles.
template <bool IS_TALL>
static void multiply_laid(const Form::Pair* x, long rows, const char* w, const char* beside, long pairs, Ahead ahead,
                          float* to, long stride) {
  zero_sums();
  const long whole = pairs / TILE, left = pairs % TILE;
  for (long b = 0; b < whole; b++) {
    for (int t = 0; t < (beside ? 2 : 1); t++)
      for (int i = 0; i < TILE / UNROLL * ahead.lines; i++) __builtin_prefetch(ahead.at + t * (beside - w) + 64 * i, 0, 2);
    ahead.at += 64 * TILE / UNROLL * ahead.lines;
    const long at = b * TILE * NT * 4;
    multiply_block(IS_TALL, x + b * TILE * rows, TILE_BYTES, w + at, beside ? beside + at : nullptr);
  }
  if (left) {
    alignas(64) uint32_t ends[2][TILE * NT] = {};
    std::memcpy(ends[0], w + whole * TILE * NT * 4, left * NT * 4);
    if (beside) std::memcpy(ends[1], beside + whole * TILE * NT * 4, left * NT * 4);
    fence_tiles();
    multiply_block(IS_TALL, x + whole * TILE * rows, TILE_BYTES, (const char*)ends[0], beside ? (const char*)ends[1] : nullptr);
  }
  store_sums(IS_TALL, beside, to, stride);
}

INLINE void multiply(const Form::Pair* x, long rows, const char* w, const char* beside, long pairs, const Ahead& ahead,
                     float* to, long stride) {
  if (rows > TILE) multiply_laid<true>(x, rows, w, nullptr, pairs, ahead, to, stride);
  else multiply_laid<false>(x, rows, w, beside, pairs, ahead, to, stride);
}

// With A of the segments that are merged turned to columns.
static Lora prepare(Lora call) {
  struct Item { Part part; uint32_t* out; };
  static thread_local std::vector<const uint32_t*> turned;
  static thread_local std::vector<Item> items;
  static thread_local Scratch room;
  turned.assign(call.num_segments * call.num_slices, nullptr);
  items.clear();
  long size = 0;
  for (long i = 0; i < call.num_segments; i++)
    for (long s = 0; s < call.num_slices && is_merged(call, call.segments[i]); s++) {
      items.push_back({Part(call, call.segments[i], s), nullptr});
      size += turned_size(items.back().part.rank, call.H);
    }
  uint32_t* out = room.take<uint32_t>(size);
  for (long i = 0, n = 0; i < call.num_segments; i++)
    for (long s = 0; s < call.num_slices && is_merged(call, call.segments[i]); s++, n++) {
      turned[i * call.num_slices + s] = items[n].out = out;
      out += turned_size(items[n].part.rank, call.H);
    }
  const Item* todo = items.data();
  pool.run(long(items.size()), [=](long n) { turn_A(todo[n].part.A, todo[n].part.rank, call.H, todo[n].out); });
  call.turned = turned.data();
  return call;
}

// z of every slice for laid rows of one adapter: [row][slice][z_stride].
static void project_rows(const Lora& call, const Segment& segment, long, const Form::Pair* x, long rows, Z* z) {
  const long blocks = num_blocks(call.H), stride = z_stride(call), ldz = call.num_slices * stride;
  TileShapes shapes;
  shape_rows(shapes, rows);
  Sums sums;
  for (long s = 0; s < call.num_slices; s++) {
    const Part part(call, segment, s);
    const uint32_t* turned = call.turned[(&segment - call.segments) * call.num_slices + s];
    for (long j = 0; j < stride; j += NT, turned += blocks * TILE * NT) {
      if (j < part.rank) multiply(x, rows, (const char*)turned, nullptr, blocks * TILE, {nullptr, 0}, sums.at, Sums::STRIDE);
      for (long r = 0; r < rows; r++)
        for (int c = 0; c < NT; c += L)
          store(z + r * ldz + s * stride + j + c, j < part.rank ? narrow(load<vf>(sums.at + r * Sums::STRIDE + c)) : vh{});
    }
  }
}

// What adapters add to one weight tile: B of the last one that was met, interleaved.
class Deltas {
 public:
  void multiply(const Delta& delta, long rows, Sums& sums) {
    if (delta.B != known_) {
      known_ = delta.B;
      const long blocks = (delta.rank + RANKS - 1) / RANKS;
      pairs_ = room().take<uint32_t>(blocks * TILE * NT);
      for (long b = 0; b < blocks; b++)
        interleave(delta.B + b * RANKS * delta.O, delta.rank - b * RANKS, delta.O, pairs_ + b * TILE * NT);
      fence_tiles();
    }
    zero_sums();
    const bool is_tall = rows > TILE;
    for (long j = 0, b = 0; j < delta.rank; j += RANKS, b++)
      multiply_block(is_tall, delta.z + j, delta.ldz * sizeof(Z), (const char*)(pairs_ + b * TILE * NT), nullptr);
    store_sums(is_tall, false, sums.at, Sums::STRIDE);
  }

 private:
  static Scratch& room() { static thread_local Scratch each; return each; }
  const bf16* known_ = nullptr;
  uint32_t* pairs_ = nullptr;
};

// (W·x + b) + B·z, as the adapter's sum would be added afterwards, for at most `width` columns.
static void write(const Sums& sums, const Sums* deltas, long rows, long width, const Out& out, long row) {
  for (long c = 0; c < std::min(width, out.num_columns); c += L) {
    const __mmask16 mask = __mmask16((1u << std::min<long>(L, out.num_columns - c)) - 1);
    const vf bias = out.bias ? (vf)_mm512_maskz_loadu_ps(mask, out.bias + c) : vf{};
    for (long r = 0; r < rows; r++) {
      vf each = load<vf>(sums.at + r * Sums::STRIDE + c);
      if (out.bias) each += bias;
      if (deltas) each += load<vf>(deltas->at + r * Sums::STRIDE + c);
      _mm512_mask_storeu_ps(out.data + (row + r) * out.stride + c, mask, (__m512)each);
    }
  }
}

// All rows against weight tiles [first, last). A tile is read from memory once and meets all rows while it is in the cache;
// the one behind it is prefetched meanwhile.
static void run_task(const Job& job, long first, long last, const Out& out) {
  const Weights& w = job.w;
  const long bytes = tile_bytes(w), blocks = (job.pairs + TILE - 1) / TILE, steps = job.pairs / UNROLL;
  const bool is_few = job.num_parts == 1 && job.size(0) <= TILE;
  TileShapes shapes;
  Deltas deltas;
  Sums sums, added;
  long num = 1, shaped = 0;
  for (long t = first; t < last; t += num) {
    const char* tile = w.data + t * bytes;
    const Out to{out.data + t * NT, out.stride, out.num_columns - t * NT, out.bias ? out.bias + t * NT : nullptr};
    num = is_few && t + 2 <= last && !job.parts[0].segment ? 2 : 1;
    const long lines = is_few ? UNROLL * 4 * NT / 64 : (bytes / 64 + steps * job.num_parts - 1) / (steps * job.num_parts);
    for (long part = 0; part < job.num_parts; part++) {
      const long rows = job.size(part), done = part * steps * lines * 64;
      if (rows != shaped) shape_rows(shapes, shaped = rows);
      const Ahead ahead = is_few ? Ahead{tile + NEAR, int(lines)}
                                 : Ahead{tile + bytes + done, t + 1 < last && done < bytes ? int(lines) : 0};
      const Form::Pair* x = job.x + job.before(part) * blocks * TILE;
      const char* beside = num == 2 ? tile + bytes : nullptr;
      const long row = job.parts[part].start;
      const Delta delta = job.delta(part, t * NT);
      if (!out.bias && !delta.rank && to.num_columns >= num * NT) {
        multiply(x, rows, tile, beside, job.pairs, ahead, to.data + row * to.stride, to.stride);
        continue;
      }
      multiply(x, rows, tile, beside, job.pairs, ahead, sums.at, Sums::STRIDE);
      if (delta.rank) deltas.multiply(delta, rows, added);
      write(sums, delta.rank ? &added : nullptr, rows, num * NT, to, row);
    }
  }
}

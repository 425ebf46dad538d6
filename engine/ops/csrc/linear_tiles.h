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

static void shape_rows(TileShapes& shapes, long rows) {
  const int first = int(std::min<long>(rows, TILE)), second = int(std::max(rows - TILE, 1L));
  for (int tile : {0, 1, 4}) shapes.set(tile, first);
  for (int tile : {2, 3}) shapes.set(tile, rows > TILE ? second : first);
  shapes.set(5, second);
  for (int tile : {6, 7}) shapes.set(tile, TILE);
  shapes.use();
}

// How the four tiles of sums lie: more than TILE rows by two tiles of columns, or at most TILE rows by as many as four.
struct Shape {
  bool is_tall;
  int columns;  // tiles of them: 1 or 2, with a second weight tile 4

  float* sums_of(int tile, float* to, long stride) const {
    return is_tall ? to + tile / 2 * TILE * stride + tile % 2 * TILE : to + tile * TILE;
  }
};

INLINE __mmask16 columns_left(long count) { return __mmask16((1u << std::clamp<long>(count, 0, L)) - 1); }

INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

INLINE void store_sums(const Shape& shape, float* to, long stride) {
  const long bytes = stride * 4;
  _tile_stored(0, shape.sums_of(0, to, stride), bytes);
  if (shape.columns > 1) _tile_stored(1, shape.sums_of(1, to, stride), bytes);
  if (shape.is_tall || shape.columns > 2) _tile_stored(2, shape.sums_of(2, to, stride), bytes);
  if (shape.columns > (shape.is_tall ? 1 : 2)) _tile_stored(3, shape.sums_of(3, to, stride), bytes);
}

// A block of pairs of some rows, of `stride` bytes each, against one weight tile, or two.
INLINE void multiply_block(const Shape& shape, const void* x, long stride, const char* w, const char* beside) {
  _tile_loadd(4, x, stride);
  _tile_loadd(6, w, 4 * NT);
  _tile_dpbf16ps(0, 4, 6);
  if (shape.columns > 1) {
    _tile_loadd(7, w + TILE_BYTES, 4 * NT);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (shape.is_tall) {
    _tile_loadd(5, (const char*)x + TILE * stride, stride);
    _tile_dpbf16ps(2, 5, 6);
    if (shape.columns > 1) _tile_dpbf16ps(3, 5, 7);
  } else if (shape.columns > 2) {
    _tile_loadd(6, beside, 4 * NT);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, beside + TILE_BYTES, 4 * NT);
    _tile_dpbf16ps(3, 4, 7);
  }
}

// Sums += x · w for laid rows: [blocks][rows][TILE] pairs, zeros behind K.
INLINE void multiply_laid(Shape shape, const Form::Pair* x, long rows, const char* w, const char* beside, long pairs,
                          Ahead ahead) {
  const long whole = pairs / TILE, left = pairs % TILE, block_bytes = TILE * NT * 4;
  const int lines = TILE / UNROLL * ahead.lines / (ahead.apart ? 2 : 1);
  const long apart = beside ? beside - w : ahead.apart;
  for (long b = 0; b < whole; b++) {
    for (int i = 0; i < lines; i++) {
      __builtin_prefetch(ahead.at + 64 * i, 0, 2);
      if (apart) __builtin_prefetch(ahead.at + apart + 64 * i, 0, 2);
    }
    ahead.at += 64 * lines;
    multiply_block(shape, x + b * TILE * rows, TILE_BYTES, w + b * block_bytes, beside ? beside + b * block_bytes : nullptr);
  }
  if (left) {
    alignas(64) uint32_t ends[2][TILE * NT] = {};
    std::memcpy(ends[0], w + whole * block_bytes, left * NT * 4);
    if (beside) std::memcpy(ends[1], beside + whole * block_bytes, left * NT * 4);
    fence_tiles();
    multiply_block(shape, x + whole * TILE * rows, TILE_BYTES, (const char*)ends[0], (const char*)ends[1]);
  }
}

INLINE void multiply(const Shape& shape, const Form::Pair* x, long rows, const char* w, const char* beside, long pairs,
                     const Ahead& ahead) {  // a loop of its own for each shape
  if (shape.is_tall && shape.columns == 2) multiply_laid({true, 2}, x, rows, w, nullptr, pairs, ahead);
  else if (shape.is_tall) multiply_laid({true, 1}, x, rows, w, nullptr, pairs, ahead);
  else if (shape.columns == 4) multiply_laid({false, 4}, x, rows, w, beside, pairs, ahead);
  else if (shape.columns == 2) multiply_laid({false, 2}, x, rows, w, nullptr, pairs, ahead);
  else multiply_laid({false, 1}, x, rows, w, nullptr, pairs, ahead);
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
  alignas(64) float sums[ROWS_TOGETHER * NT] = {};
  for (long s = 0; s < call.num_slices; s++) {
    const Part part(call, segment, s);
    const uint32_t* turned = call.turned[(&segment - call.segments) * call.num_slices + s];
    for (long j = 0; j < stride; j += NT, turned += blocks * TILE * NT) {
      const Shape shape{rows > TILE, part.rank - j > TILE ? 2 : 1};
      if (j < part.rank) {
        zero_sums();
        multiply(shape, x, rows, (const char*)turned, nullptr, blocks * TILE, {nullptr, 0});
        store_sums(shape, sums, NT);
      }
      for (long r = 0; r < rows; r++)
        for (int c = 0; c < NT; c += L)
          store(z + r * ldz + s * stride + j + c, j + c < part.rank ? narrow(load<vf>(sums + r * NT + c)) : vh{});
    }
  }
}

// What adapters add to one weight tile: B of the last one that was met, interleaved.
class Deltas {
 public:
  void add(const Delta& delta, const Shape& shape) {
    if (delta.B != known_) interleave_all(delta);
    for (long j = 0, b = 0; j < delta.rank; j += RANKS, b++)
      multiply_block(shape, delta.z + j, delta.ldz * sizeof(Z), (const char*)(pairs_ + b * TILE * NT), nullptr);
  }

 private:
  void interleave_all(const Delta& delta) {
    static thread_local Scratch room;
    const long blocks = (delta.rank + RANKS - 1) / RANKS;
    pairs_ = room.take<uint32_t>(blocks * TILE * NT);
    for (long b = 0; b < blocks; b++)
      interleave(delta.B + b * RANKS * delta.O, delta.rank - b * RANKS, delta.O, pairs_ + b * TILE * NT);
    known_ = delta.B;
    fence_tiles();
  }
  const bf16* known_ = nullptr;
  uint32_t* pairs_ = nullptr;
};

// Sums begin with the bias of the columns.
static void begin_sums(const Shape& shape, const float* bias, long num_columns) {
  alignas(64) float rows[TILE * 2 * NT];
  for (int c = 0; c < shape.columns * TILE; c += L) {
    const vf each = (vf)_mm512_maskz_loadu_ps(columns_left(num_columns - c), bias + c);
    for (int r = 0; r < TILE; r++) store(rows + r * 2 * NT + c, each);
  }
  fence_tiles();
  constexpr long bytes = 2 * NT * 4;
  _tile_loadd(0, rows, bytes);
  _tile_loadd(1, rows + TILE, bytes);
  if (shape.is_tall) {
    _tile_loadd(2, rows, bytes);
    _tile_loadd(3, rows + TILE, bytes);
  } else if (shape.columns > 2) {
    _tile_loadd(2, rows + 2 * TILE, bytes);
    _tile_loadd(3, rows + 3 * TILE, bytes);
  }
}

// Sums of less columns than the tiles have.
static void store_some(const Shape& shape, long rows, const Out& out, long row) {
  alignas(64) float sums[ROWS_TOGETHER * NT * 2];
  store_sums(shape, sums, 2 * NT);
  for (long r = 0; r < rows; r++)
    for (int c = 0; c < shape.columns * TILE; c += L)
      _mm512_mask_storeu_ps(out.data + (row + r) * out.stride + c, columns_left(out.num_columns - c),
                            (__m512)load<vf>(sums + r * 2 * NT + c));
}

// All rows against weight tiles [first, last). A tile is read from memory once and meets all rows while it is in the cache;
// the one behind it, up to `end`, is prefetched meanwhile.
static void run_task(const Job& job, long first, long last, long end, const Out& out) {
  const Weights& w = job.w;
  const long bytes = tile_bytes(w), blocks = (job.pairs + TILE - 1) / TILE, steps = job.pairs / UNROLL;
  const long half = job.pairs / TILE * (TILE / UNROLL) * 64 / 2;  // of what a part prefetches, for each of its lines
  const bool is_few = job.num_parts == 1 && job.size(0) <= TILE;
  TileShapes shapes;
  Deltas deltas;
  long num = 1, shaped = 0;
  for (long t = first; t < last; t += num) {
    const char* tile = w.data + t * bytes;
    const Out to{out.data + t * NT, out.stride, out.num_columns - t * NT, out.bias ? out.bias + t * NT : nullptr};
    num = is_few && t + 2 <= last && !job.parts[0].segment ? 2 : 1;
    const long lines = is_few ? UNROLL * 4 * NT / 64 : (bytes / 64 + steps * job.num_parts - 1) / (steps * job.num_parts);
    for (long part = 0; part < job.num_parts; part++) {
      const long rows = job.size(part), row = job.parts[part].start, done = part * steps * lines * 64;
      if (rows != shaped) shape_rows(shapes, shaped = rows);
      const Ahead ahead = is_few ? Ahead{tile + NEAR, int(lines)}
                                 : Ahead{tile + bytes + done, t + 1 < end && done < bytes ? int(lines) : 0, half * lines};
      const Shape shape{rows > TILE, int(2 * num)};
      if (to.bias) begin_sums(shape, to.bias, to.num_columns);
      else zero_sums();
      multiply(shape, job.x + job.before(part) * blocks * TILE, rows, tile, num == 2 ? tile + bytes : nullptr, job.pairs,
               ahead);
      const Delta delta = job.delta(part, t * NT);
      if (delta.rank) deltas.add(delta, shape);
      if (to.num_columns >= num * NT) store_sums(shape, to.data + row * to.stride, to.stride);
      else store_some(shape, rows, to, row);
    }
  }
}

// Linear: y = W·x + b for any number of rows, W in bf16, in the library's form of a product; and what
// adapters add to it.
//
// Every output element is summed in one fixed order that does not depend on how many rows share the call, on the
// chunking or on the number of threads: equal inputs give equal bits in every batch.
#pragma once

#include <vector>

#include "lora.h"
#include "pool.h"
#include "weights.h"

constexpr long ROWS_AT_ONCE = 240;  // rows laid out at a time: they stay in the second-level cache
constexpr long NEAR = 4096;         // bytes that few rows prefetch ahead of themselves

struct Ahead {  // what to prefetch meanwhile: `lines` of 64 bytes per tile and UNROLL pairs, from `at` on
  const char* at;
  int lines;
};

struct Out {  // where a linear's result goes: rows of `stride` elements
  float* data;
  long stride, num_columns;
  const float* bias;
};

struct Delta {  // what an adapter adds to a tile for some rows: nothing where rank is 0
  const Z* z = nullptr;
  const bf16* B = nullptr;
  long ldz = 0, rank = 0, O = 0;
};

// acc[r][v] += sum over pairs [first, last) of x[r] · w[v]; x is in blocks of BLOCK_PAIRS pairs for each of R rows.
template <class Tiles, int R, int V>
INLINE void multiply(vf (&acc)[R][V], const Form::Pair* x, const Tiles& tiles, long first, long last,
                     Ahead& ahead) {
  for (long k = first; k < last; k += UNROLL) {
    const Form::Pair* xs = x + k / BLOCK_PAIRS * BLOCK_PAIRS * R + k % BLOCK_PAIRS;
    typename Tiles::Raw raw[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) raw[v] = Tiles::fetch(tiles, k, v);
    for (int t = 0; t < V / 2; t++)
      for (int i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.at + t * tiles.stride + 64 * i, 0, 2);
    ahead.at += 64 * ahead.lines;
#pragma GCC unroll 4
    for (int j = 0; j < UNROLL; j++) {
      if constexpr (Tiles::FORMAT == BF16) {
        const uint32_t* pairs[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) pairs[v] = raw[v] + j * NT;
        accumulate<R, V>(acc, pairs, xs + j);
      } else {
        Form::Operand w[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) w[v] = Tiles::template operand<Form>(raw[v], j);
        accumulate<R, V>(acc, w, xs + j);
      }
    }
  }
}

template <int R, int V> INLINE void write(const vf (&acc)[R][V], const Out& out, long row) {
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      const long col = v * L, left = out.num_columns - col;
      if (left <= 0) continue;
      float* to = out.data + (row + r) * out.stride + col;
      if (left >= L) {
        store(to, out.bias ? acc[r][v] + load<vf>(out.bias + col) : acc[r][v]);
      } else {
        float values[L];
        store(values, acc[r][v]);
        for (long i = 0; i < left; i++) to[i] = values[i] + (out.bias ? out.bias[col + i] : 0.0f);
      }
    }
}

// (W·x + b) + B·z, as the adapter's sum would be added afterwards.
template <int R, int V> INLINE void add_delta(vf (&acc)[R][V], const Out& out, const Delta& delta) {
  vf sums[R][V] = {};
  Wanted nothing;
  deltas<R, V>(sums, delta.z, delta.ldz, delta.B, delta.rank, delta.O, nothing);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = (out.bias ? acc[r][v] + load<vf>(out.bias + v * L) : acc[r][v]) + sums[r][v];
}

// R rows against V/2 tiles.
template <class Tiles, int R, int V>
INLINE void product(const Form::Pair* x, const Tiles& tiles, long pairs, Ahead ahead, const Out& out, long row,
                    const Delta& delta) {
  vf total[R][V] = {};
  multiply<Tiles, R, V>(total, x, tiles, 0, pairs, ahead);
  if constexpr (R >= MAX_R / 2 && V == 2)
    if (delta.rank) {
      add_delta<R, V>(total, out, delta);
      return write<R, V>(total, {out.data, out.stride, out.num_columns, nullptr}, row);
    }
  write<R, V>(total, out, row);
}

// Rows that are multiplied together, at most MAX_R. What an adapter adds is added on the way where all are of `segment`.
struct Rows {
  long start, end;
  const Segment* segment;
};

// One call for some rows, as its tasks see it.
struct Job {
  const Weights& w;
  const Form::Pair* x;  // parts one after the other, each laid out for its number of rows
  const Z* z;           // of rows from parts[0].start on
  long pairs;
  const Rows* parts;
  long num_parts;
  const Lora& lora;

  long size(long part) const { return parts[part].end - parts[part].start; }
  long before(long part) const { return parts[part].start - parts[0].start; }
  Delta delta(long part, long column) const {
    if (!parts[part].segment) return {};
    long s = 0;
    while (lora.slices[s].last <= column) s++;
    const Part each(lora, *parts[part].segment, s);
    const long stride = z_stride(lora), ldz = stride * lora.num_slices;
    return {z + before(part) * ldz + s * stride, each.B + column - lora.slices[s].first, ldz, each.rank, each.O};
  }
};

template <class Tiles, int R>
static void run_tiles(const Job& job, const Tiles& tiles, long part, long num, Ahead ahead, const Out& out,
                      long column) {
  const long padded = (job.pairs + BLOCK_PAIRS - 1) / BLOCK_PAIRS * BLOCK_PAIRS;
  const Form::Pair* x = job.x + job.before(part) * padded;
  const long row = job.parts[part].start;
  if constexpr (2 * R <= MAX_R)
    if (num == 2) return product<Tiles, R, 4>(x, tiles, job.pairs, ahead, out, row, {});
  product<Tiles, R, 2>(x, tiles, job.pairs, ahead, out, row, job.delta(part, column));
}

template <class Tiles, int R = MAX_R>
static void run_rows(const Job& job, const Tiles& tiles, long part, long num, Ahead ahead, const Out& out,
                     long column) {
  if (job.size(part) == R) return run_tiles<Tiles, R>(job, tiles, part, num, ahead, out, column);
  if constexpr (R > 1) run_rows<Tiles, R - 1>(job, tiles, part, num, ahead, out, column);
}

// All rows against tiles [first, last). A tile is read from memory once and meets all rows while it is in the cache;
// the one behind it is prefetched meanwhile.
template <class Tiles> static void run_task(const Job& job, long first, long last, const Out& out) {
  const Weights& w = job.w;
  const long bytes = tile_bytes(w), steps = job.pairs / UNROLL;
  const bool is_few = job.num_parts == 1 && job.size(0) <= MAX_R;
  long num = 1;
  for (long t = first; t < last; t += num) {
    const char* tile = w.data + t * bytes;
    const Out to{out.data + t * NT, out.stride, out.num_columns - t * NT, out.bias ? out.bias + t * NT : nullptr};
    if (is_few) {
      num = 2 * job.size(0) <= MAX_R && t + 2 <= last ? 2 : 1;
      const Ahead ahead{tile + NEAR, int((pair_bytes(w.format) * UNROLL + 63) / 64)};
      run_rows(job, Tiles{tile, bytes}, 0, num, ahead, to, t * NT);
      continue;
    }
    const long lines = (bytes / 64 + steps * job.num_parts - 1) / (steps * job.num_parts);
    const char* next = tile + bytes;
    for (long part = 0; part < job.num_parts; part++) {
      const long done = part * steps * lines * 64;
      const Ahead ahead{next + done, t + 1 < last && done < bytes ? int(lines) : 0};
      run_rows(job, Tiles{tile, 0}, part, 1, ahead, to, t * NT);
    }
  }
}

// Whether an adapter's part is added tile by tile: worth it for many rows, and only where no factor or shift follows.
static bool is_merged(const Lora& lora, const Segment& segment) {
  bool is_plain = segment.end - segment.start >= MAX_R;
  for (long s = 0; s < lora.num_slices && is_plain; s++)
    is_plain = !Part(lora, segment, s).flags && lora.slices[s].first % NT == 0 && lora.slices[s].last % NT == 0;
  return is_plain;
}

// Rows [start, end) as evenly as possible in parts of at most MAX_R.
static void cut(long start, long end, const Segment* segment, std::vector<Rows>& parts) {
  const long count = (end - start + MAX_R - 1) / MAX_R;
  for (long i = 0; i < count; i++)
    parts.push_back({start + (end - start) * i / count, start + (end - start) * (i + 1) / count, segment});
}

static void cut_rows(long M, const Lora& lora, std::vector<Rows>& parts) {
  parts.clear();
  long row = 0;
  for (const Segment* each = lora.segments; each < lora.segments + lora.num_segments; each++)
    if (is_merged(lora, *each)) {
      cut(row, each->start, nullptr, parts);
      cut(each->start, each->end, each, parts);
      row = each->end;
    }
  cut(row, M, nullptr, parts);
}

template <class Tiles> static void run_parts(Job job, long columns, Form::Pair* laid, Z* z, const Out& out) {
  const Lora& lora = job.lora;
  const long blocks = (job.pairs + BLOCK_PAIRS - 1) / BLOCK_PAIRS, tiles = num_tiles(columns);
  const long rows = job.before(job.num_parts - 1) + job.size(job.num_parts - 1);
  for_rows(job.num_parts, rows * job.w.K / 2, [&](long part) {
    const Rows& each = job.parts[part];
    for (long r = 0; r < job.size(part); r++)
      to_pairs(lora.x + (each.start + r) * lora.ldx, job.w.K, job.size(part) * BLOCK_PAIRS,
               laid + (job.before(part) * blocks + r) * BLOCK_PAIRS);
    if (each.segment)
      project_rows(lora, *each.segment, each.start, job.size(part),
                   z + job.before(part) * lora.num_slices * z_stride(lora));
  });
  const long most = 4L * pool.size() * std::max(1L, tiles / (64L * pool.size()));
  const long tasks = std::min(tiles, most);  // equal ones, and as many for every thread
  pool.run(tasks, [&](long task) { run_task<Tiles>(job, tiles * task / tasks, tiles * (task + 1) / tasks, out); });
}

// y = W·x + b of M rows, and what the adapters of their segments make of it.
static void linear(const Weights& w, long M, const float* bias, const Lora& lora) {
  static thread_local std::vector<Rows> parts;
  static thread_local Scratch x_room, z_room;
  cut_rows(M, lora, parts);
  const long pairs = num_pairs(w.K), padded = (pairs + BLOCK_PAIRS - 1) / BLOCK_PAIRS * BLOCK_PAIRS;
  const long most = std::min(M, ROWS_AT_ONCE + MAX_R);
  auto* laid = x_room.take<Form::Pair>(most * padded);
  auto* z = z_room.take<Z>(most * lora.num_slices * z_stride(lora) + 1);
  const Out out{lora.y, lora.ldy, w.N, bias};
  for (size_t first = 0, last; first < parts.size(); first = last) {
    for (last = first + 1; last < parts.size() && parts[last].end - parts[first].start <= ROWS_AT_ONCE;) last++;
    const Job job{w, laid, z, pairs, parts.data() + first, long(last - first), lora};
    run_parts<Bf16Tiles>(job, w.N, laid, z, out);
  }
  run_lora(lora, [&](const Segment& segment) { return is_merged(lora, segment); });
}

// y = W·x for M rows of x, with W [O, H] row-major bf16: what a single adapter brings along for embedding and head.
static void dense(const float* x, long M, long H, long ldx, const bf16* W, long O, float* y, long ldy) {
  constexpr int COLUMNS = 64;
  const long chunks = (O + COLUMNS - 1) / COLUMNS;
  for_rows(chunks, M * O, [=](long chunk) {
    const long o = chunk * COLUMNS, count = std::min<long>(COLUMNS, O - o);
    for (long m = 0; m < M; m += LORA_ROWS) {
      const float* from = x + m * ldx;
      float* to = y + m * ldy + o;
      switch (std::min<long>(LORA_ROWS, M - m)) {
        case 1: shrink<Wide, 1>(from, ldx, W + o * H, count, H, to, ldy, {}); break;
        case 2: shrink<Wide, 2>(from, ldx, W + o * H, count, H, to, ldy, {}); break;
        case 3: shrink<Wide, 3>(from, ldx, W + o * H, count, H, to, ldy, {}); break;
        default: shrink<Wide, 4>(from, ldx, W + o * H, count, H, to, ldy, {});
      }
    }
  });
}

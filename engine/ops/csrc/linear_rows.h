// Rows against the tiles of a linear's weights, by vectors: in the library's form of a product. Knows no thread.
#pragma once

#include "linear_job.h"

constexpr int ROWS_TOGETHER = MAX_R;
constexpr long ROWS_AT_ONCE = 240;  // rows laid out at a time: they stay in the second-level cache

inline Lora prepare(const Lora& call) { return call; }

// acc[r][v] += sum over pairs [first, last) of x[r] · w[v]; x is in blocks of BLOCK_PAIRS pairs for each of R rows.
template <int R, int V>
INLINE void multiply(vf (&acc)[R][V], const Form::Pair* x, const Bf16Tiles& tiles, long first, long last,
                     Ahead& ahead, Far& far) {
  for (long k = first; k < last; k += UNROLL) {
    const Form::Pair* xs = x + k / BLOCK_PAIRS * BLOCK_PAIRS * R + k % BLOCK_PAIRS;
    asm("" : "+r"(xs));  // one address and constant distances from it: else the compiler counts an index for each row
    const uint32_t* raw[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) raw[v] = Bf16Tiles::fetch(tiles, k, v);
    for (int t = 0; t < V / 2; t++)
      for (int i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.at + t * tiles.stride + 64 * i, 0, 2);
    ahead.at += 64 * ahead.lines;
    far.touch();
#pragma GCC unroll 4
    for (int j = 0; j < UNROLL; j++) {
      const uint32_t* pairs[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) pairs[v] = raw[v] + j * NT;
      accumulate<R, V>(acc, pairs, xs + j);
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
template <int R, int V>
INLINE void product(const Form::Pair* x, const Bf16Tiles& tiles, long pairs, Ahead ahead, Far far, const Out& out,
                    long row, const Delta& delta) {
  vf total[R][V] = {};
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) __builtin_prefetch(out.data + (row + r) * out.stride + v * L, 1, 3);
  multiply<R, V>(total, x, tiles, 0, pairs, ahead, far);
  if constexpr (R >= MAX_R / 2 && V == 2)
    if (delta.rank) {
      add_delta<R, V>(total, out, delta);
      return write<R, V>(total, {out.data, out.stride, out.num_columns, nullptr}, row);
    }
  write<R, V>(total, out, row);
}

template <int R>
static void run_tiles(const Job& job, const Bf16Tiles& tiles, long part, long num, Ahead ahead, const Far& far,
                      const Out& out, long column) {
  const long padded = (job.pairs + BLOCK_PAIRS - 1) / BLOCK_PAIRS * BLOCK_PAIRS;
  const Form::Pair* x = job.x + job.before(part) * padded;
  const long row = job.parts[part].start;
  if constexpr (2 * R <= MAX_R)
    if (num == 2) return product<R, 4>(x, tiles, job.pairs, ahead, far, out, row, {});
  product<R, 2>(x, tiles, job.pairs, ahead, far, out, row, job.delta(part, column));
}

template <int R = MAX_R>
static void run_rows(const Job& job, const Bf16Tiles& tiles, long part, long num, Ahead ahead, const Far& far,
                     const Out& out, long column) {
  if (job.size(part) == R) return run_tiles<R>(job, tiles, part, num, ahead, far, out, column);
  if constexpr (R > 1) run_rows<R - 1>(job, tiles, part, num, ahead, far, out, column);
}

// All rows against tiles [first, last). A tile is read from memory once and meets all rows while it is in the cache;
// the one behind it, up to `end`, and what a later operation reads, is prefetched meanwhile.
static void run_task(const Job& job, long first, long last, long end, const Out& out) {
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
      run_rows(job, Bf16Tiles{tile, bytes}, 0, num, ahead, {}, to, t * NT);
      continue;
    }
    const long lines = (bytes / 64 + steps * job.num_parts - 1) / (steps * job.num_parts);
    const char* next = tile + bytes;
    for (long part = 0; part < job.num_parts; part++) {
      const long done = part * steps * lines * 64;
      const Ahead ahead{next + done, t + 1 < end && done < bytes ? int(lines) : 0};
      run_rows(job, Bf16Tiles{tile, 0}, part, 1, ahead, job.far(steps), to, t * NT);
    }
  }
}


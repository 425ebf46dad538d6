// Attention of some rows by matrix tiles. Knows no thread.
//
// Rows are on the left: tile 4 with the pairs of 32 dimensions, tile 5 with those of 16 dimensions or positions. Keys are in
// tile 6, values and the last 16 dimensions of keys in 7, sums in 0 to 3.
#pragma once

#include "attention_job.h"
#include "tiles.h"

constexpr int ROWS_OF_QUERIES = TILE;  // at once
static_assert(BLOCK == TILE && GROUP == 2 * BLOCK && BLOCK_PAIRS == TILE);

INLINE long work_floats(long D) { return ROWS_OF_QUERIES * (4 * D + 4 * GROUP) + 64; }

INLINE void prefetch_lines(const uint32_t* at, long pairs) {
  for (long i = 0; i < pairs; i++) __builtin_prefetch(at + i * BLOCK);
}

// scores[row][GROUP] = q·K of the group; q in blocks of `rows` rows of pairs. The next group's keys are prefetched.
INLINE void match_tiles(float* scores, const uint32_t* q, long rows, const bf16* const (&keys)[GROUP / BLOCK],
                        const bf16* const (&next)[GROUP / BLOCK], long D) {
  const uint32_t *first = (const uint32_t*)keys[0], *second = (const uint32_t*)keys[1];
  _tile_zero(0);
  _tile_zero(1);
  const long pairs = D / 2, whole = pairs / TILE * TILE;
  for (long d = 0; d < whole; d += TILE) {
    prefetch_lines((const uint32_t*)next[0] + d * BLOCK, TILE);
    prefetch_lines((const uint32_t*)next[1] + d * BLOCK, TILE);
    _tile_loadd(4, q + d * rows, TILE_BYTES);
    _tile_loadd(6, first + d * BLOCK, TILE_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(6, second + d * BLOCK, TILE_BYTES);
    _tile_dpbf16ps(1, 4, 6);
  }
  if (whole < pairs) {  // half a block
    _tile_loadd(5, q + whole * rows, TILE_BYTES);
    _tile_loadd(7, first + whole * BLOCK, TILE_BYTES);
    _tile_dpbf16ps(0, 5, 7);
    _tile_loadd(7, second + whole * BLOCK, TILE_BYTES);
    _tile_dpbf16ps(1, 5, 7);
  }
  _tile_stored(0, scores, GROUP * 4);
  _tile_stored(1, scores + BLOCK, GROUP * 4);
}

// Positions of a block for N times 16 dimensions: sums from tile 0 on.
template <int N> INLINE void add_values(const uint32_t* weights, const uint32_t* values, long D) {
  _tile_loadd(5, weights, TILE_BYTES);
  _tile_loadd(7, values, D * 4);
  _tile_dpbf16ps(0, 5, 7);
  if constexpr (N > 1) {
    _tile_loadd(7, values + TILE, D * 4);
    _tile_dpbf16ps(1, 5, 7);
  }
  if constexpr (N > 2) {
    _tile_loadd(7, values + 2 * TILE, D * 4);
    _tile_dpbf16ps(2, 5, 7);
  }
  if constexpr (N > 3) {
    _tile_loadd(7, values + 3 * TILE, D * 4);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// out[row][0 .. N·16) += weights · values over the blocks of the group.
template <int N>
INLINE void blend_tiles(float* out, long D, const uint32_t* weights, const uint32_t* const (&values)[GROUP / BLOCK],
                        long blocks) {
  const long bytes = D * 4;
  _tile_loadd(0, out, bytes);
  if constexpr (N > 1) _tile_loadd(1, out + TILE, bytes);
  if constexpr (N > 2) _tile_loadd(2, out + 2 * TILE, bytes);
  if constexpr (N > 3) _tile_loadd(3, out + 3 * TILE, bytes);
  for (long b = 0; b < blocks; b++) add_values<N>(weights + b * BLOCK / 2, values[b], D);
  _tile_stored(0, out, bytes);
  if constexpr (N > 1) _tile_stored(1, out + TILE, bytes);
  if constexpr (N > 2) _tile_stored(2, out + 2 * TILE, bytes);
  if constexpr (N > 3) _tile_stored(3, out + 3 * TILE, bytes);
}

// At most ROWS_OF_QUERIES rows. `after`: those that this thread is likely to meet next.
static void attend_any(const Attention& at, const Queries& rows, const Queries& after, float* work) {
  const Span span(at, rows), other(at, after);
  const long s = rows.s, kv = rows.kv, row = rows.row, count = rows.count, last = span.end;
  const long D = at.D, G = at.heads / at.kv_heads;
  const long first_position = at.contexts[s] - at.lengths[s];
  const long q_blocks = (D / 2 + TILE - 1) / TILE;
  float* out = work;                                // [count][D]
  float* scores = out + count * D;                  // [count][GROUP]
  uint32_t* q = (uint32_t*)(scores + count * GROUP);  // [q_blocks][count][TILE]
  uint32_t* p = q + q_blocks * count * TILE;        // [count][GROUP / 2]
  Softmax<ROWS_OF_QUERIES> soft;
  long position[ROWS_OF_QUERIES];
  for (long r = 0; r < count; r++) {
    const long t = (row + r) / G, h = kv * G + (row + r) % G;
    const float* from = at.q + (at.starts[s] + t) * at.ldq + h * D;
    float* scaled = out;
    for (long d = 0; d < D; d++) scaled[d] = from[d] * at.scale;
    to_pairs(scaled, D, count * TILE, q + r * TILE);
    position[r] = first_position + t;
    soft.top[r] = -INFINITY;
    soft.total[r] = vf{};
  }
  std::memset(out, 0, sizeof(float) * count * D);
  TileShapes shapes;
  for (int tile : {0, 1, 2, 3, 4}) shapes.set(tile, int(count));
  shapes.set(5, int(count), TILE_BYTES / 2);
  shapes.set(6, TILE);
  shapes.set(7, TILE / 2);
  shapes.use();
  for (long g = span.begin; g < last; g += GROUP) {
    const bf16 *keys[GROUP / BLOCK], *next[GROUP / BLOCK];
    const uint32_t* values[GROUP / BLOCK];
    const long blocks = g + BLOCK < last ? 2 : 1;
    for (int b = 0; b < GROUP / BLOCK; b++) {
      keys[b] = span.keys(g + b * BLOCK);
      next[b] = g + GROUP < last ? span.keys(g + GROUP + b * BLOCK) : other.keys(other.begin + b * BLOCK);
      values[b] = (const uint32_t*)(keys[b] + at.num_blocks * span.block_size);
    }
    match_tiles(scores, q, count, keys, next, D);
    for (long r = 0; r < count; r++) {
      const long from = at.window ? position[r] - at.window + 1 : 0;
      float* of_row = scores + r * GROUP;
      if (g + GROUP > position[r] + 1 || g < from)
        for (int i = 0; i < GROUP; i++)
          if (g + i > position[r] || g + i < from) of_row[i] = -INFINITY;
      vf score[GROUP_V] = {load<vf>(of_row), load<vf>(of_row + L)};
      weigh(soft, int(r), score, out + r * D, D);
      store((bf16*)(p + r * GROUP / 2), narrow(score[0]));
      store((bf16*)(p + r * GROUP / 2) + L, narrow(score[1]));
    }
    for (long b = 0; b < blocks; b++)
      prefetch_lines((const uint32_t*)(next[b] + at.num_blocks * span.block_size), D / 2);
    fence_tiles();
    long d = 0;
    for (; d + 4 * TILE <= D; d += 4 * TILE) {
      blend_tiles<4>(out + d, D, p, values, blocks);
      values[0] += 4 * TILE, values[1] += 4 * TILE;
    }
    switch ((D - d) / TILE) {
      case 1: blend_tiles<1>(out + d, D, p, values, blocks); break;
      case 2: blend_tiles<2>(out + d, D, p, values, blocks); break;
      case 3: blend_tiles<3>(out + d, D, p, values, blocks); break;
    }
  }
  for (long r = 0; r < count; r++) {
    const long t = (row + r) / G, h = kv * G + (row + r) % G;
    const float total = sum(soft.total[r]);
    float* to = at.out + (at.starts[s] + t) * at.ldo + h * D;
    for (long d = 0; d < D; d += L) store(to + d, load<vf>(out + r * D + d) / total);
  }
}

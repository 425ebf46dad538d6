// Attention of some rows by vectors, in the library's form of a product. Knows no thread.
#pragma once

#include "attention_job.h"

constexpr int AHEAD = 2;  // groups: so far ahead of itself a row prefetches
constexpr int GROUP_V = GROUP / L;
constexpr int ROWS_OF_QUERIES = L < 16 ? std::min(MAX_R, 4) : MAX_R;  // at once
constexpr int SUMS_OF_QUERIES = L == 8 ? 8 : 2 * MAX_R;  // at once; with more, a compiler moves some to memory and back

// The softmax of R rows while their positions go by: the largest score so far, the sums of the weights by lane.
template <int R> struct Softmax {
  float top[R];
  vf total[R];
};

// Scores of row r for GROUP positions become weights relative to the largest score so far; what was summed before
// shrinks when a larger one appears.
template <int R>
INLINE void weigh(Softmax<R>& soft, int r, vf (&score)[GROUP_V], float* out, long D) {
  vf m = score[0];
#pragma GCC unroll 8
  for (int c = 1; c < GROUP_V; c++) m = vmax(m, score[c]);
  if (any_above(m, soft.top[r])) {
    const float top = biggest(m), shrink = soft.top[r] == -INFINITY ? 0.0f : std::exp(soft.top[r] - top);
    soft.top[r] = top;
    soft.total[r] *= shrink;
    for (long d = 0; d < D; d += L) store(out + d, load<vf>(out + d) * shrink);
  }
  const float top = soft.top[r] == -INFINITY ? 0.0f : soft.top[r];  // nothing of this group is visible to this row
#pragma GCC unroll 8
  for (int c = 0; c < GROUP_V; c++) {
    const vf x = score[c] - top;
    score[c] = x > -87.0f ? vexp(x) : vf{};
    soft.total[r] += score[c];
  }
}

// score[r][·] = q[r] · keys of the group, as many columns at a time as the registers hold sums; the same lines of a later
// group are prefetched.
template <int R>
INLINE void match(vf (&score)[R][GROUP_V], const Form::Pair* q, const bf16* const (&keys)[GROUP / BLOCK],
                  const bf16* const (&next)[GROUP / BLOCK], long D) {
  constexpr int C = R * GROUP_V <= SUMS_OF_QUERIES ? GROUP_V : 2;
  for (int first = 0; first < GROUP_V; first += C) {
    vf sums[R][C] = {};
    const uint32_t* columns[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
      columns[c] = (const uint32_t*)keys[(first + c) * L / BLOCK] + (first + c) * L % BLOCK;
    for (long d = 0; d < D / 2; d++) {
      const uint32_t* pairs[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) pairs[c] = columns[c] + d * BLOCK;
#pragma GCC unroll 2
      for (int b = first * L / BLOCK; b < (first + C) * L / BLOCK; b++)
        __builtin_prefetch((const uint32_t*)next[b] + d * BLOCK, 0, 2);
      accumulate<R, C>(sums, pairs, q + d / BLOCK_PAIRS * BLOCK_PAIRS * R + d % BLOCK_PAIRS);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) score[r][first + c] = sums[r][c];
  }
}

// out[r][0 .. C·L) += sum over the block's positions of weights[r][position] · values[position].
template <int R, int C>
INLINE void blend(float* out, long D, const Form::Pair* weights, const uint32_t* values, const uint32_t* next) {
  vf acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load<vf>(out + r * D + c * L);
#pragma GCC unroll 2
  for (int i = 0; i < BLOCK / 2; i++) {
    const uint32_t* pairs[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      pairs[c] = values + i * D + c * L;
      if (c * L % 16 == 0) __builtin_prefetch(next + i * D + c * L, 0, 2);
    }
    accumulate<R, C>(acc, pairs, weights + i);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * D + c * L, acc[r][c]);
}

INLINE long work_floats(long D, long) { return ROWS_OF_QUERIES * (4 * D + 4 * BLOCK_PAIRS) + 64; }

// R rows. `after`: those that this thread is likely to meet next.
template <int R>
static void attend(const Attention& at, const Queries& rows, const Queries& after, float* work) {
  typedef Form::Pair Pair;
  const Span span(at, rows), other(at, after);
  const long s = rows.s, kv = rows.kv, row = rows.row, last = span.end;
  const long D = at.D, G = at.heads / at.kv_heads;
  const long first_position = at.contexts[s] - at.lengths[s];
  const long q_blocks = (D / 2 + BLOCK_PAIRS - 1) / BLOCK_PAIRS;
  Pair* q = (Pair*)work;                       // [q_blocks][R][BLOCK_PAIRS]
  Pair* p = q + q_blocks * R * BLOCK_PAIRS;    // [R][GROUP / 2]
  float* out = (float*)(p + R * BLOCK_PAIRS);  // [R][D]
  static_assert(GROUP == 2 * BLOCK_PAIRS);
  Softmax<R> soft;
  long position[R];
  for (int r = 0; r < R; r++) {
    const long t = (row + r) / G, h = kv * G + (row + r) % G;
    const float* from = at.q + (at.starts[s] + t) * at.ldq + h * D;
    float* scaled = out;
    for (long d = 0; d < D; d++) scaled[d] = from[d] * at.scale;
    to_pairs(scaled, D, R * BLOCK_PAIRS, q + r * BLOCK_PAIRS);
    position[r] = first_position + t;
    soft.top[r] = -INFINITY;
    soft.total[r] = vf{};
  }
  std::memset(out, 0, sizeof(float) * R * D);
  for (long g = span.begin; g < last; g += GROUP) {
    const bf16 *keys[GROUP / BLOCK], *next[GROUP / BLOCK];
    for (int b = 0; b < GROUP / BLOCK; b++) {
      keys[b] = span.keys(g + b * BLOCK);
      const long far = g + AHEAD * GROUP, over = far - (last + GROUP - 1) / GROUP * GROUP;
      next[b] = over < 0 ? span.keys(far + b * BLOCK) : other.keys(other.begin + over + b * BLOCK);
    }
    vf score[R][GROUP_V];
    match<R>(score, q, keys, next, D);
    for (int r = 0; r < R; r++) {
      const long from = at.window ? position[r] - at.window + 1 : 0;
      float values[GROUP];
      if (g + GROUP > position[r] + 1 || g < from) {
        std::memcpy(values, score[r], sizeof values);
        for (int i = 0; i < GROUP; i++)
          if (g + i > position[r] || g + i < from) values[i] = -INFINITY;
        std::memcpy(score[r], values, sizeof values);
      }
      weigh<R>(soft, r, score[r], out + r * D, D);
      std::memcpy(values, score[r], sizeof values);
      to_pairs(values, GROUP, R * BLOCK_PAIRS, p + r * BLOCK_PAIRS);
    }
    for (int b = 0; b < GROUP / BLOCK; b++) {
      if (g + b * BLOCK >= last) break;
      const uint32_t* values = (const uint32_t*)(keys[b] + at.num_blocks * span.block_size);
      const uint32_t* later = (const uint32_t*)(next[b] + at.num_blocks * span.block_size);
      const Pair* weights = p + b * BLOCK / 2;
      long d = 0;
      if constexpr (L < 16 && R <= MAX_R / 2 && 4 * R <= SUMS_OF_QUERIES)
        for (; d + 4 * L <= D; d += 4 * L) blend<R, 4>(out + d, D, weights, values + d, later + d);
      for (; d + 2 * L <= D; d += 2 * L) blend<R, 2>(out + d, D, weights, values + d, later + d);
      for (; d < D; d += L) blend<R, 1>(out + d, D, weights, values + d, later + d);
    }
  }
  for (int r = 0; r < R; r++) {
    const long t = (row + r) / G, h = kv * G + (row + r) % G;
    const float total = sum(soft.total[r]);
    float* to = at.out + (at.starts[s] + t) * at.ldo + h * D;
    for (long d = 0; d < D; d += L) store(to + d, load<vf>(out + r * D + d) / total);
  }
}

// One KV head.
template <int R = ROWS_OF_QUERIES>
static void attend_head(const Attention& at, const Queries& rows, const Queries& after, float* work) {
  if (rows.count == R) return attend<R>(at, rows, after, work);
  if constexpr (R > 1) attend_head<R - 1>(at, rows, after, work);
}

static void attend_any(const Attention& at, const Queries& rows, const Queries& after, float* work) {
  Queries one = rows;
  for (long end = rows.kv + rows.heads; one.kv < end;) {
    Queries next = one;
    next.kv++;
    attend_head(at, one, next.kv < end ? next : after, work);
    one = next;
  }
}

// Paged attention, and how keys and values lie in the cache. Knows no model and no policy.
//
// The KV cache of a layer is [2][blocks][K heads][BLOCK·D] bf16, in pairs as a weight tile has them:
//   keys    [D/2][BLOCK] pairs of dimensions     so that q·K is a product with BLOCK columns
//   values  [BLOCK/2][D] pairs of positions      so that p·V is a product with D columns
#pragma once

#include <vector>

#include "pool.h"
#include "vectors.h"

constexpr int BLOCK = 16;       // positions of a KV block
constexpr int GROUP = 32;       // positions of one online-softmax step
constexpr int GROUP_V = GROUP / L;
constexpr int ROWS_OF_QUERIES = L < 16 ? std::min(MAX_R, 4) : MAX_R;  // at once
constexpr int SUMS_OF_QUERIES = L == 8 ? 8 : 2 * MAX_R;  // at once; with more, a compiler moves some to memory and back
constexpr float KV_LIMIT = 65504.0f;

// Only finite numbers are kept: unused slots of a block are read with weight 0, and 0 · NaN is NaN.
INLINE float finite(float x) { return x != x ? 0.0f : std::min(std::max(x, -KV_LIMIT), KV_LIMIT); }
INLINE vf finite(vf x) { return vmin(vmax(x == x ? x : vf{}, splat(-KV_LIMIT)), splat(KV_LIMIT)); }

// D must be a multiple of L.
static void write_kv(const float* k, const float* v, long T, long ldk, long ldv, long heads, long D, bf16* cache,
                     long num_blocks, const int64_t* slots) {
  const long block_size = heads * BLOCK * D;
  for_rows(T, T * heads * D / 4, [=](long t) {
    const long block = slots[t] / BLOCK, offset = slots[t] % BLOCK;
    for (long h = 0; h < heads; h++) {
      bf16* keys = cache + block * block_size + h * BLOCK * D + offset * 2;
      bf16* values = cache + (num_blocks + block) * block_size + h * BLOCK * D + offset / 2 * D * 2 + offset % 2;
      for (long d = 0; d < D; d += L) {
        const vh key = narrow(finite(load<vf>(k + t * ldk + h * D + d)));
        const vh value = narrow(finite(load<vf>(v + t * ldv + h * D + d)));
        bf16 key_parts[L], value_parts[L];
        store(key_parts, key);
        store(value_parts, value);
        for (int i = 0; i < L; i += 2) std::memcpy(keys + (d + i) / 2 * BLOCK * 2, key_parts + i, 2 * sizeof(bf16));
        for (int i = 0; i < L; i++) values[(d + i) * 2] = value_parts[i];
      }
    }
  });
}

struct Attention {
  const float* q;
  long ldq, heads, kv_heads, D;
  const bf16* cache;
  long num_blocks;
  const int64_t *starts, *lengths, *contexts, *tables;
  long table_width;
  float scale;
  long window;  // 0 = none
  float* out;
  long ldo;
};

// Rows [row, row + count) of a sequence's (token, head of the group) pairs, for one KV head.
struct Queries { long s, kv, row; int count; };

// The positions that some of them see, in groups that start at multiples of GROUP, so that a row's sums do not depend on
// where its chunk begins; and where their blocks lie.
struct Span {
  long begin, end, block_size;
  const bf16* cache;
  const int64_t* table;

  Span(const Attention& at, const Queries& rows) {
    const long G = at.heads / at.kv_heads, first = at.contexts[rows.s] - at.lengths[rows.s];
    begin = at.window ? std::max(0L, first + rows.row / G - at.window + 1) / GROUP * GROUP : 0;
    end = first + (rows.row + rows.count - 1) / G + 1;
    block_size = at.kv_heads * BLOCK * at.D;
    cache = at.cache + rows.kv * BLOCK * at.D;
    table = at.tables + rows.s * at.table_width;
  }
  // The block of keys with this position; past the end any, its scores are masked.
  const bf16* keys(long position) const {
    return cache + table[std::min(position, end - 1) / BLOCK] * block_size;
  }
};

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

// score[r][·] = q[r] · keys of the group, as many columns at a time as the registers hold sums; the same lines of the next
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
        __builtin_prefetch((const uint32_t*)next[b] + d * BLOCK);
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
      if (c * L % 16 == 0) __builtin_prefetch(next + i * D + c * L);
    }
    accumulate<R, C>(acc, pairs, weights + i);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * D + c * L, acc[r][c]);
}

INLINE long work_floats(long D) { return ROWS_OF_QUERIES * (4 * D + 4 * BLOCK_PAIRS) + 64; }

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
      next[b] = g + GROUP < last ? span.keys(g + GROUP + b * BLOCK) : other.keys(other.begin + b * BLOCK);
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

template <int R = ROWS_OF_QUERIES>
static void attend_any(const Attention& at, const Queries& rows, const Queries& after, float* work) {
  if (rows.count == R) return attend<R>(at, rows, after, work);
  if constexpr (R > 1) attend_any<R - 1>(at, rows, after, work);
}

// D must be a multiple of L.
static void run_attention(const Attention& at, long num_sequences) {
  static thread_local std::vector<Queries> items;
  items.clear();
  const long G = at.heads / at.kv_heads;
  for (long s = 0; s < num_sequences; s++)
    for (long row = 0, rows = at.lengths[s] * G; row < rows; row += ROWS_OF_QUERIES)
      for (long kv = 0; kv < at.kv_heads; kv++)
        items.push_back({s, kv, row, int(std::min<long>(ROWS_OF_QUERIES, rows - row))});
  const Queries* todo = items.data();
  const long count = items.size();
  pool.run(count, [&at, todo, count](long i) {
    static thread_local Scratch buffer;
    const long other = std::min(i + pool.size(), count - 1);
    attend_any(at, todo[i], todo[other], buffer.take<float>(work_floats(at.D)));
  });
}

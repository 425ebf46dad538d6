// Attention of some rows by matrix tiles. Knows no thread.
//
// Rows are on the left: tile 4 with the pairs of 32 dimensions, tile 5 with those of 16 dimensions or positions. Keys are in
// tile 6, values and the last 16 dimensions of keys in 7, sums in 0 to 3.
#pragma once

#include "attention_job.h"
#include "tiles.h"

constexpr int ROWS_OF_QUERIES = TILE;  // at once
constexpr int BLOCKS = GROUP / BLOCK;  // of a group
static_assert(BLOCK == TILE && BLOCKS % 4 == 0 && BLOCK_PAIRS == TILE);

// Where the keys and values of a group's blocks lie.
struct Group {
  const uint32_t *keys[BLOCKS], *values[BLOCKS];
  long blocks;  // that some row sees

  Group head(long words) const {  // the same blocks, of a head that lies so far behind
    Group other = *this;
    for (long b = 0; b < BLOCKS; b++) other.keys[b] += words, other.values[b] += words;
    return other;
  }

  Group(const Attention& at, const Span& span, long begin) {
    blocks = std::min<long>(BLOCKS, (span.end - begin + BLOCK - 1) / BLOCK);
    for (long b = 0; b < BLOCKS; b++) {
      const bf16* each = span.keys(begin + b * BLOCK);
      keys[b] = (const uint32_t*)each;
      values[b] = (const uint32_t*)(each + at.num_blocks * span.block_size);
    }
  }
};

// What comes next: the blocks of a group, prefetched line by line, keys and values turn about, all heads' of a block.
class Next {
 public:
  Next(const Group& group, long block_bytes, long steps)
      : group_(group), lines_(block_bytes / 64), pace_(int((group.blocks * lines_ + steps - 1) / steps)) {}
  FLAT void step() {
    for (int i = 0; i < pace_ && block_ < group_.blocks; i++) {
      __builtin_prefetch((const char*)group_.keys[block_] + 64 * line_, 0, 2);
      __builtin_prefetch((const char*)group_.values[block_] + 64 * line_, 0, 2);
      if (++line_ == lines_) line_ = 0, block_++;
    }
  }

 private:
  const Group group_;
  const long lines_;
  const int pace_;
  long block_ = 0, line_ = 0;
};

// Four blocks of keys, from `at` on, meet the pairs of rows in tile A.
#define MATCH(A, KEYS, at)                     \
  _tile_loadd(KEYS, keys[0] + at, TILE_BYTES); \
  _tile_dpbf16ps(0, A, KEYS);                  \
  _tile_loadd(KEYS, keys[1] + at, TILE_BYTES); \
  _tile_dpbf16ps(1, A, KEYS);                  \
  _tile_loadd(KEYS, keys[2] + at, TILE_BYTES); \
  _tile_dpbf16ps(2, A, KEYS);                  \
  _tile_loadd(KEYS, keys[3] + at, TILE_BYTES); \
  _tile_dpbf16ps(3, A, KEYS);

// scores[row][4 · BLOCK] = q·K of 4 blocks; q in blocks of `rows` rows of pairs.
INLINE void match_blocks(float* scores, const uint32_t* q, long rows, const uint32_t* const* keys, long D) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const long pairs = D / 2, whole = pairs / TILE * TILE;
  for (long d = 0; d < whole; d += TILE) {
    _tile_loadd(4, q + d * rows, TILE_BYTES);
    MATCH(4, 6, d * BLOCK)
  }
  if (whole < pairs) {  // half a tile
    _tile_loadd(5, q + whole * rows, TILE_BYTES);
    MATCH(5, 7, whole * BLOCK)
  }
  _tile_stored(0, scores, GROUP * 4);
  _tile_stored(1, scores + BLOCK, GROUP * 4);
  _tile_stored(2, scores + 2 * BLOCK, GROUP * 4);
  _tile_stored(3, scores + 3 * BLOCK, GROUP * 4);
}

#undef MATCH

// 2^x for x up to 0 or a little more, 0 below -126 (numbers without a leading one would take the processor a hundred
// cycles); relative error < 2e-7.
INLINE vf power_of_two(vf x) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
  x = vmax(x, splat(-126.0f));
  const vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = x - n;
  vf p = splat(1.5403530e-4f);
  p = p * r + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  return (vf)_mm512_maskz_scalef_ps(is_normal, (__m512)p, (__m512)n);
}

// The softmax of a row while its positions go by: the largest score so far, the sums of the weights by lane.
struct Softmax {
  float top = -INFINITY;
  vf total = {};
};

constexpr float LOG2_E = 1.44269504f;

// A row's scores become weights relative to the largest so far; what was summed before shrinks when a
// larger one appears.
INLINE void weigh(Softmax& soft, const float* scores, long blocks, float* out, long D, bf16* weights) {
  vf most = load<vf>(scores);
  for (long b = 1; b < blocks; b++) most = vmax(most, load<vf>(scores + b * L));
  if (any_above(most, soft.top)) {
    const float top = biggest(most), shrink = soft.top == -INFINITY ? 0.0f : std::exp(soft.top - top);
    soft.top = top;
    soft.total *= shrink;
    for (long d = 0; d < D; d += L) store(out + d, load<vf>(out + d) * shrink);
  }
  const float top = soft.top == -INFINITY ? 0.0f : soft.top * LOG2_E;  // nothing of this group is visible to this row
  vf total = soft.total;
  for (long b = 0; b < blocks; b++) {
    const vf each = power_of_two(load<vf>(scores + b * L) * LOG2_E - top);
    total += each;
    store(weights + b * L, narrow(each));
  }
  soft.total = total;
}

// out[row][d .. d + N·16) += weights · values over the blocks of the group.
template <int N>
INLINE void blend_blocks(float* out, long D, const uint32_t* weights, const Group& group, long d, Next& next) {
  const long bytes = D * 4;
  out += d;
  _tile_loadd(0, out, bytes);
  if constexpr (N > 1) _tile_loadd(1, out + TILE, bytes);
  if constexpr (N > 2) _tile_loadd(2, out + 2 * TILE, bytes);
  if constexpr (N > 3) _tile_loadd(3, out + 3 * TILE, bytes);
  for (long b = 0; b < group.blocks; b++) {
    const uint32_t* values = group.values[b] + d;
    next.step();
    _tile_loadd(5, weights + b * BLOCK / 2, GROUP * 2);
    _tile_loadd(7, values, bytes);
    _tile_dpbf16ps(0, 5, 7);
    if constexpr (N > 1) {
      _tile_loadd(7, values + TILE, bytes);
      _tile_dpbf16ps(1, 5, 7);
    }
    if constexpr (N > 2) {
      _tile_loadd(7, values + 2 * TILE, bytes);
      _tile_dpbf16ps(2, 5, 7);
    }
    if constexpr (N > 3) {
      _tile_loadd(7, values + 3 * TILE, bytes);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, bytes);
  if constexpr (N > 1) _tile_stored(1, out + TILE, bytes);
  if constexpr (N > 2) _tile_stored(2, out + 2 * TILE, bytes);
  if constexpr (N > 3) _tile_stored(3, out + 3 * TILE, bytes);
}

INLINE long work_floats(long D, long heads) {
  return ROWS_OF_QUERIES * (heads * long(2 * D + TILE + sizeof(Softmax) / sizeof(float)) + 2 * GROUP) + 64;
}

// Where the rows of queries of a call are, of which some are computed at once.
struct Place { long t, h; };
INLINE Place place_of(const Attention& at, const Queries& rows, long head, long r) {
  const long G = at.heads / at.kv_heads, row = rows.row + r;
  return {at.starts[rows.s] + row / G, (rows.kv + head) * G + row % G};
}

// At most ROWS_OF_QUERIES rows of some KV heads, head by head for each group of blocks. `after`: those that this thread is
// likely to meet next.
static void attend_any(const Attention& at, const Queries& rows, const Queries& after, float* work) {
  const Span span(at, rows), other(at, after);
  const long s = rows.s, count = rows.count, last = span.end;
  const long D = at.D, G = at.heads / at.kv_heads, head_words = BLOCK * D / 2;
  const long first_position = at.contexts[s] - at.lengths[s];
  const long q_words = (D / 2 + TILE - 1) / TILE * count * TILE;
  float* out = work;                                        // [heads][count][D]
  float* scores = out + rows.heads * count * D;             // [count][GROUP]
  uint32_t* q = (uint32_t*)(scores + count * GROUP);        // [heads][q_words / count / TILE][count][TILE]
  uint32_t* weights = q + rows.heads * q_words;             // [count][GROUP / 2]
  Softmax* soft = (Softmax*)(weights + count * GROUP / 2);  // [heads][count]
  for (long h = 0; h < rows.heads; h++)
    for (long r = 0; r < count; r++) {
      const Place place = place_of(at, rows, h, r);
      const float* from = at.q + place.t * at.ldq + place.h * D;
      for (long d = 0; d < D; d++) out[d] = from[d] * at.scale;
      to_pairs(out, D, count * TILE, q + h * q_words + r * TILE);
      soft[h * count + r] = {};
    }
  std::memset(out, 0, sizeof(float) * rows.heads * count * D);
  TileShapes shapes;
  for (int tile : {0, 1, 2, 3, 4}) shapes.set(tile, int(count));
  shapes.set(5, int(count), TILE_BYTES / 2);
  shapes.set(6, TILE);
  shapes.set(7, TILE / 2);
  shapes.use();
  Group of_all(at, span, span.begin);
  for (long g = span.begin; g < last; g += GROUP) {
    const Group later = g + GROUP < last ? Group(at, span, g + GROUP) : Group(at, other, other.begin);
    Next next(later, rows.heads * head_words * 4, rows.heads * (of_all.blocks + (of_all.blocks + 3) / 4 * 4));
    for (long h = 0; h < rows.heads; h++) {
      const Group group = of_all.head(h * head_words);
      float* of_head = out + h * count * D;
      for (long b = 0; b < group.blocks; b += 4) {
        for (long i = 0; i < 4; i++) next.step();
        match_blocks(scores + b * BLOCK, q + h * q_words, count, group.keys + b, D);
      }
      fence_tiles();
      for (long r = 0; r < count; r++) {
        const long position = first_position + (rows.row + r) / G, from = at.window ? position - at.window + 1 : 0;
        float* of_row = scores + r * GROUP;
        for (long i = std::max(position + 1 - g, 0L); i < group.blocks * BLOCK; i++) of_row[i] = -INFINITY;
        for (long i = 0; i < std::min(from - g, group.blocks * BLOCK); i++) of_row[i] = -INFINITY;
        weigh(soft[h * count + r], of_row, group.blocks, of_head + r * D, D, (bf16*)(weights + r * GROUP / 2));
      }
      fence_tiles();
      long d = 0;
      for (; d + 4 * TILE <= D; d += 4 * TILE) blend_blocks<4>(of_head, D, weights, group, d, next);
      switch ((D - d) / TILE) {
        case 1: blend_blocks<1>(of_head, D, weights, group, d, next); break;
        case 2: blend_blocks<2>(of_head, D, weights, group, d, next); break;
        case 3: blend_blocks<3>(of_head, D, weights, group, d, next); break;
      }
      fence_tiles();
    }
    of_all = later;
  }
  for (long h = 0; h < rows.heads; h++)
    for (long r = 0; r < count; r++) {
      const Place place = place_of(at, rows, h, r);
      const float total = sum(soft[h * count + r].total);
      float* to = at.out + place.t * at.ldo + place.h * D;
      for (long d = 0; d < D; d += L) store(to + d, load<vf>(out + (h * count + r) * D + d) / total);
    }
}

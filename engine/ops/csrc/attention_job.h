// What a call of paged attention is, and how keys and values lie in the cache. Knows no model and no policy.
//
// The KV cache of a layer is [2][blocks][K heads][BLOCK·D] bf16, in pairs as a weight tile has them:
//   keys    [D/2][BLOCK] pairs of dimensions     so that q·K is a product with BLOCK columns
//   values  [BLOCK/2][D] pairs of positions      so that p·V is a product with D columns
#pragma once

#include "vectors.h"

constexpr int BLOCK = 16;       // positions of a KV block
constexpr int GROUP = HAS_TILES ? 128 : 32;  // positions of one online-softmax step

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

// Rows [row, row + count) of a sequence's (token, head of the group) pairs, for KV heads [kv, kv + heads).
struct Queries { long s, kv, heads, row; int count; };

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

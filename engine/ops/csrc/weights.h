// Weights of a linear as they lie in memory: tiles of NT columns, and how a product reads them. Knows no activation.
//
// bf16   [K/2][NT] uint32: two neighbouring k in each, the even one in the low half
// int8   per tile, [groups][NT] bf16 scales, then [K/2][NT] uint16: two neighbouring k in each, from -127 to 127
// int4   per tile, [groups][2][NT] bf16 scales and lowest values, then [K/8][NT] uint32: k even in the low half, odd in
//        the high one, four pairs from the lowest nibble up, each from 0 to 15
//
// K is padded with zeros to a multiple of 8. A quantised weight is number · scale + lowest of its group of k (int8:
// lowest = 0).
#pragma once

#include "vectors.h"

constexpr int NT = 2 * L;  // columns of a tile
constexpr int UNROLL = 4;  // pairs of k at a time

enum Format : int64_t { BF16 = 0, INT8 = 1, INT4 = 2 };

struct Weights {  // as native.py fills it
  const char* data;
  int64_t N, K, format, group;  // group: values of k that share a scale
};

INLINE long num_pairs(long K) { return (K + 7) / 8 * 4; }
INLINE long num_tiles(long N) { return (N + NT - 1) / NT; }
INLINE long num_groups(long K, long group) { return (num_pairs(K) * 2 + group - 1) / group; }
INLINE long group_bytes(long format) { return format == BF16 ? 0 : format == INT8 ? 2 * NT : 4 * NT; }
INLINE long head_bytes(const Weights& w) { return w.format == BF16 ? 0 : num_groups(w.K, w.group) * group_bytes(w.format); }
INLINE long pair_bytes(long format) { return format == BF16 ? 4 * NT : format == INT8 ? 2 * NT : NT; }
INLINE long tile_bytes(const Weights& w) { return head_bytes(w) + num_pairs(w.K) * pair_bytes(w.format); }

// How a product reads tiles: vectors v = 0, 1 are the columns of the first tile, 2, 3 those of the next, …; `at` is its
// first pair. fetch() is where the pairs from k on lie.
struct Bf16Tiles {
  const char* at;
  long stride;
  INLINE const uint32_t* fetch(const Bf16Tiles& t, long k, int v) {
    return (const uint32_t*)(t.at + v / 2 * t.stride) + k * NT + v % 2 * L;
  }
};

// How a product of numbers reads a tile from `at` on: fetch() what UNROLL pairs need of vector v, operand() is pair j of
// them, as 16-bit integers.
struct Int8Tiles {
  static constexpr long PAIR_BYTES = 2 * NT;
  static constexpr bool IS_FAR = true;  // comes from memory
  typedef const int8_t* Raw;
  INLINE Raw fetch(const char* at, int v) { return (const int8_t*)at + 2 * v * L; }
  INLINE vu operand(Raw raw, int j) { return (vu)__builtin_convertvector(load<vb>(raw + j * PAIR_BYTES), vw); }
};

struct Int4Tiles {
  static constexpr long PAIR_BYTES = NT;
  static constexpr bool IS_FAR = true;
  typedef vu Raw;
  INLINE Raw fetch(const char* at, int v) { return load<vu>(at + 4 * v * L); }
  INLINE vu operand(Raw raw, int j) { return raw >> 4 * j & 0x000f000fu; }
};

struct UnpackedTile {
  static constexpr long PAIR_BYTES = 4 * NT;
  static constexpr bool IS_FAR = false;
  typedef const char* Raw;
  INLINE Raw fetch(const char* at, int v) { return at + 4 * v * L; }
  INLINE vu operand(Raw raw, int j) { return load<vu>(raw + j * PAIR_BYTES); }
};

// For products of so many rows that unpacking a tile once per few rows would cost more.
template <class Tiles> INLINE void unpack(const char* tile, long pairs, char* out) {
  for (long k = 0; k < pairs; k += UNROLL, tile += UNROLL * Tiles::PAIR_BYTES)
    for (int v = 0; v < 2; v++) {
      const typename Tiles::Raw raw = Tiles::fetch(tile, v);
#pragma GCC unroll 4
      for (int j = 0; j < UNROLL; j++) store(out + ((k + j) * NT + v * L) * 4, Tiles::operand(raw, j));
    }
}

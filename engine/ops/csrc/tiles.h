// Products by the processor's matrix tiles (AMX): 16 rows of 16 bf16 pairs, by 16 pairs of 16 columns, at once. Knows no
// operation.
//
// A product adds, to each element, the sum of its even terms plus the sum of its odd ones, each in the order of k and in
// fp32: it depends on nothing but the row and the column. add_terms() is the same in vectors, for few rows.
#pragma once

#include "vectors.h"

#if HAS_TILES

#include <unistd.h>
#include <sys/syscall.h>

constexpr int TILE = 16;         // rows, pairs and columns of a tile
constexpr int TILE_BYTES = 64;   // of a row

// Linux gives the registers to a process that asks for them.
static bool may_use_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// The tiles of this thread, as long as it lives: how many rows they have, and bytes of a row.
class TileShapes {
 public:
  TileShapes() = default;
  TileShapes(const TileShapes&) = delete;
  ~TileShapes() { if (shapes_.palette) _tile_release(); }

  void set(int tile, int rows, int bytes = TILE_BYTES) {
    shapes_.rows[tile] = uint8_t(rows);
    shapes_.bytes[tile] = uint16_t(bytes);
  }
  void use() {
    shapes_.palette = 1;
    asm volatile("" ::: "memory");
    _tile_loadconfig(&shapes_);
  }

 private:
  struct alignas(64) {
    uint8_t palette = 0, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes_;
};

// What tiles read has been written, and what they wrote may be read: the compiler does not know their addresses.
INLINE void fence_tiles() { asm volatile("" ::: "memory"); }

// to[c][r] = pair from[r][c] for 16 × 16, zeros for r >= rows. Strides are in elements.
template <class T> INLINE void transpose(const T* from, long stride, int rows, uint32_t* to, long to_stride) {
  vu v[TILE];
#pragma GCC unroll 16
  for (int r = 0; r < TILE; r++) v[r] = r < rows ? load<vu>(from + r * stride) : vu{};
#pragma GCC unroll 4
  for (int step = 1; step < TILE; step *= 2) {
    vi left, right;
    for (int i = 0; i < TILE; i++) {
      left[i] = i & step ? TILE + i - step : i;
      right[i] = i & step ? TILE + i : i + step;
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE; r++) {
      if (r & step) continue;
      const vu a = v[r], b = v[r + step];
      v[r] = (vu)__builtin_shuffle((vi)a, (vi)b, left);
      v[r + step] = (vu)__builtin_shuffle((vi)a, (vi)b, right);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < TILE; r++) store(to + r * to_stride, v[r]);
}

// The same for at most four rows: to[c][r], four elements a row.
INLINE void transpose_four(const uint32_t* from, long stride, int rows, uint32_t* to) {
  const auto row = [&](int r) { return r < rows ? (__m512i)load<vu>(from + r * stride) : _mm512_setzero_si512(); };
  const __m512i a = row(0), b = row(1), c = row(2), d = row(3);
  const __m512i low = _mm512_unpacklo_epi32(a, b), high = _mm512_unpackhi_epi32(a, b);
  const __m512i low2 = _mm512_unpacklo_epi32(c, d), high2 = _mm512_unpackhi_epi32(c, d);
  const __m512i u0 = _mm512_unpacklo_epi64(low, low2), u1 = _mm512_unpackhi_epi64(low, low2);  // column 4q + 0, + 1 in
  const __m512i u2 = _mm512_unpacklo_epi64(high, high2), u3 = _mm512_unpackhi_epi64(high, high2);  // each quarter q
  const __m512i left = _mm512_shuffle_i32x4(u0, u1, 0x44), right = _mm512_shuffle_i32x4(u0, u1, 0xee);
  const __m512i left2 = _mm512_shuffle_i32x4(u2, u3, 0x44), right2 = _mm512_shuffle_i32x4(u2, u3, 0xee);
  store(to, _mm512_shuffle_i32x4(left, left2, 0x88));
  store(to + TILE, _mm512_shuffle_i32x4(left, left2, 0xdd));
  store(to + 2 * TILE, _mm512_shuffle_i32x4(right, right2, 0x88));
  store(to + 3 * TILE, _mm512_shuffle_i32x4(right, right2, 0xdd));
}

#endif

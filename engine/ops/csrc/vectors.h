// Vectors of one instruction set: L floats, bf16 ↔ fp32, and the two forms of a product. Knows no operation.
//
// Written with the compiler's vector extension, so that one source serves every instruction set; the build compiles it
// once for each (compile.py). Only what the extension cannot say is written in intrinsics.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int L = 16, MAX_R = 12;  // 32 registers of 16 floats
#elif defined(__AVX2__)
constexpr int L = 8, MAX_R = 6;  // 16 registers of 8 floats
#elif defined(__aarch64__)
constexpr int L = 4, MAX_R = 12;  // 32 registers of 4 floats
#else
constexpr int L = 4, MAX_R = 5;  // 16 registers of 4 floats
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_DOT 1
#endif

#if HAS_DOT && defined(__AMX_BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(4 * L)));
typedef uint32_t vu __attribute__((vector_size(4 * L)));
typedef int32_t vi __attribute__((vector_size(4 * L)));
typedef uint16_t vh __attribute__((vector_size(2 * L)));
typedef int16_t vs __attribute__((vector_size(2 * L)));
typedef int16_t vw __attribute__((vector_size(4 * L)));
typedef int8_t vb __attribute__((vector_size(2 * L)));

#define FLAT inline __attribute__((always_inline))  // of members
#define INLINE static FLAT

template <class V, class T> INLINE V load(const T* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V, class T> INLINE void store(T* p, V v) { std::memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - vf{}; }
INLINE vu splat(uint32_t x) { return x - vu{}; }
#if defined(__AVX512F__)  // one instruction, of which compilers make five
INLINE vf widen(vh h) { return (vf)((vu)_mm512_cvtepu16_epi32((__m256i)h) << 16); }
#elif defined(__AVX2__)
INLINE vf widen(vh h) { return (vf)((vu)_mm256_cvtepu16_epi32((__m128i)h) << 16); }
#else
INLINE vf widen(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }
#endif
INLINE vf low(vu pair) { return (vf)(pair << 16); }
INLINE vf high(vu pair) { return (vf)(pair & 0xffff0000u); }
INLINE float widen(bf16 h) { uint32_t u = uint32_t(h) << 16; float f; std::memcpy(&f, &u, 4); return f; }
#if defined(__AVX512F__)  // one instruction, of which compilers make two
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
#endif

INLINE bf16 narrow(float x) {  // to nearest even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return x != x ? bf16(u >> 16 | 0x40) : bf16((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

INLINE vh narrow(vf x) {
#if HAS_DOT
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  vu u = (vu)x;
  vu rounded = u + 0x7fffu + ((u >> 16) & 1u);
  vu nan = (vu)(x != x);
  return __builtin_convertvector(((rounded & ~nan) | ((u | 0x400000u) & nan)) >> 16, vh);
#endif
}

// acc += a.even · b.even + a.odd · b.odd of pairs of signed 16-bit integers. The compiler may not add in another order: it
// would keep products instead of sums, more than there are registers.
INLINE void add_products(vi& acc, vu a, vu b) {
#if defined(__AVX512VNNI__)
  acc = (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  acc += (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
  asm("" : "+v"(acc));
#elif defined(__AVX2__)
  acc += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  asm("" : "+x"(acc));
#elif defined(__SSE2__)
  acc += (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
  asm("" : "+x"(acc));
#else
  const vi x = (vi)a, y = (vi)b;
  acc += (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// One fixed tree: neighbours first.
INLINE float sum(vf v) {
  float part[L];
  std::memcpy(part, &v, sizeof v);
  for (int step = 1; step < L; step *= 2)
    for (int i = 0; i < L; i += 2 * step) part[i] += part[i + step];
  return part[0];
}

// The sums of L vectors, by the same tree.
#if defined(__AVX2__) && !defined(__AVX512F__)
INLINE vf sums(vf (&v)[L]) {
  const auto four = [&v](int i) {
    return _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[i], (__m256)v[i + 1]),
                          _mm256_hadd_ps((__m256)v[i + 2], (__m256)v[i + 3]));
  };
  const __m256 first = four(0), second = four(4);
  return (vf)_mm256_permute2f128_ps(first, second, 0x20) + (vf)_mm256_permute2f128_ps(first, second, 0x31);
}
#else
INLINE vf sums(vf (&v)[L]) {
#pragma GCC unroll 8
  for (int step = 1; step < L; step *= 2) {
    vi left, right;
    for (int i = 0; i < L; i++) {
      left[i] = i & step ? L + i - step : i;
      right[i] = i & step ? L + i : i + step;
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; i += 2 * step)
      v[i] = __builtin_shuffle(v[i], v[i + step], left) + __builtin_shuffle(v[i], v[i + step], right);
  }
  return v[0];
}
#endif

#if defined(__AVX512F__)
INLINE float biggest(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE float biggest(vf v) {
  float part[L];
  std::memcpy(part, &v, sizeof v);
  for (int width = L / 2; width; width /= 2)
    for (int i = 0; i < width; i++) part[i] = std::max(part[i], part[i + width]);
  return part[0];
}
#endif

#if defined(__AVX512F__)
INLINE bool any_above(vf v, float limit) {
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
}
INLINE bool any_at_least(vf v, float limit) {
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GE_OQ) != 0;
}
#elif defined(__AVX2__)
INLINE bool any_above(vf v, float limit) {
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
}
INLINE bool any_at_least(vf v, float limit) {
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(limit), _CMP_GE_OQ)) != 0;
}
#else
INLINE bool any_above(vf v, float limit) { return biggest(v > limit ? splat(1.0f) : vf{}) > 0.0f; }
INLINE bool any_at_least(vf v, float limit) { return biggest(v >= limit ? splat(1.0f) : vf{}) > 0.0f; }
#endif

INLINE vf vexp(vf x) {  // e^x for x <= 88, 0 below -87; relative error < 2e-7 (Cephes' polynomial)
  x = vmax(x, splat(-87.3f));
  vf t = x * 1.44269504f;
  vf n = __builtin_convertvector(__builtin_convertvector(t + (t > 0.0f ? splat(0.5f) : splat(-0.5f)), vi), vf);
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

// ------------------------------------------------------------------------------------------- forms of a product
//
// Two ways to multiply bf16 weights, which come in pairs of neighbouring k (k in the low half of 32 bits, k+1 in the
// high one), with activations. Which is faster depends on the machine: on some the dot product has twice the rate of
// the fp32 FMA, on others half of it. A library has one, `Form`. An activation as the form reads it is a Form::Pair.
//
//   Wide  weights widened in registers (a shift, a mask), activations and sums in fp32
//   Dot   the machine's dot product of bf16 pairs: activations rounded to bf16, sums in fp32

struct Wide {
  struct Pair { float even, odd; };
  struct Operand { vf even, odd; };
  INLINE Operand operand(vu pair) { return {low(pair), high(pair)}; }
  INLINE vf add(vf acc, Operand w, Pair x) { acc += x.even * w.even; return acc + x.odd * w.odd; }
};

#if HAS_DOT
struct Dot {
  typedef uint32_t Pair;
  typedef vu Operand;
  INLINE vu operand(vu pair) { return pair; }
  INLINE vf add(vf acc, vu w, vu x) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x); }
  INLINE vf add(vf acc, vu w, uint32_t x) { return add(acc, w, splat(x)); }
};
typedef Dot Form;
#else
typedef Wide Form;
#endif

constexpr int BLOCK_PAIRS = 16;  // activations are laid out in blocks of so many pairs

// acc[r][v] += w[v] · x[r] for one pair of k.
template <int R, int V>
INLINE void accumulate(vf (&acc)[R][V], const Form::Operand (&w)[V], const Form::Pair* x) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const Form::Pair each = x[r * BLOCK_PAIRS];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) acc[r][v] = Form::add(acc[r][v], w[v], each);
  }
}

// One half of a pair in memory. It is read once more for it, from the nearest cache: kept from the other half, it would push
// sums out of the registers.
template <bool IS_ODD> INLINE vf half_of(const uint32_t* pair) {
  asm volatile("" : "+r"(pair));
  return IS_ODD ? high(load<vu>(pair)) : low(load<vu>(pair));
}
template <bool IS_ODD> INLINE vf half_of(const Wide::Pair& x) { return splat(IS_ODD ? x.odd : x.even); }

template <bool IS_ODD, int R, int V>
INLINE void add_half(vf (&acc)[R][V], const uint32_t* const (&weights)[V], const Wide::Pair* x) {
  if constexpr (V <= R) {
    vf w[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) w[v] = half_of<IS_ODD>(weights[v]);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const vf each = half_of<IS_ODD>(x[r * BLOCK_PAIRS]);
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) acc[r][v] += each * w[v];
    }
  } else {
    vf all[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) all[r] = half_of<IS_ODD>(x[r * BLOCK_PAIRS]);
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      const vf w = half_of<IS_ODD>(weights[v]);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) acc[r][v] += all[r] * w;
    }
  }
}

// The same, from memory. Where registers are few and sums are many, by halves: in the order of Wide::add.
template <int R, int V>
INLINE void accumulate(vf (&acc)[R][V], const uint32_t* const (&weights)[V], const Form::Pair* x) {
  if constexpr (std::is_same_v<Form, Wide> && L < 16 && R * V >= 10) {
    add_half<false, R, V>(acc, weights, x);
    add_half<true, R, V>(acc, weights, x);
  } else {
    Form::Operand w[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) w[v] = Form::operand(load<vu>(weights[v]));
    accumulate<R, V>(acc, w, x);
  }
}

// Pairs of row[0 .. count), zeros behind it, in blocks of BLOCK_PAIRS that lie `stride` pairs apart.
INLINE void to_pairs(const float* row, long count, long stride, Wide::Pair* out) {
  for (long k = 0; k < count; k += 2 * BLOCK_PAIRS, out += stride) {
    const long here = std::min<long>(2 * BLOCK_PAIRS, count - k);
    std::memcpy(out, row + k, sizeof(float) * here);
    if (here < 2 * BLOCK_PAIRS) std::memset((float*)out + here, 0, sizeof(float) * (2 * BLOCK_PAIRS - here));
  }
}

#if HAS_DOT
INLINE void to_block(const float* from, uint32_t* out) {
  store(out, _mm512_cvtne2ps_pbh((__m512)load<vf>(from + L), (__m512)load<vf>(from)));
}

INLINE void to_pairs(const float* row, long count, long stride, uint32_t* out) {
  long k = 0;
  for (; k + 2 * BLOCK_PAIRS <= count; k += 2 * BLOCK_PAIRS, out += stride) to_block(row + k, out);
  if (k == count) return;
  float padded[2 * BLOCK_PAIRS] = {};
  std::memcpy(padded, row + k, sizeof(float) * (count - k));
  to_block(padded, out);
}
#endif

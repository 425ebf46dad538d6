// Batched LoRA by vectors: some rows of one adapter at a time. Knows no tile.
//
// Sums run in one order that depends on nothing but the row and its adapter.
#pragma once

#include "lora_call.h"

constexpr int LORA_ROWS = 4;            // at once
constexpr int SUMS = L >= 16 ? 16 : 8;  // under way at once
constexpr int AT_ONCE = L >= 16 ? 1 : 4;      // steps between two prefetches, which cost short vectors more

// Products along rows of memory, STEP elements at a time: x as the form reads it.
template <class F> struct Along {
  typedef float X;
  typedef vf V;
  static constexpr int STEP = L;
  INLINE vf weights(const bf16* a) { return widen(load<vh>(a)); }
  INLINE vf add(vf acc, vf a, vf x) { return acc + x * a; }
  INLINE float value(float x) { return x; }
};

#if HAS_DOT
template <> struct Along<Dot> {
  typedef bf16 X;
  typedef vu V;
  static constexpr int STEP = 2 * L;
  INLINE vu weights(const bf16* a) { return load<vu>(a); }
  INLINE vf add(vf acc, vu a, vu x) { return Dot::add(acc, a, x); }
  INLINE float value(bf16 x) { return widen(x); }
};
#endif

// acc[row][n] += x[row] · A[n] for STEPS · STEP elements.
template <class F, int R, int N, int STEPS>
INLINE void match_rows(vf (&acc)[R * N], const typename Along<F>::X* x, long ldx, const bf16* A, long H) {
  typedef Along<F> On;
#pragma GCC unroll 4
  for (int i = 0; i < STEPS * On::STEP; i += On::STEP) {
    typename On::V xs[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      xs[r] = load<typename On::V>(x + r * ldx + i);
#if defined(__AVX2__) && !defined(__AVX512F__)
      if (N > 1) asm("" : "+x"(xs[r]));  // one load for N products
#endif
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
      const typename On::V a = On::weights(A + n * H + i);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r * N + n] = On::add(acc[r * N + n], a, xs[r]);
    }
  }
}

// z[row][j .. j + N) = A[j .. j + N)·x for R rows.
template <class F, int R, int N>
INLINE void shrink_part(const typename Along<F>::X* x, long ldx, const bf16* A, long H, float* z, long ldz,
                        Wanted& wanted) {
  typedef Along<F> On;
  vf acc[R * N] = {};
  long h = 0;
  for (; h + AT_ONCE * On::STEP <= H; h += AT_ONCE * On::STEP) {
    wanted.step(AT_ONCE);
    match_rows<F, R, N, AT_ONCE>(acc, x + h, ldx, A + h, H);
  }
  for (; AT_ONCE > 1 && h + On::STEP <= H; h += On::STEP) match_rows<F, R, N, 1>(acc, x + h, ldx, A + h, H);
  constexpr int SOME = L < 16 && R * N > 1 ? (R * N + L - 1) / L * L : R * N;  // zeros behind them cost less than sum()
  float total[SOME];
  if constexpr (SOME % L == 0) {
#pragma GCC unroll 4
    for (int i = 0; i < SOME; i += L) {
      vf some[L];
#pragma GCC unroll 16
      for (int l = 0; l < L; l++) some[l] = i + l < R * N ? acc[i + l] : vf{};
      store(total + i, sums(some));
    }
  } else {
    for (int i = 0; i < R * N; i++) total[i] = sum(acc[i]);
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) {
      float tail = 0.0f;
      for (long i = h; i < H; i++) tail += On::value(x[r * ldx + i]) * widen(A[n * H + i]);
      z[r * ldz + n] = total[r * N + n] + tail;
    }
}

// z[row][rank] = A·x for R rows, A [rank, H].
template <class F, int R>
INLINE void shrink(const typename Along<F>::X* x, long ldx, const bf16* A, long rank, long H, float* z, long ldz,
                   Wanted wanted) {
  constexpr int N = R == 3 ? SUMS / 4 : SUMS / R;
  long j = 0;
  for (; j + N <= rank; j += N) shrink_part<F, R, N>(x, ldx, A + j * H, H, z + j, ldz, wanted);
  for (; j < rank; j++) shrink_part<F, R, 1>(x, ldx, A + j * H, H, z + j, ldz, wanted);
}

constexpr int shrink_steps(long rank, long H, int R, int step) {
  return int(std::max(1L, rank * R / SUMS) * (H / step));
}

// Vectors of y that R rows are summed in at once: where registers are few, as many as they hold beside B.
constexpr int vectors_at_once(int R) { return MAX_R < 12 && R > 2 ? 2 : 4; }

constexpr long expand_steps(long rank, long O, int R) {
  if (L >= 16) return rank * 16 / (L * Along<Form>::STEP) * O / 64 + 1;
  return rank * (O / (vectors_at_once(R) * L)) + 1;
}

// sums[row][0 .. V·L) += sum over j of z[row][j] · B[j] for R rows, in the wide form.
template <int R, int V>
INLINE void deltas(vf (&sums)[R][V], const float* z, long ldz, const bf16* B, long rank, long O, Wanted& wanted) {
  for (long j = 0; j < rank; j++) {
    wanted.step();
    vf b[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) b[v] = widen(load<vh>(B + j * O + v * L));
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] += z[r * ldz + j] * b[v];
  }
}

#if HAS_DOT
// The same in the other form: rows j and j+1 of B become pairs. Behind an odd rank, z has a zero.
template <int R, int V>
INLINE void deltas(vf (&sums)[R][V], const bf16* z, long ldz, const bf16* B, long rank, long O, Wanted& wanted) {
  alignas(64) static constexpr uint16_t FIRST[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(FIRST), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  static_assert(V % 2 == 0);
  for (long j = 0; j < rank; j += 2) {
    wanted.step();
    vu b[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v += 2) {
      const __m512i even = (__m512i)load<vu>(B + j * O + v * L);
      const __m512i odd = j + 1 < rank ? (__m512i)load<vu>(B + (j + 1) * O + v * L) : _mm512_setzero_si512();
      b[v] = (vu)_mm512_permutex2var_epi16(even, first, odd);
      b[v + 1] = (vu)_mm512_permutex2var_epi16(even, second, odd);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const uint32_t both = load<uint32_t>(z + r * ldz + j);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = Dot::add(sums[r][v], b[v], both);
    }
  }
}
#endif

template <int R, int V>
INLINE void expand_part(float* y, long ldy, const Along<Form>::X* z, long ldz, const bf16* B, long rank, long O,
                        Wanted& wanted) {
  vf sums[R][V] = {};
  deltas<R, V>(sums, z, ldz, B, rank, O, wanted);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(y + r * ldy + v * L, load<vf>(y + r * ldy + v * L) + sums[r][v]);
}

// y[row] += Bᵀ·z[row] for R rows, B [rank, O].
template <int R>
INLINE void expand(float* y, long ldy, const Along<Form>::X* z, long ldz, const bf16* B, long rank, long O,
                   Wanted wanted) {
  long o = 0;
  if constexpr (vectors_at_once(R) == 4)
    for (; o + 4 * L <= O; o += 4 * L) expand_part<R, 4>(y + o, ldy, z, ldz, B + o, rank, O, wanted);
  for (; o + 2 * L <= O; o += 2 * L) expand_part<R, 2>(y + o, ldy, z, ldz, B + o, rank, O, wanted);
  for (; o < O; o++)
    for (int r = 0; r < R; r++) {
      float total = 0.0f;
      for (long j = 0; j < rank; j++) total += Along<Form>::value(z[r * ldz + j]) * widen(B[j * O + o]);
      y[r * ldy + o] += total;
    }
}

#if !HAS_TILES

constexpr int LORA_TOGETHER = LORA_ROWS;  // rows of an adapter that one thread takes at once

// Rows as the form reads them: themselves, or rounded into `room`.
INLINE const float* rows_of(const float* x, long& ldx, int, long, float*) { (void)ldx; return x; }
INLINE const bf16* rows_of(const float* x, long& ldx, int rows, long H, bf16* room) {
  const long padded = (H + 31) / 32 * 32;
  for (int r = 0; r < rows; r++) {
    long h = 0;
    for (; h + L <= H; h += L) store(room + r * padded + h, narrow(load<vf>(x + r * ldx + h)));
    for (; h < H; h++) room[r * padded + h] = narrow(x[r * ldx + h]);
  }
  ldx = padded;
  return room;
}

typedef Along<Form>::X Z;  // A·x as B is multiplied with it

INLINE long z_stride(const Lora& call) { return (call.max_rank + 1) / 2 * 2; }

// z[row] = A·x[row] for R rows, as expand() reads it; `room` holds R · z_stride floats.
template <int R>
INLINE void project(const Lora& call, const Z* x, long ldx, const Part& part, Z* z, long ldz, float* room, Wanted wanted) {
  if constexpr (std::is_same_v<Z, float>) {
    shrink<Form, R>(x, ldx, part.A, part.rank, call.H, z, ldz, wanted);
  } else {
    const long stride = z_stride(call);
    shrink<Form, R>(x, ldx, part.A, part.rank, call.H, room, stride, wanted);
    for (int r = 0; r < R; r++) {
      for (long j = 0; j < part.rank; j++) z[r * ldz + j] = narrow(room[r * stride + j]);
      if (part.rank % 2) z[r * ldz + part.rank] = 0;
    }
  }
}

// R rows of one adapter. `after`: the part that this thread is likely to meet next.
template <int R>
static void adapt(const Lora& call, const Segment& segment, long row, const Part& after) {
  static thread_local Scratch x_room, z_room, room;
  long ldx = call.ldx;
  const long ldz = z_stride(call);
  const Z* x = rows_of(call.x + row * call.ldx, ldx, R, call.H, x_room.take<Z>(R * ((call.H + 31) / 32 * 32)));
  Z* z = z_room.take<Z>(R * ldz);
  for (long s = 0; s < call.num_slices; s++) {
    const Part part(call, segment, s), next = s + 1 < call.num_slices ? Part(call, segment, s + 1) : after;
    float* y = call.y + row * call.ldy + call.slices[s].first;
    if (part.rank) {
      const long rank = part.rank;
      const Wanted b(part.B, rank * part.O * 2, shrink_steps(rank, call.H, R, Along<Form>::STEP));
      const Wanted a(next.A, next.rank * call.H * 2, expand_steps(rank, part.O, R));
      project<R>(call, x, ldx, part, z, ldz, room.take<float>(R * ldz), b);
      expand<R>(y, call.ldy, z, ldz, part.B, rank, part.O, a);
    }
    rescale(segment, part, y, call.ldy, R);
  }
}

static void adapt(const Lora& call, const Segment& segment, long row, int count, const Part& after) {
  switch (count) {
    case 1: return adapt<1>(call, segment, row, after);
    case 2: return adapt<2>(call, segment, row, after);
    case 3: return adapt<3>(call, segment, row, after);
    default: return adapt<4>(call, segment, row, after);
  }
}

// z of every slice for rows [row, row + count) of one adapter: [row][slice][z_stride].
static void project_rows(const Lora& call, const Segment& segment, long row, const Form::Pair*, long count, Z* z) {
  static thread_local Scratch x_room, room;
  const long ldz = call.num_slices * z_stride(call);
  for (long r = 0; r < count; r += LORA_ROWS) {
    const int num = int(std::min<long>(LORA_ROWS, count - r));
    long ldx = call.ldx;
    Z* space = x_room.take<Z>(LORA_ROWS * ((call.H + 31) / 32 * 32));
    const Z* x = rows_of(call.x + (row + r) * call.ldx, ldx, num, call.H, space);
    for (long s = 0; s < call.num_slices; s++) {
      const Part part(call, segment, s);
      Z* to = z + r * ldz + s * z_stride(call);
      float* wide = room.take<float>(LORA_ROWS * z_stride(call));
      switch (num) {
        case 1: project<1>(call, x, ldx, part, to, ldz, wide, {}); break;
        case 2: project<2>(call, x, ldx, part, to, ldz, wide, {}); break;
        case 3: project<3>(call, x, ldx, part, to, ldz, wide, {}); break;
        default: project<4>(call, x, ldx, part, to, ldz, wide, {});
      }
    }
  }
}

#endif

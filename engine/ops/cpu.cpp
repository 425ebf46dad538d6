// Native CPU operations of engine/ops/cpu.py: weights, KV and adapters in bf16, everything between two ops in fp32.
// Knows no Python, no torch, no policy.
//
// Every output element is summed in one fixed order that does not depend on how many rows share the call, on the
// chunking or on the number of threads: equal inputs give equal bits in every batch.
//
// Written with the compiler's vector extension, so that one source serves every instruction set (the build picks it).
// bf16 products: on many x86 cores the fp32 FMA unit has twice the rate of the bf16 dot product, so bf16 is widened in
// registers (a shift, a mask) and multiplied in fp32.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

#include <sched.h>

#if defined(__AVX512F__)
constexpr int L = 16, MAX_R = 12;  // 32 registers of 16 floats
#elif defined(__AVX2__)
constexpr int L = 8, MAX_R = 5;  // 16 registers of 8 floats
#else
constexpr int L = 4, MAX_R = 12;  // 32 registers of 4 floats (NEON)
#endif
constexpr int NT = 2 * L;      // columns of a packed weight tile
constexpr int BLOCK = 16;      // positions of a KV block
constexpr int GROUP = 32;      // positions of one online-softmax step
constexpr int GROUP_V = GROUP / L;
constexpr long ROWS_AT_ONCE = 240;  // rows widened to fp32 at a time: 240 x 1536 x 4 bytes stay in a 2 MiB L2

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(4 * L)));
typedef uint32_t vu __attribute__((vector_size(4 * L)));
typedef int32_t vi __attribute__((vector_size(4 * L)));
typedef uint16_t vh __attribute__((vector_size(2 * L)));

#define INLINE static inline __attribute__((always_inline))

template <class V, class T> INLINE V load(const T* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V, class T> INLINE void store(T* p, V v) { std::memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - vf{}; }
INLINE vf widen(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }
INLINE vf low(vu pair) { return (vf)(pair << 16); }
INLINE vf high(vu pair) { return (vf)(pair & 0xffff0000u); }
INLINE float widen1(bf16 h) { uint32_t u = uint32_t(h) << 16; float f; std::memcpy(&f, &u, 4); return f; }

INLINE vh narrow(vf x) {  // round to nearest even; NaN stays NaN
  vu u = (vu)x;
  vu rounded = u + 0x7fffu + ((u >> 16) & 1u);
  vu nan = (vu)(x != x);
  return __builtin_convertvector(((rounded & ~nan) | ((u | 0x400000u) & nan)) >> 16, vh);
}

INLINE float sum(vf v) {
  float part[L];
  std::memcpy(part, &v, sizeof v);
  for (int width = L / 2; width; width /= 2)
    for (int i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
}

INLINE float biggest(vf v) {
  float part[L];
  std::memcpy(part, &v, sizeof v);
  float m = part[0];
  for (int i = 1; i < L; i++) m = std::max(m, part[i]);
  return m;
}

INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

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

// ---------------------------------------------------------------------------------------------------- threads
//
// Tasks are claimed one by one, and the caller works too: it waits only for tasks that a helper has begun. A helper that
// the system does not schedule (two busy processes on two cores are enough) costs its help, not a time slice per call,
// which is what a fork-join with a barrier pays. One caller at a time: the engine's step loop.

INLINE void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  void resize(int num_threads) {
    for (; helpers_ < num_threads - 1; helpers_++) std::thread([this] { help(); }).detach();
    wanted_ = num_threads;
  }
  int size() const { return wanted_; }

  template <class F> void run(long count, const F& task) {
    if (wanted_ == 1 || count < 2 || is_taken_.test_and_set(std::memory_order_acquire)) {
      for (long i = 0; i < count; i++) task(i);  // alone: also while another thread (one that loads) has the helpers
      return;
    }
    const uint64_t closed = ((state_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | CLOSED;
    state_.store(closed);  // nobody can claim while the job is exchanged
    call_.store([](const void* f, long i) { (*static_cast<const F*>(f))(i); }, std::memory_order_relaxed);
    data_.store(&task, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    state_.store(((closed >> 32) + 1) << 32);
    state_.notify_all();
    while (claim()) {}
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++)
      if (spins < 4096) pause_cpu();
      else sched_yield();
    is_taken_.clear(std::memory_order_release);
  }

 private:
  static constexpr uint64_t CLOSED = 0xffffffff;
  static constexpr int SPINS = 4096;  // about 0.1 ms: longer than the gap between two operations of a step
  using Call = void (*)(const void*, long);

  bool claim() {  // runs one task of the current job; false if none is left
    uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
      const long index = long(state & CLOSED);
      const Call call = call_.load(std::memory_order_relaxed);
      const void* data = data_.load(std::memory_order_relaxed);
      if (index >= count_.load(std::memory_order_relaxed)) return false;
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      call(data, index);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  }

  void help() {
    for (;;) {
      while (claim()) {}
      const uint64_t seen = state_.load(std::memory_order_acquire);
      int spins = 0;
      while (state_.load(std::memory_order_relaxed) >> 32 == seen >> 32 && spins++ < SPINS) pause_cpu();
      if (spins > SPINS) state_.wait(seen);
    }
  }

  std::atomic<uint64_t> state_{CLOSED};  // job number, index of its next task
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> data_{nullptr};
  std::atomic<long> count_{0};
  std::atomic<long> done_{0};
  std::atomic_flag is_taken_ = ATOMIC_FLAG_INIT;
  int helpers_ = 0, wanted_ = 1;
};

static Pool& pool = *new Pool;  // never destroyed: helpers outlive main()

extern "C" void chorus_set_threads(int num_threads) { pool.resize(std::max(1, num_threads)); }

// task(i) for i in [0, count), in parts that are worth handing over when `work` (elements) is large.
template <class F> static void for_rows(long count, long work, const F& task) {
  const long step = work < 16384 ? count : std::max(1L, count / (4 * pool.size()));
  if (!count) return;
  pool.run((count + step - 1) / step, [&](long part) {
    for (long i = part * step; i < std::min(count, (part + 1) * step); i++) task(i);
  });
}

// A buffer of the calling thread that only grows: no allocation in a running server.
INLINE float* scratch(std::vector<float>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

// acc[r][v] += sum over k of x[k][r] * w[k][v], for 2*kp values of k: x is [2*kp][R] fp32, w is C tiles of
// [kp][NT] pairs (k in the low half, k+1 in the high one), `stride` apart.
template <int R, int C>
INLINE void multiply(vf (&acc)[R][2 * C], const float* x, const uint32_t* w, long kp, long stride) {
  for (long k = 0; k < kp; k++) {
    vu pair[2 * C];
#pragma GCC unroll 16
    for (int c = 0; c < 2 * C; c++) {
      const uint32_t* at = w + (c / 2) * stride + k * NT + (c % 2) * L;
      pair[c] = load<vu>(at);
      __builtin_prefetch(at + 16 * NT);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      float b = x[2 * k * R + r];
#pragma GCC unroll 16
      for (int c = 0; c < 2 * C; c++) acc[r][c] += b * low(pair[c]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      float b = x[(2 * k + 1) * R + r];
#pragma GCC unroll 16
      for (int c = 0; c < 2 * C; c++) acc[r][c] += b * high(pair[c]);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- linear

struct Out {  // where a linear's result goes: rows of `stride` elements
  float* data;
  long stride, num_columns;
  const float* bias;
};

template <int R, int C>
INLINE void tile(const float* x, const uint32_t* w, long kp, const Out& out, long row, long column) {
  vf acc[R][2 * C] = {};
  multiply<R, C>(acc, x, w, kp, kp * NT);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 2 * C; c++) {
      const long col = column + c * L, left = out.num_columns - col;
      if (left <= 0) continue;
      float* to = out.data + (row + r) * out.stride + col;
      if (left >= L) {
        store(to, out.bias ? acc[r][c] + load<vf>(out.bias + col) : acc[r][c]);
      } else {
        float values[L];
        store(values, acc[r][c]);
        for (long i = 0; i < left; i++) to[i] = values[i] + (out.bias ? out.bias[col + i] : 0.0f);
      }
    }
}

// Rows [row, row + R) against tiles [first, last).
template <int R>
static void rows(const float* x, const uint32_t* w, long kp, const Out& out, long row, long first, long last) {
  constexpr int C = R > MAX_R / 2 ? 1 : std::min(4, MAX_R / R);
  long t = first;
  if constexpr (C > 1)
    for (; t + C <= last; t += C) tile<R, C>(x, w + t * kp * NT, kp, out, row, t * NT);
  for (; t < last; t++) tile<R, 1>(x, w + t * kp * NT, kp, out, row, t * NT);
}

template <int R>
static void dispatch(int r, const float* x, const uint32_t* w, long kp, const Out& out, long row, long a, long b) {
  if (r == R) return rows<R>(x, w, kp, out, row, a, b);
  if constexpr (R > 1) dispatch<R - 1>(r, x, w, kp, out, row, a, b);
}

// [rows][K] → [K][rows], K padded with zeros to `padded`.
INLINE void transpose(const float* x, long stride, int count, long K, long padded, float* out) {
  for (int r = 0; r < count; r++)
    for (long k = 0; k < K; k++) out[k * count + r] = x[r * stride + k];
  for (long k = K * count; k < padded * count; k++) out[k] = 0.0f;
}

// How the rows of a chunk are cut: as evenly as possible into parts of at most MAX_R.
INLINE long num_parts(long M) { return (M + MAX_R - 1) / MAX_R; }
INLINE long part_start(long M, long parts, long i) { return M * i / parts; }

extern "C" long chorus_packed_size(long N, long K) { return (N + NT - 1) / NT * ((K + 1) / 2) * NT + 16 * NT; }

// W [N, K] bf16 → tiles [N/NT][K/2][NT] of pairs, zero-padded; the tail is room for prefetching.
extern "C" void chorus_pack(const bf16* W, long N, long K, uint32_t* out) {
  long tiles = (N + NT - 1) / NT, kp = (K + 1) / 2;
  pool.run(tiles, [=](long t) {
    for (long k = 0; k < kp; k++)
      for (long c = 0; c < NT; c++) {
        long n = t * NT + c;
        uint32_t lo = n < N ? W[n * K + 2 * k] : 0;
        uint32_t hi = n < N && 2 * k + 1 < K ? W[n * K + 2 * k + 1] : 0;
        out[(t * kp + k) * NT + c] = lo | hi << 16;
      }
  });
  std::memset(out + tiles * kp * NT, 0, 16 * NT * sizeof(uint32_t));
}

// y[m] = W·x[m] + bias, W as packed by chorus_pack.
extern "C" void chorus_linear(const float* x, long M, long K, long ldx, const uint32_t* w, long N, const float* bias,
                              float* y, long ldy) {
  static thread_local std::vector<float> buffer;
  const long kp = (K + 1) / 2, padded = 2 * kp, tiles = (N + NT - 1) / NT;
  float* wide = scratch(buffer, std::min(M, ROWS_AT_ONCE) * padded);
  for (long begin = 0; begin < M; begin += ROWS_AT_ONCE) {
    const long count = std::min(ROWS_AT_ONCE, M - begin), parts = num_parts(count);
    pool.run(parts, [=](long i) {
      const long a = part_start(count, parts, i), b = part_start(count, parts, i + 1);
      transpose(x + (begin + a) * ldx, ldx, int(b - a), K, padded, wide + a * padded);
    });
    // A tile of weights is read from memory once and meets all rows of the chunk while it is in the cache. Few rows:
    // several tiles at a time, so that enough sums are under way.
    const long step = parts > 1 ? 1 : std::clamp(tiles / (4 * pool.size()) / 4 * 4, 4L, 16L);
    pool.run((tiles + step - 1) / step, [=](long task) {
      const long t = task * step, num = std::min(step, tiles - t);
      const Out out{y + t * NT, ldy, N - t * NT, bias ? bias + t * NT : nullptr};
      for (long i = 0; i < parts; i++) {
        const long a = part_start(count, parts, i), b = part_start(count, parts, i + 1);
        dispatch<MAX_R>(int(b - a), wide + a * padded, w + t * kp * NT, kp, out, begin + a, 0, num);
      }
    });
  }
}

// ------------------------------------------------------------------------------------------------- attention
//
// The KV cache of a layer is [2][blocks][K heads][BLOCK·D] bf16, in pairs as a weight tile has them:
//   keys    [D/2][BLOCK] pairs of dimensions     so that q·K is a product with BLOCK columns
//   values  [BLOCK/2][D] pairs of positions      so that p·V is a product with D columns

// Only finite numbers are kept: unused slots of a block are read with weight 0, and 0 · NaN is NaN.
INLINE bf16 finite(float x) {
  return narrow(splat(x != x ? 0.0f : std::min(std::max(x, -65504.0f), 65504.0f)))[0];
}

extern "C" void chorus_write_kv(const float* k, const float* v, long T, long ldk, long ldv, long heads, long D,
                                bf16* cache, long num_blocks, const int64_t* slots) {
  long block_size = heads * BLOCK * D;
  for_rows(T, T * heads * D, [=](long t) {
    long block = slots[t] / BLOCK, offset = slots[t] % BLOCK;
    for (long h = 0; h < heads; h++) {
      bf16* keys = cache + block * block_size + h * BLOCK * D;
      bf16* values = keys + num_blocks * block_size;
      for (long d = 0; d < D; d++) {
        keys[(d / 2 * BLOCK + offset) * 2 + d % 2] = finite(k[t * ldk + h * D + d]);
        values[(offset / 2 * D + d) * 2 + offset % 2] = finite(v[t * ldv + h * D + d]);
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

// out[r][0..C·L) += sum over the block's positions of weights[position][r] · values[position].
template <int R, int C>
INLINE void blend(float* out, long D, const float* weights, const uint32_t* values) {
  vf acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load<vf>(out + r * D + c * L);
  for (int i = 0; i < BLOCK / 2; i++) {
    vu pair[C];
    for (int c = 0; c < C; c++) pair[c] = load<vu>(values + i * D + c * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) acc[r][c] += weights[2 * i * R + r] * low(pair[c]);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) acc[r][c] += weights[(2 * i + 1) * R + r] * high(pair[c]);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * D + c * L, acc[r][c]);
}

// Rows [row, row + R) of a sequence's (token, head of the group) pairs, for one KV head.
template <int R>
static void attend(const Attention& at, long s, long kv, long row, float* work) {
  const long D = at.D, G = at.heads / at.kv_heads, block_size = at.kv_heads * BLOCK * D;
  const long first_position = at.contexts[s] - at.lengths[s];
  float* q = work;                  // [D][R]
  float* p = q + D * R;             // [GROUP][R]
  float* out = p + GROUP * R;       // [R][D]
  float top[R], total[R];
  long position[R];
  for (int r = 0; r < R; r++) {
    long t = (row + r) / G, h = kv * G + (row + r) % G;
    const float* from = at.q + (at.starts[s] + t) * at.ldq + h * D;
    for (long d = 0; d < D; d++) q[d * R + r] = from[d] * at.scale;
    position[r] = first_position + t;
    top[r] = -INFINITY;
    total[r] = 0.0f;
  }
  std::memset(out, 0, sizeof(float) * R * D);
  const long last = position[R - 1] + 1;
  const long begin = at.window ? std::max(0L, position[0] - at.window + 1) / GROUP * GROUP : 0;
  for (long g = begin; g < last; g += GROUP) {
    const bf16* keys[GROUP / BLOCK];
    for (int b = 0; b < GROUP / BLOCK; b++) {
      long index = std::min(g / BLOCK + b, (last - 1) / BLOCK);  // past the end: any block, its scores are masked
      keys[b] = at.cache + at.tables[s * at.table_width + index] * block_size + kv * BLOCK * D;
    }
    vf score[R][GROUP_V] = {};
    for (long d = 0; d < D / 2; d++) {
      vu pair[GROUP_V];
#pragma GCC unroll 16
      for (int c = 0; c < GROUP_V; c++)
        pair[c] = load<vu>((const uint32_t*)keys[c * L / BLOCK] + d * BLOCK + c * L % BLOCK);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        float a = q[2 * d * R + r], b = q[(2 * d + 1) * R + r];
#pragma GCC unroll 16
        for (int c = 0; c < GROUP_V; c++) score[r][c] += a * low(pair[c]);
#pragma GCC unroll 16
        for (int c = 0; c < GROUP_V; c++) score[r][c] += b * high(pair[c]);
      }
    }
    for (int r = 0; r < R; r++) {
      const long from = at.window ? position[r] - at.window + 1 : 0;
      float values[GROUP];
      std::memcpy(values, score[r], sizeof values);
      if (g + GROUP > position[r] + 1 || g < from)
        for (int i = 0; i < GROUP; i++)
          if (g + i > position[r] || g + i < from) values[i] = -INFINITY;
      vf m = load<vf>(values);
      for (int c = 1; c < GROUP_V; c++) m = vmax(m, load<vf>(values + c * L));
      float new_top = std::max(top[r], biggest(m));
      if (new_top == -INFINITY) {  // nothing of this group is visible to this row
        for (int i = 0; i < GROUP; i++) p[i * R + r] = 0.0f;
        continue;
      }
      vf part = {};
      for (int c = 0; c < GROUP_V; c++) {
        vf x = load<vf>(values + c * L) - new_top;
        vf e = x > -87.0f ? vexp(x) : vf{};
        store(values + c * L, e);
        part += e;
      }
      float shrink = top[r] == -INFINITY ? 0.0f : std::exp(top[r] - new_top);
      total[r] = total[r] * shrink + sum(part);
      top[r] = new_top;
      if (shrink != 1.0f)
        for (long d = 0; d < D; d++) out[r * D + d] *= shrink;
      for (int i = 0; i < GROUP; i++) p[i * R + r] = values[i];
    }
    for (int b = 0; b < GROUP / BLOCK; b++) {
      if (g + b * BLOCK >= last) break;
      const uint32_t* values = (const uint32_t*)(keys[b] + at.num_blocks * block_size);
      const float* weights = p + b * BLOCK * R;
      long d = 0;
      for (; d + 2 * L <= D; d += 2 * L) blend<R, 2>(out + d, D, weights, values + d);
      for (; d < D; d += L) blend<R, 1>(out + d, D, weights, values + d);
    }
  }
  for (int r = 0; r < R; r++) {
    long t = (row + r) / G, h = kv * G + (row + r) % G;
    float* to = at.out + (at.starts[s] + t) * at.ldo + h * D;
    for (long d = 0; d < D; d += L) store(to + d, load<vf>(out + r * D + d) / total[r]);
  }
}

template <int R>
static void attend_any(int r, const Attention& at, long s, long kv, long row, float* work) {
  if (r == R) return attend<R>(at, s, kv, row, work);
  if constexpr (R > 1) attend_any<R - 1>(r, at, s, kv, row, work);
}

// D must be a multiple of L.
extern "C" void chorus_attention(const float* q, long ldq, long heads, long kv_heads, long D, const bf16* cache,
                                 long num_blocks, long S, const int64_t* starts, const int64_t* lengths,
                                 const int64_t* contexts, const int64_t* tables, long table_width, double scale,
                                 long window, float* out, long ldo) {
  Attention at{q, ldq, heads, kv_heads, D, cache, num_blocks, starts, lengths, contexts, tables, table_width,
               float(scale), window, out, ldo};
  struct Item { long s, kv, row; int count; };
  static thread_local std::vector<Item> items;
  items.clear();
  const long G = heads / kv_heads;
  for (long s = 0; s < S; s++)
    for (long row = 0, rows = lengths[s] * G; row < rows; row += MAX_R)
      for (long kv = 0; kv < kv_heads; kv++) items.push_back({s, kv, row, int(std::min<long>(MAX_R, rows - row))});
  const Item* todo = items.data();
  pool.run(items.size(), [&](long i) {
    static thread_local std::vector<float> buffer;
    float* work = scratch(buffer, MAX_R * (2 * D + GROUP));
    attend_any<MAX_R>(todo[i].count, at, todo[i].s, todo[i].kv, todo[i].row, work);
  });
}

// ---------------------------------------------------------------------------------------------- element-wise

// y = x / sqrt(mean(x²) + eps) · w for each of M rows of H; with `residual`, first residual += x, and it is normalised.
extern "C" void chorus_rms_norm(const float* x, long M, long H, long ldx, float* residual, long ldr,
                                const float* weight, double eps, float* y, long ldy) {
  for_rows(M, M * H, [=](long m) {
    const float* from = x + m * ldx;
    if (residual) {
      float* kept = residual + m * ldr;
      for (long h = 0; h < H; h++) kept[h] += from[h];
      from = kept;
    }
    vf square = {};
    float tail = 0.0f;
    long h = 0;
    for (; h + L <= H; h += L) { vf v = load<vf>(from + h); square += v * v; }
    for (; h < H; h++) tail += from[h] * from[h];
    const float factor = 1.0f / std::sqrt((sum(square) + tail) / float(H) + float(eps));
    for (h = 0; h < H; h++) y[m * ldy + h] = from[h] * factor * weight[h];
  });
}

// y = silu(gate) · up, with gate | up side by side in each row of 2·I.
extern "C" void chorus_silu_mul(const float* x, long M, long I, long ldx, float* y, long ldy) {
  for_rows(M, M * I, [=](long m) {
    const float *gate = x + m * ldx, *up = gate + I;
    float* to = y + m * ldy;
    long i = 0;
    for (; i + L <= I; i += L) {
      vf g = load<vf>(gate + i);
      store(to + i, g / (1.0f + vexp(vmin(-g, splat(88.0f)))) * load<vf>(up + i));
    }
    for (; i < I; i++) to[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  });
}

// Rotates the halves of `heads` heads of D at the start of each row, in place: (a, b) → (a·cos − b·sin, b·cos + a·sin),
// with cos, sin [T, D/2] rows of `ldc`.
extern "C" void chorus_rope(float* x, long T, long ldx, long heads, long D, const float* cos, const float* sin,
                            long ldc) {
  const long half = D / 2;
  for_rows(T, T * heads * D, [=](long t) {
    const float *c = cos + t * ldc, *s = sin + t * ldc;
    for (long h = 0; h < heads; h++) {
      float *a = x + t * ldx + h * D, *b = a + half;
      for (long d = 0; d < half; d++) {
        const float first = a[d], second = b[d];
        a[d] = first * c[d] - second * s[d];
        b[d] = second * c[d] + first * s[d];
      }
    }
  });
}

// ------------------------------------------------------------------------------------------------------ LoRA

struct Slice { int64_t module, first, last; };  // columns [first, last) of y belong to this module

struct Segment {
  int64_t start, end;        // rows
  const bf16* arena;         // the adapter's extent
  const int64_t* directory;  // [layers][modules][fields]
};

// As adapters/loader.py packs; g and c are fp32.
constexpr int MODULES = 14, FIELDS = 6, OFFSET_A = 0, OFFSET_B = 1, RANK = 2, FLAGS = 3, OFFSET_C = 4, OFFSET_G = 5;
constexpr int UNIT = 16, HAS_G = 1, HAS_C = 2;

// z[row][rank] = A·x for `rows` rows, A [rank, H].
template <int R>
INLINE void shrink(const float* x, long ldx, const bf16* A, long rank, long H, float* z, long ldz) {
  constexpr int Q = R == 1 ? 8 : R == 2 ? 4 : 4;  // rank rows at once
  auto part = [&](auto count, long j) {
    constexpr int N = decltype(count)::value;
    vf acc[R][N] = {};
    long h = 0;
    for (; h + L <= H; h += L) {
      vf xs[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) xs[r] = load<vf>(x + r * ldx + h);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        vf a = widen(load<vh>(A + (j + n) * H + h));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][n] += xs[r] * a;
      }
    }
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) {
        float tail = 0.0f;
        for (long i = h; i < H; i++) tail += x[r * ldx + i] * widen1(A[(j + n) * H + i]);
        z[r * ldz + j + n] = sum(acc[r][n]) + tail;
      }
  };
  long j = 0;
  for (; j + Q <= rank; j += Q) part(std::integral_constant<int, Q>{}, j);
  for (; j < rank; j++) part(std::integral_constant<int, 1>{}, j);
}

// y[row][o] += sum over j of z[row][j] · B[j][o], for R rows.
template <int R>
INLINE void expand(float* y, long ldy, const float* z, long ldz, const bf16* B, long rank, long O) {
  constexpr int C = R == 1 ? 4 : 2;
  auto part = [&](auto count, long o) {
    constexpr int N = decltype(count)::value;
    vf acc[R][N] = {};
    for (long j = 0; j < rank; j++) {
      vf b[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) b[n] = widen(load<vh>(B + j * O + o + n * L));
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        float weight = z[r * ldz + j];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[r][n] += weight * b[n];
      }
    }
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) {
        float* at = y + r * ldy + o + n * L;
        store(at, load<vf>(at) + acc[r][n]);
      }
  };
  long o = 0;
  for (; o + C * L <= O; o += C * L) part(std::integral_constant<int, C>{}, o);
  for (; o + L <= O; o += L) part(std::integral_constant<int, 1>{}, o);
  for (; o < O; o++)
    for (int r = 0; r < R; r++) {
      float total = 0.0f;
      for (long j = 0; j < rank; j++) total += z[r * ldz + j] * widen1(B[j * O + o]);
      y[r * ldy + o] += total;
    }
}

// y[row][o] = g[o] · y[row][o] + c[o], for `rows` rows of O; without g it is 1, without c 0.
INLINE void rescale(float* y, long ldy, int rows, long O, const float* g, const float* c) {
  for (int r = 0; r < rows; r++)
    for (long o = 0; o < O; o++) {
      float value = y[r * ldy + o];
      if (g) value *= g[o];
      if (c) value += c[o];
      y[r * ldy + o] = value;
    }
}

// y[t, first:last] = g ∘ (y[t, first:last] + B·(A·x[t])) + c for each slice and each row t of a segment. Rows outside
// segments are not touched.
extern "C" void chorus_lora(float* y, long ldy, const float* x, long ldx, long H, long num_segments,
                            const Segment* segments, long layer, long num_slices, const Slice* slices,
                            long max_rank) {
  constexpr int R = 4;  // rows at once
  struct Item { const Segment* segment; long row; int count; };
  static thread_local std::vector<Item> items;
  items.clear();
  for (long i = 0; i < num_segments; i++)
    for (long row = segments[i].start; row < segments[i].end; row += R)
      items.push_back({segments + i, row, int(std::min<long>(R, segments[i].end - row))});
  const Item* todo = items.data();
  const long ldz = max_rank;
  pool.run(items.size(), [=](long i) {
    static thread_local std::vector<float> buffer;
    float* z = scratch(buffer, R * ldz);
    const Item& item = todo[i];
    const float* from = x + item.row * ldx;
    for (long s = 0; s < num_slices; s++) {
      const int64_t* entry = item.segment->directory + (layer * MODULES + slices[s].module) * FIELDS;
      const long rank = entry[RANK], flags = entry[FLAGS];
      if (!rank && !flags) continue;
      const bf16* A = item.segment->arena + entry[OFFSET_A] * UNIT;
      const bf16* B = item.segment->arena + entry[OFFSET_B] * UNIT;
      float* to = y + item.row * ldy + slices[s].first;
      const long O = slices[s].last - slices[s].first;
      if (rank) switch (item.count) {
        case 1: shrink<1>(from, ldx, A, rank, H, z, ldz); expand<1>(to, ldy, z, ldz, B, rank, O); break;
        case 2: shrink<2>(from, ldx, A, rank, H, z, ldz); expand<2>(to, ldy, z, ldz, B, rank, O); break;
        case 3: shrink<3>(from, ldx, A, rank, H, z, ldz); expand<3>(to, ldy, z, ldz, B, rank, O); break;
        default: shrink<4>(from, ldx, A, rank, H, z, ldz); expand<4>(to, ldy, z, ldz, B, rank, O);
      }
      if (flags) {
        auto vector = [&](int flag, int field) {
          return flags & flag ? (const float*)(item.segment->arena + entry[field] * UNIT) : nullptr;
        };
        rescale(to, ldy, item.count, O, vector(HAS_G, OFFSET_G), vector(HAS_C, OFFSET_C));
      }
    }
  });
}

// y = W·x for M rows of x, with W [O, H] row-major bf16: what a single adapter brings along for embedding and head.
extern "C" void chorus_dense(const float* x, long M, long H, long ldx, const bf16* W, long O, float* y, long ldy) {
  constexpr int R = 4, COLUMNS = 64;
  const long chunks = (O + COLUMNS - 1) / COLUMNS;
  for_rows(chunks, M * O, [=](long chunk) {
    const long o = chunk * COLUMNS, count = std::min<long>(COLUMNS, O - o);
    for (long m = 0; m < M; m += R) {
      const float* from = x + m * ldx;
      float* to = y + m * ldy + o;
      switch (std::min<long>(R, M - m)) {
        case 1: shrink<1>(from, ldx, W + o * H, count, H, to, ldy); break;
        case 2: shrink<2>(from, ldx, W + o * H, count, H, to, ldy); break;
        case 3: shrink<3>(from, ldx, W + o * H, count, H, to, ldy); break;
        default: shrink<4>(from, ldx, W + o * H, count, H, to, ldy);
      }
    }
  });
}

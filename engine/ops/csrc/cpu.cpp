// Native CPU operations of engine/ops/native.py: weights, KV and adapters in 16 bits or less, everything between two
// operations in fp32. Knows no Python, no torch, no policy. Compiled once per instruction set (engine/ops/compile.py).

#include <chrono>

#include "attention.h"
#include "elementwise.h"
#include "kv_write.h"
#include "linear.h"
#include "lora.h"
#include "moves.h"
#include "quantise.h"
#include "quantised.h"
#include "sampling.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void chorus_set_threads(int num_threads) { pool.resize(std::max(1, num_threads)); }

// Whether this process may use what the library was compiled for; false: open another one.
EXPORT int chorus_may_run() {
#if HAS_TILES
  return may_use_tiles();
#else
  return 1;
#endif
}

EXPORT int chorus_rounds_activations() { return !std::is_same_v<Form, Wide>; }

// Seconds that this core takes for some products of bf16 in a form: the least of several runs.
template <class F> static double time_products() {
  constexpr int R = 12, STEPS = 4000;
  alignas(64) static uint32_t weights[8 * L];
  static typename F::Pair x[R];
  vf acc[R] = {};
  double least = 1.0;
  for (int run = 0; run < 15; run++) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < STEPS; i++) {
      const typename F::Operand w = F::operand(load<vu>(weights + i % 8 * L));
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) acc[r] = F::add(acc[r], w, x[r]);
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    least = std::min(least, elapsed.count());
  }
  for (int r = 0; r < R; r++) asm volatile("" : : "x"(acc[r]));
  return least;
}

// How many times faster this library's form is than the wide one.
EXPORT double chorus_dot_speedup() { return time_products<Wide>() / time_products<Form>(); }

EXPORT long chorus_packed_bytes(const Weights* w) { return num_tiles(w->N) * tile_bytes(*w); }
EXPORT void chorus_pack(const Weights* w, const bf16* W, const Inputs* inputs, char* out) { pack(*w, W, inputs, out); }
EXPORT void chorus_squares(const Weights* w, float* out) { squares(*w, out); }

EXPORT void chorus_move(const void* stored, long is_wide, const Move* moves, long count, bf16* buffer) {
  if (is_wide) move_all(static_cast<const float*>(stored), moves, count, buffer);
  else move_all(static_cast<const bf16*>(stored), moves, count, buffer);
}

// ------------------------------------------------------------------------------------------------------- tape
//
// An operation is a row of a tape: its number (its place in OPERATIONS), then its arguments: integers, addresses, and
// doubles by their bits. Operations are run one at a time, or as many as were recorded (engine/ops/tape.py).

constexpr int ROW = 20;
typedef const int64_t* Args;

template <class T> static T* at(int64_t address) { return reinterpret_cast<T*>(address); }
static double number(int64_t bits) { double x; std::memcpy(&x, &bits, 8); return x; }

static void run_linear(const Weights& w, long M, const float* bias, const Lora& lora) {
  if (w.format == BF16) return linear(w, M, bias, lora);
  quantised_linear(w, M, lora.x, lora.ldx, {lora.y, lora.ldy, w.N, bias});
  run_lora(lora, [](const Segment&) { return false; });
}

static void do_linear(Args a) {
  // weights, bias, M, y, ldy, x, ldx, H, segments, their number, layer, slices, their number, largest rank
  const Lora lora{at<float>(a[3]), a[4], at<const float>(a[5]), a[6], a[7], a[9], at<const Segment>(a[8]),
                  a[10], a[12], at<const Slice>(a[11]), a[13]};
  run_linear(*at<const Weights>(a[0]), a[2], at<const float>(a[1]), lora);
}

static void do_lora(Args a) {  // y, ldy, x, ldx, H, segments, their number, layer, slices, their number, largest rank
  const Lora lora{at<float>(a[0]), a[1], at<const float>(a[2]), a[3], a[4], a[6], at<const Segment>(a[5]),
                  a[7], a[9], at<const Slice>(a[8]), a[10]};
  run_lora(lora, [](const Segment&) { return false; });
}

static void do_write_kv(Args a) {  // k, ldk, v, ldv, T, heads, D, cache, blocks, slots
  write_kv({at<const float>(a[0]), at<const float>(a[2]), a[1], a[3], a[5], a[6], at<bf16>(a[7]), a[8],
            at<const int64_t>(a[9])}, a[4]);
}

static Attention attention_of(Args a) {
  // q, ldq, heads, KV heads, D, cache, blocks, starts, lengths, contexts, tables, width, scale, window, out, ldo, rows
  return {at<const float>(a[0]), a[1], a[2], a[3], a[4], at<const bf16>(a[5]), a[6],
          at<const int64_t>(a[7]), at<const int64_t>(a[8]), at<const int64_t>(a[9]),
          at<const int64_t>(a[10]), a[11], float(number(a[12])), a[13], at<float>(a[14]), a[15]};
}

static void do_attention(Args a) { run_attention(attention_of(a), a[16]); }

static void do_rms_norm(Args a) {  // x, ldx, heads, M, H, residual, ldr, weight, eps, y, ldy
  rms_norm(at<const float>(a[0]), a[3], a[4], a[1], a[2], at<float>(a[5]), a[6], at<const float>(a[7]), number(a[8]),
           at<float>(a[9]), a[10]);
}

static void do_silu_mul(Args a) {  // x, ldx, M, I, y, ldy
  silu_mul(at<const float>(a[0]), a[2], a[3], a[1], at<float>(a[4]), a[5]);
}

static void do_rope(Args a) {  // x, ldx, T, heads, D, cos, sin, ldc
  rope(at<float>(a[0]), a[2], a[1], a[3], a[4], at<const float>(a[5]), at<const float>(a[6]), a[7]);
}

static void do_dense(Args a) {  // x, ldx, M, H, W, O, y, ldy
  dense(at<const float>(a[0]), a[2], a[3], a[1], at<const bf16>(a[4]), a[5], at<float>(a[6]), a[7]);
}

static void do_draw(Args a) {  // logits, ld, S, V, temperatures, limits, draws, tokens
  draw(at<const float>(a[0]), a[1], a[2], a[3], at<const float>(a[4]), at<const double>(a[5]), at<const double>(a[6]),
       at<int64_t>(a[7]));
}

static void do_greedy(Args a) {  // logits, ld, S, V, tokens, whether they are sound
  greedy(at<const float>(a[0]), a[1], a[2], a[3], at<int64_t>(a[4]), at<int64_t>(a[5]));
}

static void (*const OPERATIONS[])(Args) = {do_linear, do_lora,     do_write_kv, do_attention,
                                           do_rms_norm, do_silu_mul, do_rope,     do_dense,
                                           do_draw,     do_greedy};

// The linears between here and the next attention read its blocks ahead, but for those by tiles: these wait for memory.
static void foresee(const int64_t* tape, const int64_t* end) {
  if (HAS_TILES) return;
  while (tape < end && OPERATIONS[*tape] != do_attention) tape += ROW;
  if (tape < end) foresee(attention_of(tape + 1), tape[17], coming);
}

template <class F> static void run_tape(const int64_t* tape, long count, const F& before) {
  const int64_t* end = tape + count * ROW;
  if (count > 1) foresee(tape, end);
  for (long row = 0; row < count; row++, tape += ROW) {
    before(row, OPERATIONS[*tape]);
    OPERATIONS[*tape](tape + 1);
    if (count > 1 && OPERATIONS[*tape] == do_attention) foresee(tape + ROW, end);
  }
  coming.clear(0);
}

EXPORT void chorus_run(const int64_t* tape, long count) { run_tape(tape, count, [](long, void (*)(Args)) {}); }

// Rows for which a thread reads all weights of a format, and unpacks them, rather than wait for the others after each
// operation. Tiles multiply so fast that few rows wait for memory, and weights are read twice in vain.
EXPORT long chorus_least_part(long format) { return HAS_TILES ? 48 : format == BF16 ? 10 : 24; }

// The same operations for some of the rows. `waits`: it attends to keys that the tapes before it write.
struct Recorded { const int64_t* tape; int64_t count, waits; };

// Tapes that share no memory but weights and KV: each by one thread, if there are as many.
EXPORT void chorus_run_all(const Recorded* tapes, long count) {
  struct alignas(64) Progress { std::atomic<long> rows{0}; };
  static thread_local std::vector<Progress> room;  // of who calls
  if (count == 1) return chorus_run(tapes->tape, tapes->count);
  if (long(room.size()) < count) room = std::vector<Progress>(count);
  Progress* done = room.data();
  for (long i = 0; i < count; i++) done[i].rows.store(0);
  pool.run(count, [=](long i) {
    run_tape(tapes[i].tape, tapes[i].count, [=](long row, void (*operation)(Args)) {
      done[i].rows.store(row, std::memory_order_release);
      for (long other = 0; operation == do_attention && tapes[i].waits && other < i; other++)
        wait_until([=] { return done[other].rows.load(std::memory_order_acquire) >= row; });
    });
    done[i].rows.store(tapes[i].count, std::memory_order_release);
  });
}

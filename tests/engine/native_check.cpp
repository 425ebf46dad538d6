// The native operations against naive loops, for a processor that only an emulator has (tests/engine/test_native.py).

#include <cstdio>
#include <vector>

#include "cpu.cpp"

static unsigned state = 1;
static float number() {  // in [-1, 1), exact in bf16
  state = state * 1664525u + 1013904223u;
  return float(int(state >> 24) - 128) / 128.0f;
}

static int failures = 0;
static void compare(const char* what, double got, double wanted, double tolerance) {
  if (std::fabs(got - wanted) <= tolerance) return;
  if (failures++ < 10) std::printf("%s: %g instead of %g\n", what, got, wanted);
}

static std::vector<float> numbers(long count) {
  std::vector<float> values(count);
  for (float& value : values) value = number();
  return values;
}

static std::vector<bf16> narrowed(const std::vector<float>& values) {
  std::vector<bf16> out;
  for (float value : values) out.push_back(narrow(value));
  return out;
}

static void check_linear(long format, long group) {
  const long N = 45, K = 70;
  const auto W = narrowed(numbers(N * K));
  const auto x = numbers(17 * K), bias = numbers(N);
  Weights w{nullptr, N, K, format, group};
  std::vector<char> data(chorus_packed_bytes(&w) + 64);
  char* aligned = data.data() + (64 - reinterpret_cast<uintptr_t>(data.data()) % 64) % 64;
  chorus_pack(&w, W.data(), nullptr, aligned);
  w.data = aligned;
  std::vector<float> alone(17 * N), together(17 * N), squares(N);
  auto run = [&](long first, long rows, float* y) {
    run_linear(w, rows, bias.data(), Lora{y, N, x.data() + first * K, K, K, 0, nullptr, 0, 0, nullptr, 0});
  };
  for (long m = 0; m < 17; m++) run(m, 1, alone.data() + m * N);
  run(0, 17, together.data());
  chorus_squares(&w, squares.data());
  const double off = format == BF16 ? 1e-4 : format == INT8 ? 0.2 : 4.0;
  for (long n = 0; n < N; n++) {
    double square = 0.0;
    for (long k = 0; k < K; k++) square += double(widen(W[n * K + k])) * widen(W[n * K + k]);
    compare("square", squares[n], square, off);
    for (long m = 0; m < 17; m++) {
      double wanted = bias[n];
      for (long k = 0; k < K; k++) wanted += double(x[m * K + k]) * widen(W[n * K + k]);
      compare("linear", together[m * N + n], wanted, off);
      compare("row alone", together[m * N + n], alone[m * N + n], 0.0);
    }
  }
}

static void check_lora() {
  const long H = 70, O = 45, R = 5, T = 9;
  const auto x = numbers(T * H), y = numbers(T * O);
  std::vector<bf16> arena = narrowed(numbers(((R * H + 15) / 16 + (R * O + 15) / 16) * 16));
  std::vector<int64_t> directory(MODULES * FIELDS);
  directory[OFFSET_B] = (R * H + 15) / 16;
  directory[RANK] = R;
  const Segment segment{2, T, arena.data(), directory.data()};
  const Slice slice{0, 0, O};
  std::vector<float> got = y;
  run_lora(Lora{got.data(), O, x.data(), H, H, 1, &segment, 0, 1, &slice, R}, [](const Segment&) { return false; });
  for (long t = 0; t < T; t++)
    for (long o = 0; o < O; o++) {
      double wanted = y[t * O + o];
      for (long r = 0; r < R && t >= 2; r++) {
        double z = 0.0;
        for (long h = 0; h < H; h++) z += double(x[t * H + h]) * widen(arena[r * H + h]);
        wanted += z * widen(arena[directory[OFFSET_B] * UNIT + r * O + o]);
      }
      compare("lora", got[t * O + o], wanted, 1e-4);
    }
}

static void check_attention() {
  const long T = 37, D = 16, heads = 4, kv_heads = 2, blocks = 3;
  const auto q = numbers(T * heads * D), k = numbers(T * kv_heads * D), v = numbers(T * kv_heads * D);
  std::vector<bf16> cache(2 * blocks * kv_heads * BLOCK * D);
  const int64_t start = 0, length = T, context = T, table[3] = {2, 0, 1};
  std::vector<int64_t> slots;
  for (long t = 0; t < T; t++) slots.push_back(table[t / BLOCK] * BLOCK + t % BLOCK);
  write_kv({k.data(), v.data(), kv_heads * D, kv_heads * D, kv_heads, D, cache.data(), blocks, slots.data()}, T);
  std::vector<float> out(T * heads * D);
  run_attention({q.data(), heads * D, heads, kv_heads, D, cache.data(), blocks, &start, &length, &context, table, 3, 0.25f,
                 0, out.data(), heads * D}, 1);
  for (long t = 0; t < T; t++)
    for (long h = 0; h < heads; h++) {
      std::vector<double> mean(D);
      double total = 0.0;
      for (long p = 0; p <= t; p++) {
        double score = 0.0;
        for (long d = 0; d < D; d++) score += double(q[(t * heads + h) * D + d]) * k[(p * kv_heads + h / 2) * D + d];
        const double weight = std::exp(score * 0.25);
        total += weight;
        for (long d = 0; d < D; d++) mean[d] += weight * v[(p * kv_heads + h / 2) * D + d];
      }
      for (long d = 0; d < D; d++) compare("attention", out[(t * heads + h) * D + d], mean[d] / total, 1e-4);
    }
}

int main() {
  chorus_set_threads(2);
  check_linear(BF16, 0);
  check_linear(INT8, 32);
  check_linear(INT4, 32);
  check_lora();
  check_attention();
  std::puts(failures ? "not equal" : "all equal");
  return failures != 0;
}

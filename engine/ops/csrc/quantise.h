// From bf16 weights [N, K] to the formats of weights.h. Knows no product.
#pragma once

#include "pool.h"
#include "weights.h"

typedef vf Row[2];  // one k of a tile's NT columns

struct Scheme {
  float lowest, highest;  // numbers
  bool has_lowest;        // whether a group has a value that the number 0 stands for
};
INLINE Scheme scheme_of(long format) { return format == INT8 ? Scheme{-127, 127, false} : Scheme{0, 15, true}; }

struct Inputs {  // what is known of a linear's inputs
  const float *moments, *factor;  // H [K][K]; U [K][K], upper triangular, UᵀU = H⁻¹
};

struct Steps {  // of a group: the number q stands for scale · q + lowest
  vf scale, inverse, lowest;
};

INLINE vf nearest(vf x) { return (x + 12582912.0f) - 12582912.0f; }  // 1.5 · 2²³: to even, for |x| < 2²²

INLINE vf number_of(vf x, const Steps& s, const Scheme& scheme) {
  return vmin(vmax(nearest((x - s.lowest) * s.inverse), splat(scheme.lowest)), splat(scheme.highest));
}

// Steps that span from low to high, in the bf16 that is kept.
INLINE Steps steps_of(vf low, vf high, const Scheme& scheme) {
  const vf range = scheme.has_lowest ? high - low : vmax(high, -low);
  Steps s{widen(narrow(range / scheme.highest)), {}, scheme.has_lowest ? widen(narrow(low)) : vf{}};
  s.inverse = s.scale > 0.0f ? 1.0f / s.scale : vf{};
  return s;
}

// Those of rows [first, last) that keep the weighted squares of what rounding changes least: spanning all weights, or
// less, the outermost clipped. weights: of k's squares.
static Steps best_steps(const Row* rows, int v, const float* weights, long first, long last, const Scheme& scheme) {
  vf low = rows[first][v], high = low;
  for (long k = first + 1; k < last; k++) low = vmin(low, rows[k][v]), high = vmax(high, rows[k][v]);
  Steps best = steps_of(low, high, scheme);
  if (!scheme.has_lowest) return best;
  vf least = splat(INFINITY);
  for (int i = 0; i < 64; i++) {
    const float below = 1.0f - 0.06f * float(i / 8), above = 1.0f - 0.06f * float(i % 8);
    if (std::abs(i / 8 - i % 8) > 2) continue;
    const Steps steps = steps_of(low * below, high * above, scheme);
    vf error = {};
    for (long k = first; k < last; k++) {
      const vf off = number_of(rows[k][v], steps, scheme) * steps.scale + steps.lowest - rows[k][v];
      error += off * off * weights[k];
    }
    const vi is_less = error < least;
    least = is_less ? error : least;
    best.scale = is_less ? steps.scale : best.scale;
    best.inverse = is_less ? steps.inverse : best.inverse;
    best.lowest = is_less ? steps.lowest : best.lowest;
  }
  return best;
}

struct Range {
  long first, last;
};

// rows [to) -= Mᵀ·x of rows [of), M [K][K].
static void subtract_products(Row* rows, Range to, const Row* x, Range of, const float* M, long K) {
  constexpr int J = 4;
  for (long j = to.first; j < to.last; j += J) {
    const int here = int(std::min<long>(J, to.last - j));
    Row sums[J] = {};
    if (here == J) {
      for (long k = of.first; k < of.last; k++)
#pragma GCC unroll 4
        for (int i = 0; i < J; i++)
          for (int v = 0; v < 2; v++) sums[i][v] += x[k][v] * M[k * K + j + i];
    } else {
      for (long k = of.first; k < of.last; k++)
        for (int i = 0; i < here; i++)
          for (int v = 0; v < 2; v++) sums[i][v] += x[k][v] * M[k * K + j + i];
    }
    for (int i = 0; i < here; i++)
      for (int v = 0; v < 2; v++) rows[j + i][v] -= sums[i][v];
  }
}

static void store_number(const Weights& w, char* data, long k, int c, int number) {
  if (w.format == INT8) {
    data[(k / 2 * NT + c) * 2 + k % 2] = char(number);
  } else {
    const int shift = int(k % 2 * 16 + k % 8 / 2 * 4);
    uint32_t* word = (uint32_t*)data + k / 8 * NT + c;
    *word |= uint32_t(number) << shift;
  }
}

// What a tile becomes: numbers of each k, and the steps of each group.
struct Draft {
  Row* numbers;
  Steps (*steps)[2];
};

static void write_draft(const Weights& w, const Draft& draft, char* out) {
  const bool has_lowest = scheme_of(w.format).has_lowest;
  char* data = out + head_bytes(w);
  std::memset(data, 0, tile_bytes(w) - head_bytes(w));
  for (long g = 0; g < num_groups(w.K, w.group); g++)
    for (int v = 0; v < 2; v++) {
      bf16* to = (bf16*)(out + g * group_bytes(w.format)) + v * L;
      store(to, narrow(draft.steps[g][v].scale));
      if (has_lowest) store(to + NT, narrow(draft.steps[g][v].lowest));
    }
  for (long k = 0; k < w.K; k++) {
    float numbers[NT];
    std::memcpy(numbers, draft.numbers[k], sizeof numbers);
    for (int n = 0; n < NT; n++) store_number(w, data, k, n, int(numbers[n]));
  }
}

// The scale and the lowest value of least error for the numbers of a group, column by column, where they are better in
// the bf16 that is kept.
static void fit_steps(const Draft& draft, Range group, int v, const Row* gradient, const Row* products, const float* H,
                      long K, Steps& steps, Row* moved) {
  vf nn = {}, n1 = {}, gn = {}, g1 = {};
  float ones = 0.0f;
  for (long k = group.first; k < group.last; k++) {
    const vf number = draft.numbers[k][v];
    nn -= number * products[k][v], n1 -= products[k][v];
    gn += number * gradient[k][v], g1 += gradient[k][v];
    for (long j = group.first; j < group.last; j++) ones += H[k * K + j];
  }
  const vf det = nn * ones - n1 * n1;
  const vi is_sound = det > 1e-4f * nn * ones;
  const vf safe = is_sound ? det : splat(1.0f);
  const vf scale = widen(narrow(steps.scale + (gn * ones - g1 * n1) / safe));
  const vf lowest = widen(narrow(steps.lowest + (g1 * nn - gn * n1) / safe));
  const vf ds = scale - steps.scale, dl = lowest - steps.lowest;
  const vf change = ds * ds * nn + 2.0f * ds * dl * n1 + dl * dl * ones - 2.0f * (ds * gn + dl * g1);
  const vi is_better = is_sound & (change < 0.0f) & (scale > 0.0f);
  const vf by_scale = is_better ? ds : vf{}, by_lowest = is_better ? dl : vf{};
  for (long k = group.first; k < group.last; k++) moved[k][v] += by_scale * draft.numbers[k][v] + by_lowest;
  steps.scale += by_scale, steps.lowest += by_lowest;
  steps.inverse = steps.scale > 0.0f ? 1.0f / steps.scale : vf{};
}

// moved = what the group's weights change by. gradient: H·off; that of others is left as it was.
static void move_group(const Draft& draft, Range group, const Row* gradient, const float* H, long K, long index,
                       Row* moved) {
  static thread_local Scratch room, product_room;
  Row *local = room.take<Row>(K), *products = product_room.take<Row>(K);
  Steps(&steps)[2] = draft.steps[index];
  const Scheme scheme = scheme_of(INT4);
  std::memcpy(local + group.first, gradient + group.first, (group.last - group.first) * sizeof(Row));
  for (long k = group.first; k < group.last; k++) {
    vf most = {};
    for (int v = 0; v < 2; v++) {
      vf& number = draft.numbers[k][v];
      const vf now = number * steps[v].scale + steps[v].lowest;
      const vf better = number_of(now + local[k][v] / H[k * K + k], steps[v], scheme);
      moved[k][v] = (better - number) * steps[v].scale;
      number = better;
      most = vmax(most, vmax(moved[k][v], -moved[k][v]));
    }
    if (biggest(most) > 0.0f) subtract_products(local, group, moved, {k, k + 1}, H, K);
  }
  std::memset(products + group.first, 0, (group.last - group.first) * sizeof(Row));
  subtract_products(products, group, draft.numbers, group, H, K);  // −H·numbers
  for (int v = 0; v < 2; v++) fit_steps(draft, group, v, local, products, H, K, steps[v], moved);
}

constexpr int PASSES = 2;  // of refine() over all groups

// The error that is left in the outputs, offᵀ·H·off of each column with off = wanted − multiplied, made smaller step by
// step: group by group each number moves to where the others would have it, then the group's steps do (least squares).
static void refine(const Weights& w, const Row* wanted, const float* H, const Draft& draft) {
  const long K = w.K;
  static thread_local Scratch off_room, gradient_room, moved_room;
  Row *off = off_room.take<Row>(K), *gradient = gradient_room.take<Row>(K), *moved = moved_room.take<Row>(K);
  for (long k = 0; k < K; k++)
    for (int v = 0; v < 2; v++) {
      const Steps& s = draft.steps[k / w.group][v];
      off[k][v] = draft.numbers[k][v] * s.scale + s.lowest - wanted[k][v];
      gradient[k][v] = vf{};
    }
  subtract_products(gradient, {0, K}, off, {0, K}, H, K);  // H·(wanted − multiplied)
  for (int pass = 0; pass < PASSES; pass++)
    for (long first = 0; first < K; first += w.group) {
      const Range group{first, std::min(first + w.group, K)};
      move_group(draft, group, gradient, H, K, first / w.group, moved);
      subtract_products(gradient, {0, K}, moved, group, H, K);
    }
}

// To the nearest, k by k. With a factor U [K][K] (upper triangular, UᵀU = H⁻¹, H the second moments of the inputs) the
// error that rounding one k makes in the outputs is made up for, as far as it can be, by those still to come (GPTQ, arXiv
// 2210.17323).
static void round_rows(const Weights& w, Row* rows, const float* factor, const Draft& draft) {
  constexpr long SPAN = 32;  // k whose errors are spread further together; groups are multiples of it
  const long K = w.K;
  const Scheme scheme = scheme_of(w.format);
  static thread_local Scratch error_room, weight_room;
  Row* errors = error_room.take<Row>(K);
  float* weights = weight_room.take<float>(K);
  for (long k = 0; k < K; k++) weights[k] = factor ? 1.0f / (factor[k * K + k] * factor[k * K + k]) : 1.0f;
  for (long first = 0; first < K; first += SPAN) {
    const long last = std::min(first + SPAN, K);
    Steps* steps = draft.steps[first / w.group];
    for (int v = 0; v < 2 && first % w.group == 0; v++)
      steps[v] = best_steps(rows, v, weights, first, std::min(first + w.group, K), scheme);
    for (long k = first; k < last; k++) {
      for (int v = 0; v < 2; v++) {
        const vf number = draft.numbers[k][v] = number_of(rows[k][v], steps[v], scheme);
        if (factor) errors[k][v] = (rows[k][v] - number * steps[v].scale - steps[v].lowest) / factor[k * K + k];
      }
      if (factor) subtract_products(rows, {k + 1, last}, errors, {k, k + 1}, factor, K);
    }
    if (factor) subtract_products(rows, {last, K}, errors, {first, last}, factor, K);
  }
}

static void quantise_tile(const Weights& w, const bf16* W, long t, const Inputs* inputs, char* out) {
  const long K = w.K;
  static thread_local Scratch row_room, wanted_room, number_room, step_room;
  Row *rows = row_room.take<Row>(K), *wanted = wanted_room.take<Row>(K);
  const Draft draft{number_room.take<Row>(K), step_room.take<Steps[2]>(num_groups(K, w.group))};
  for (long k = 0; k < K; k++) {
    float values[NT];
    for (long n = 0; n < NT; n++) values[n] = t * NT + n < w.N ? widen(W[(t * NT + n) * K + k]) : 0.0f;
    std::memcpy(rows[k], values, sizeof values);
    std::memcpy(wanted[k], values, sizeof values);
  }
  round_rows(w, rows, inputs ? inputs->factor : nullptr, draft);
  if (inputs && w.format == INT4) refine(w, wanted, inputs->moments, draft);
  write_draft(w, draft, out);
}

static void pack_tile(const Weights& w, const bf16* W, long t, uint32_t* out) {
  for (long k = 0; k < num_pairs(w.K); k++)
    for (long c = 0; c < NT; c++) {
      const long n = t * NT + c;
      const uint32_t even = n < w.N && 2 * k < w.K ? W[n * w.K + 2 * k] : 0;
      const uint32_t odd = n < w.N && 2 * k + 1 < w.K ? W[n * w.K + 2 * k + 1] : 0;
      out[k * NT + c] = even | odd << 16;
    }
}

static void pack(const Weights& w, const bf16* W, const Inputs* inputs, char* out) {
  pool.run(num_tiles(w.N), [&](long t) {
    char* tile = out + t * tile_bytes(w);
    if (w.format == BF16) pack_tile(w, W, t, (uint32_t*)tile);
    else quantise_tile(w, W, t, inputs, tile);
  });
}

// Column c of k as it is multiplied.
static double weight_at(const Weights& w, const char* tile, long k, long c) {
  const char* data = tile + head_bytes(w);
  if (w.format == BF16) return widen(((const bf16*)data)[(k / 2 * NT + c) * 2 + k % 2]);
  const bf16* steps = (const bf16*)(tile + k / w.group * group_bytes(w.format)) + c;
  if (w.format == INT8) return double(widen(steps[0])) * ((const int8_t*)data)[(k / 2 * NT + c) * 2 + k % 2];
  const uint32_t number = ((const uint32_t*)data)[k / 8 * NT + c] >> (k % 2 * 16 + k % 8 / 2 * 4) & 15u;
  return double(widen(steps[0])) * number + widen(steps[NT]);
}

// squares[n] = the sum of the squares of row n of W as it is multiplied.
static void squares(const Weights& w, float* out) {
  pool.run(num_tiles(w.N), [&](long t) {
    const char* tile = w.data + t * tile_bytes(w);
    for (long c = 0; c < std::min<long>(NT, w.N - t * NT); c++) {
      double total = 0.0;
      for (long k = 0; k < w.K; k++) {
        const double value = weight_at(w, tile, k, c);
        total += value * value;
      }
      out[t * NT + c] = float(total);
    }
  });
}

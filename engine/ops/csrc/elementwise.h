// The small operations of a layer: norm, SiLU·mul, rope. Everything in fp32.
#pragma once

#include "pool.h"
#include "vectors.h"

// y = x / sqrt(mean(x²) + eps) · w for each of M rows of H, of which `heads` lie side by side in each row of `ldx`; with
// `residual`, first residual += x, and it is normalised.
static void rms_norm(const float* x, long M, long H, long ldx, long heads, float* residual, long ldr, const float* weight,
                     double eps, float* y, long ldy) {
  for_rows(M, M * H, [=](long m) {
    const float* from = x + m / heads * ldx + m % heads * H;
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
static void silu_mul(const float* x, long M, long I, long ldx, float* y, long ldy) {
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
static void rope(float* x, long T, long ldx, long heads, long D, const float* cos, const float* sin, long ldc) {
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

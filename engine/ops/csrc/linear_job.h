// What a call of a linear is, as its tasks see it. Knows no product.
#pragma once

#include "coming.h"
#include "lora.h"
#include "pool.h"
#include "weights.h"

constexpr long NEAR = 4096;  // bytes that few rows prefetch ahead of themselves

struct Ahead {  // what to prefetch meanwhile: `lines` of 64 bytes per tile and UNROLL pairs, from `at` on
  const char* at;
  int lines;
  long apart = 0;  // else turn about from two places, so far from each other
};

struct Out {  // where a linear's result goes: rows of `stride` elements
  float* data;
  long stride, num_columns;
  const float* bias;
};

struct Delta {  // what an adapter adds to a tile for some rows: nothing where rank is 0
  const Z* z = nullptr;
  const bf16* B = nullptr;
  long ldz = 0, rank = 0, O = 0;
};

template <int R, int V> INLINE void write(const vf (&acc)[R][V], const Out& out, long row) {
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      const long col = v * L, left = out.num_columns - col;
      if (left <= 0) continue;
      float* to = out.data + (row + r) * out.stride + col;
      if (left >= L) {
        store(to, out.bias ? acc[r][v] + load<vf>(out.bias + col) : acc[r][v]);
      } else {
        float values[L];
        store(values, acc[r][v]);
        for (long i = 0; i < left; i++) to[i] = values[i] + (out.bias ? out.bias[col + i] : 0.0f);
      }
    }
}

// Rows that are multiplied together, at most ROWS_TOGETHER. What an adapter adds is added on the way where all are of `segment`.
struct Rows {
  long start, end;
  const Segment* segment;
};

// One call for some rows, as its tasks see it.
struct Job {
  const Weights& w;
  const Form::Pair* x;  // parts one after the other, each laid out for its number of rows
  const Z* z;           // of rows from parts[0].start on
  long pairs;
  const Rows* parts;
  long num_parts;
  const Lora& lora;
  Coming &adapters, &coming;  // what to prefetch meanwhile: first what run_lora() reads next

  Far far(long times) const {
    const Far found = adapters.take(times);
    return found.count ? found : coming.take(times);
  }

  long size(long part) const { return parts[part].end - parts[part].start; }
  long before(long part) const { return parts[part].start - parts[0].start; }
  Delta delta(long part, long column) const {
    if (!parts[part].segment) return {};
    long s = 0;
    while (lora.slices[s].last <= column) s++;
    const Part each(lora, *parts[part].segment, s);
    const long stride = z_stride(lora), ldz = stride * lora.num_slices;
    return {z + before(part) * ldz + s * stride, each.B + column - lora.slices[s].first, ldz, each.rank, each.O};
  }
};

// Whether an adapter's part is added tile by tile: worth it for many rows, and only where no factor or shift follows.
static bool is_merged(const Lora& lora, const Segment& segment) {
  bool is_plain = segment.end - segment.start >= MAX_R;
  for (long s = 0; s < lora.num_slices && is_plain; s++)
    is_plain = !Part(lora, segment, s).flags && lora.slices[s].first % NT == 0 && lora.slices[s].last % NT == 0;
  return is_plain;
}

// What a call of batched LoRA is: y = g ∘ (y + B·(A·x)) + c for the rows of each adapter. Knows adapters by address only.
#pragma once

#include "pool.h"
#include "vectors.h"

struct Slice { int64_t module, first, last; };  // columns [first, last) of y belong to this module

struct Segment {
  int64_t start, end;        // rows
  const bf16* arena;         // the adapter's extent
  const int64_t* directory;  // [layers][modules][fields]
};

// As adapters/loader.py packs: A [rank, H] and B [rank, O] bf16; g and c are fp32.
constexpr int MODULES = 14, FIELDS = 6, OFFSET_A = 0, OFFSET_B = 1, RANK = 2, FLAGS = 3, OFFSET_C = 4, OFFSET_G = 5;
constexpr int UNIT = 16, HAS_G = 1, HAS_C = 2;

// Lines that are wanted next, prefetched `pace` at a time; where memory is all that is waited for, from two places turn
// about: the processor reads ahead of each by itself.
class Wanted {
 public:
  Wanted() = default;
  Wanted(const void* data, long bytes, long steps)
      : at_((const char*)data), apart_((bytes / PLACES + 63) / 64 * 64), end_(at_ + apart_),
        pace_(int((apart_ / 64 + steps) / std::max(steps, 1L))) {}
  FLAT void step(int steps = 1) {
    for (int i = 0; i < steps * pace_ && at_ < end_; i++, at_ += 64)
      for (int place = 0; place < PLACES; place++) __builtin_prefetch(at_ + place * apart_, 0, 2);
  }

 private:
  static constexpr int PLACES = HAS_TILES ? 2 : 1;
  const char* at_ = nullptr;
  long apart_ = 0;
  const char* end_ = nullptr;
  int pace_ = 0;
};

struct Lora {  // one call: the rows of each segment, through the slices of one linear
  float* y;
  long ldy;
  const float* x;
  long ldx, H, num_segments;
  const Segment* segments;
  long layer, num_slices;
  const Slice* slices;
  long max_rank;
  const uint32_t* const* turned = nullptr;  // A of segments with many rows, by segment and slice, where tiles want it
};

struct Part {  // one slice of one adapter
  const bf16 *A = nullptr, *B = nullptr;
  long rank = 0, flags = 0, O = 0;
  const int64_t* entry = nullptr;
  Part() = default;
  Part(const Lora& call, const Segment& segment, long s) {
    entry = segment.directory + (call.layer * MODULES + call.slices[s].module) * FIELDS;
    A = segment.arena + entry[OFFSET_A] * UNIT;
    B = segment.arena + entry[OFFSET_B] * UNIT;
    rank = entry[RANK];
    flags = entry[FLAGS];
    O = call.slices[s].last - call.slices[s].first;
  }
};

// y = g ∘ y + c for `rows` rows of a part; without g it is 1, without c 0.
INLINE void rescale(const Segment& segment, const Part& part, float* y, long ldy, int rows) {
  if (!part.flags) return;
  const auto vector = [&](int flag, int field) {
    return part.flags & flag ? (const float*)(segment.arena + part.entry[field] * UNIT) : nullptr;
  };
  const float *g = vector(HAS_G, OFFSET_G), *c = vector(HAS_C, OFFSET_C);
  for (int r = 0; r < rows; r++)
    for (long o = 0; o < part.O; o++) {
      float value = y[r * ldy + o];
      if (g) value *= g[o];
      if (c) value += c[o];
      y[r * ldy + o] = value;
    }
}

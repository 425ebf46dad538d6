// Keys and values of new tokens go to their slots (attention_job.h says how they lie). Knows no sequence.
#pragma once

#include <vector>

#include "attention_job.h"
#include "pool.h"

constexpr float KV_LIMIT = 65504.0f;

// Only finite numbers are kept: unused slots of a block are read with weight 0, and 0 · NaN is NaN.
INLINE vf finite(vf x) { return vmin(vmax(x == x ? x : vf{}, splat(-KV_LIMIT)), splat(KV_LIMIT)); }

// One call. Tokens that fill a block are written line by line, others a pair at a time. D is a multiple of L.
struct KvWrite {
  const float *k, *v;
  long ldk, ldv, heads, D;
  bf16* cache;
  long num_blocks;
  const int64_t* slots;

  bf16* keys(long slot, long head) const { return cache + (slot / BLOCK * heads + head) * BLOCK * D; }
  bf16* values(long slot, long head) const { return keys(slot, head) + num_blocks * heads * BLOCK * D; }
  static vh read(const float* from) { return narrow(finite(load<vf>(from))); }

  bool is_block(long t) const {
    for (long i = 0; i < BLOCK; i++)
      if (slots[t + i] != slots[t] + i) return false;
    return slots[t] % BLOCK == 0;
  }

  void prefetch_block(long t) const {
    const bf16 *to_keys = keys(slots[t], 0), *to_values = values(slots[t], 0);
    for (long i = 0; i < heads * BLOCK * D; i += 32) {
      __builtin_prefetch(to_keys + i, 1);
      __builtin_prefetch(to_values + i, 1);
    }
  }

  void write_block(long t) const {
    for (long h = 0; h < heads; h++)
      for (long d = 0; d < D; d += L) {
        alignas(64) uint32_t pairs[BLOCK][L / 2];
        for (long i = 0; i < BLOCK; i++) store(pairs[i], read(k + (t + i) * ldk + h * D + d));
        auto* to_keys = (uint32_t*)keys(slots[t], h) + d / 2 * BLOCK;
        for (long p = 0; p < L / 2; p++)
          for (long i = 0; i < BLOCK; i++) to_keys[p * BLOCK + i] = pairs[i][p];
        auto* to_values = (uint32_t*)values(slots[t], h) + d;
        for (long i = 0; i < BLOCK; i += 2, to_values += D) {
          const float* from = v + (t + i) * ldv + h * D + d;
          store(to_values, __builtin_convertvector(read(from), vu) | __builtin_convertvector(read(from + ldv), vu) << 16);
        }
      }
  }

  void prefetch_token(long t) const {
    for (long h = 0; h < heads; h++) {
      const bf16 *to_keys = keys(slots[t], h), *to_values = values(slots[t], h) + slots[t] % BLOCK / 2 * D * 2;
      for (long d = 0; d < D; d += 2) __builtin_prefetch(to_keys + d * BLOCK, 1);
      for (long d = 0; d < D * 2; d += 32) __builtin_prefetch(to_values + d, 1);
    }
  }

  void write_token(long t) const {
    const long offset = slots[t] % BLOCK;
    for (long h = 0; h < heads; h++) {
      bf16 *to_keys = keys(slots[t], h) + offset * 2, *to_values = values(slots[t], h) + offset / 2 * D * 2 + offset % 2;
      for (long d = 0; d < D; d += L) {
        bf16 key_parts[L], value_parts[L];
        store(key_parts, read(k + t * ldk + h * D + d));
        store(value_parts, read(v + t * ldv + h * D + d));
        for (int i = 0; i < L; i += 2) std::memcpy(to_keys + (d + i) * BLOCK, key_parts + i, 2 * sizeof(bf16));
        for (int i = 0; i < L; i++) to_values[(d + i) * 2] = value_parts[i];
      }
    }
  }
};

// For T tokens. What is written comes from memory first: the lines of several tokens side by side.
static void write_kv(const KvWrite& job, long T) {
  struct Item { long t; bool is_block; };
  constexpr long AHEAD = 2;  // items
  static thread_local std::vector<Item> items;
  items.clear();
  for (long t = 0; t < T; t += items.back().is_block ? BLOCK : 1)
    items.push_back({t, t + BLOCK <= T && job.is_block(t)});
  const Item* todo = items.data();
  const long count = items.size();
  const auto prefetch = [&job, todo](long i) {
    if (todo[i].is_block) job.prefetch_block(todo[i].t);
    else job.prefetch_token(todo[i].t);
  };
  const long step = (count + 2 * pool.size() - 1) / (2 * pool.size());
  pool.run((count + step - 1) / std::max(step, 1L), [&, todo, count, step](long part) {
    const long first = part * step, last = std::min(count, first + step);
    for (long i = first; i < std::min(last, first + AHEAD); i++) prefetch(i);
    for (long i = first; i < last; i++) {
      if (i + AHEAD < last) prefetch(i + AHEAD);
      if (todo[i].is_block) job.write_block(todo[i].t);
      else job.write_token(todo[i].t);
    }
  });
}

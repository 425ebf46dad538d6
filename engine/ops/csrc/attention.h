// Paged attention: who computes which rows. Knows no model and no policy.
#pragma once

#include <vector>

#include "attention_job.h"
#include "coming.h"
#if HAS_TILES
#include "attention_tiles.h"
#else
#include "attention_rows.h"
#endif

// The blocks that a call will read.
static void foresee(const Attention& at, long num_sequences, Coming& coming) {
  const long block = at.kv_heads * BLOCK * at.D;
  coming.clear(block * sizeof(bf16));
  for (long s = 0; s < num_sequences; s++) {
    const long end = at.contexts[s];
    for (long p = at.window ? std::max(0L, end - at.lengths[s] - at.window + 1) : 0; p < end; p += BLOCK) {
      const bf16* keys = at.cache + at.tables[s * at.table_width + p / BLOCK] * block;
      if (!coming.add(keys) || !coming.add(keys + at.num_blocks * block)) return;
    }
  }
}

// D must be a multiple of L.
static void run_attention(const Attention& at, long num_sequences) {
  static thread_local std::vector<Queries> items;
  items.clear();
  const long G = at.heads / at.kv_heads;
  for (long s = 0; s < num_sequences; s++)
    for (long row = 0, rows = at.lengths[s] * G; row < rows; row += ROWS_OF_QUERIES)
      for (long kv = 0; kv < at.kv_heads; kv++)
        items.push_back({s, kv, row, int(std::min<long>(ROWS_OF_QUERIES, rows - row))});
  const Queries* todo = items.data();
  const long count = items.size();
  // The heads of a block lie beside each other in memory: one thread reads all of them, where there is enough to do.
  const long heads = count >= 4 * pool.size() * at.kv_heads ? at.kv_heads : 1;
  pool.run(count / heads, [&at, todo, count, heads](long task) {
    static thread_local Scratch buffer;
    for (long i = task * heads, end = i + heads; i < end; i++) {
      const long after = i + 1 < end ? i + 1 : end + heads * (pool.size() - 1);
      attend_any(at, todo[i], todo[std::min(after, count - 1)], buffer.take<float>(work_floats(at.D)));
    }
  });
}

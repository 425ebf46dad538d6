// Paged attention: who computes which rows. Knows no model and no policy.
#pragma once

#include <vector>

#include "attention_job.h"
#include "coming.h"
#include "pool.h"
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

constexpr long HEADS_TOGETHER = 8;  // of KV, at most

// D must be a multiple of L.
static void run_attention(const Attention& at, long num_sequences) {
  static thread_local std::vector<Queries> items;
  items.clear();
  const long G = at.heads / at.kv_heads;
  long count = 0;
  for (long s = 0; s < num_sequences; s++) count += (at.lengths[s] * G + ROWS_OF_QUERIES - 1) / ROWS_OF_QUERIES;
  // The heads of a block lie beside each other in memory: one thread reads all of them, where there is enough to do.
  const long heads = count >= 4 * pool.size() ? std::min(at.kv_heads, HEADS_TOGETHER) : 1;
  for (long s = 0; s < num_sequences; s++)
    for (long row = 0, rows = at.lengths[s] * G; row < rows; row += ROWS_OF_QUERIES)
      for (long kv = 0; kv < at.kv_heads; kv += heads)
        items.push_back({s, kv, std::min(heads, at.kv_heads - kv), row, int(std::min<long>(ROWS_OF_QUERIES, rows - row))});
  const Queries* todo = items.data();
  count = items.size();
  const int threads = pool.size();
  pool.run(count, [&at, todo, count, heads, threads](long i) {
    static thread_local Scratch buffer;
    attend_any(at, todo[i], todo[Pool::goes_on(i, count, threads) ? i + 1 : i], buffer.take<float>(work_floats(at.D, heads)));
  });
}

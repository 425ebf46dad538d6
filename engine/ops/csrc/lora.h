// Batched LoRA: who computes which rows. Knows no adapter.
#pragma once

#include <vector>

#include "lora_call.h"
#if HAS_TILES
#include "lora_tiles.h"
#else
#include "lora_rows.h"
#endif

// Rows outside segments are not touched, nor those of segments that `is_done`.
template <class F> static void run_lora(const Lora& call, const F& is_done) {
  struct Item { const Segment* segment; long row; int count; };
  static thread_local std::vector<Item> items;
  items.clear();
  for (const Segment* each = call.segments; each < call.segments + call.num_segments; each++)
    for (long row = each->start; row < each->end && !is_done(*each); row += LORA_TOGETHER)
      items.push_back({each, row, int(std::min<long>(LORA_TOGETHER, each->end - row))});
  const Item* todo = items.data();
  const long count = items.size();
  const int threads = pool.size();
  pool.run(count, [=](long i) {
    const Item& item = todo[i];
    const bool has_next = Pool::goes_on(i, count, threads) && todo[i + 1].segment != item.segment;
    const Part after = has_next ? Part(call, *todo[i + 1].segment, 0) : Part();
    adapt(call, *item.segment, item.row, item.count, after);
  });
}

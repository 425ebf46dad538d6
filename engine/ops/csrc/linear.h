// Linear: y = W·x + b for any number of rows, W in bf16; and what adapters add to it.
//
// Every output element is summed in one fixed order that does not depend on how many rows share the call, on the
// chunking or on the number of threads: equal inputs give equal bits in every batch.
#pragma once

#include <vector>

#include "lora.h"
#if HAS_TILES
#include "linear_tiles.h"
#else
#include "linear_rows.h"
#endif

// Rows [start, end) as evenly as possible in parts of at most ROWS_TOGETHER.
static void cut(long start, long end, const Segment* segment, std::vector<Rows>& parts) {
  const long count = (end - start + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
  for (long i = 0; i < count; i++)
    parts.push_back({start + (end - start) * i / count, start + (end - start) * (i + 1) / count, segment});
}

static void cut_rows(long M, const Lora& lora, std::vector<Rows>& parts) {
  parts.clear();
  long row = 0;
  for (const Segment* each = lora.segments; each < lora.segments + lora.num_segments; each++)
    if (is_merged(lora, *each)) {
      cut(row, each->start, nullptr, parts);
      cut(each->start, each->end, each, parts);
      row = each->end;
    }
  cut(row, M, nullptr, parts);
}

// What run_lora() will read of adapters with few rows each: most of what a step of many adapters moves, and while the
// product computes, the memory has time. Products of few rows have none to give, and those by tiles prefetch nothing.
static void foresee(const Lora& lora, long M, Coming& adapters) {
  adapters.clear(2048);
  if (HAS_TILES || M <= MAX_R) return;
  for (const Segment* each = lora.segments; each < lora.segments + lora.num_segments; each++)
    for (long s = 0; s < lora.num_slices && !is_merged(lora, *each); s++) {
      const Part part(lora, *each, s);
      adapters.add_all(part.A, part.rank * lora.H * sizeof(bf16));
      adapters.add_all(part.B, part.rank * part.O * sizeof(bf16));
    }
}

// Rows as products read them, and the lines of memory that each thread reads first.
static void lay_rows(const Job& job, long tiles, Form::Pair* laid) {
  const long first_row = job.parts[0].start, rows = job.parts[job.num_parts - 1].end - first_row;
  const long blocks = (job.pairs + BLOCK_PAIRS - 1) / BLOCK_PAIRS, bytes = tile_bytes(job.w);
  const long lanes = rows * job.w.K < 8192 ? 1 : pool.size();
  pool.run(lanes, [&job, laid, first_row, rows, blocks, bytes, tiles, lanes](long lane) {
    const long first = rows * lane / lanes, last = rows * (lane + 1) / lanes;
    Wanted wanted;
    if (last - first >= 4) wanted = Wanted(job.w.data + tiles * lane / lanes * bytes, bytes, last - first);
    for (long r = first, part = 0; r < last; r++) {
      while (r >= job.before(part) + job.size(part)) part++;
      wanted.step();
      to_pairs(job.lora.x + (first_row + r) * job.lora.ldx, job.w.K, job.size(part) * BLOCK_PAIRS,
               laid + (job.before(part) * (blocks - 1) + r) * BLOCK_PAIRS);
    }
  });
}

static void run_parts(const Job& job, Form::Pair* laid, Z* z, const Out& out) {
  const Lora& lora = job.lora;
  const long tiles = num_tiles(job.w.N), blocks = (job.pairs + BLOCK_PAIRS - 1) / BLOCK_PAIRS;
  lay_rows(job, tiles, laid);
  pool.run(lora.num_segments ? job.num_parts : 0, [&, laid, z, blocks](long part) {
    const Rows& each = job.parts[part];
    if (each.segment)
      project_rows(lora, *each.segment, each.start, laid + job.before(part) * blocks * BLOCK_PAIRS, job.size(part),
                   z + job.before(part) * lora.num_slices * z_stride(lora));
  });
  if (pool.size() == 1) return run_task(job, 0, tiles, tiles, out);
  static constexpr long PIECES = 5, SHARES[PIECES + 1] = {0, 8, 12, 14, 15, 16};  // smaller and smaller: threads end together
  const long lanes = pool.size();
  pool.run(lanes * PIECES, [&job, &out, tiles, lanes](long task) {
    const long lane = task / PIECES, piece = task % PIECES;
    const long first = tiles * lane / lanes, end = tiles * (lane + 1) / lanes, count = end - first;
    run_task(job, first + count * SHARES[piece] / 16, first + count * SHARES[piece + 1] / 16, end, out);
  });
}

// y = W·x + b of M rows, and what the adapters of their segments make of it.
static void linear(const Weights& w, long M, const float* bias, const Lora& call) {
  static thread_local std::vector<Rows> parts;
  static thread_local Scratch x_room, z_room;
  static thread_local Coming adapters;
  const Lora lora = prepare(call);
  foresee(lora, M, adapters);
  cut_rows(M, lora, parts);
  const long pairs = num_pairs(w.K), padded = (pairs + BLOCK_PAIRS - 1) / BLOCK_PAIRS * BLOCK_PAIRS;
  const long most = std::min(M, ROWS_AT_ONCE + ROWS_TOGETHER);
  auto* laid = x_room.take<Form::Pair>(most * padded);
  auto* z = z_room.take<Z>(most * lora.num_slices * z_stride(lora) + 1);
  const Out out{lora.y, lora.ldy, w.N, bias};
  for (size_t first = 0, last; first < parts.size(); first = last) {
    for (last = first + 1; last < parts.size() && parts[last].end - parts[first].start <= ROWS_AT_ONCE;) last++;
    const Job job{w, laid, z, pairs, parts.data() + first, long(last - first), lora, adapters, coming};
    run_parts(job, laid, z, out);
  }
  run_lora(lora, [&](const Segment& segment) { return is_merged(lora, segment); });
}

// y = W·x for M rows of x, with W [O, H] row-major bf16: what a single adapter brings along for embedding and head.
static void dense(const float* x, long M, long H, long ldx, const bf16* W, long O, float* y, long ldy) {
  constexpr int COLUMNS = 64;
  const long chunks = (O + COLUMNS - 1) / COLUMNS;
  for_rows(chunks, M * O, [=](long chunk) {
    const long o = chunk * COLUMNS, count = std::min<long>(COLUMNS, O - o);
    for (long m = 0; m < M; m += LORA_ROWS) {
      const float* from = x + m * ldx;
      float* to = y + m * ldy + o;
      switch (std::min<long>(LORA_ROWS, M - m)) {
        case 1: shrink<Wide, 1>(from, ldx, W + o * H, count, H, to, ldy, {}); break;
        case 2: shrink<Wide, 2>(from, ldx, W + o * H, count, H, to, ldy, {}); break;
        case 3: shrink<Wide, 3>(from, ldx, W + o * H, count, H, to, ldy, {}); break;
        default: shrink<Wide, 4>(from, ldx, W + o * H, count, H, to, ldy, {});
      }
    }
  });
}

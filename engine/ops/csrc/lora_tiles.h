// Batched LoRA by matrix tiles. Knows no linear.
//
// A few rows of one adapter: A as it lies in memory is the left side, the rows turned to columns the right one; what B adds
// comes from vectors, in the order of a tile. Many rows: A is turned once, B is interleaved, rows stay rows.
#pragma once

#include "lora_call.h"
#include "lora_rows.h"
#include "tiles.h"

constexpr int LORA_TOGETHER = 8;      // rows of an adapter that one thread takes at once
constexpr int RANKS = 2 * TILE;       // of a product with B
constexpr int WIDE_TILE = 2 * TILE;   // columns of a weight tile
static_assert(WIDE_TILE == 2 * L);

typedef bf16 Z;  // A·x as B is multiplied with it; zeros behind the rank

INLINE long z_stride(const Lora& call) { return (call.max_rank + RANKS - 1) / RANKS * RANKS; }
INLINE long num_blocks(long H) { return (H + 2 * TILE - 1) / (2 * TILE); }

// ------------------------------------------------------------------------------------------------- few rows

// The pairs of `count` rows as columns: [blocks · TILE][count]. `room` holds them as rows.
INLINE void turn_rows(const float* x, long ldx, int count, long H, uint32_t* room, uint32_t* out) {
  const long pairs = num_blocks(H) * TILE;
  if (count == 1) return to_pairs(x, H, BLOCK_PAIRS, out);
  for (int r = 0; r < count; r++) to_pairs(x + r * ldx, H, BLOCK_PAIRS, room + r * pairs);
  for (long k = 0; k < pairs; k += TILE) transpose(room + k, pairs, count, out + k * count, count);
}

// z[row][rank] = A·x for `count` turned rows, rounded to bf16. A [rank, H]: 32 of its rows at once, tiles 4 and 5; their
// sums are tiles 0 and 1.
static void shrink_tiles(const uint32_t* x, int count, const bf16* A, long rank, long H, float* z, long ldz, Wanted wanted) {
  const long blocks = num_blocks(H), whole = H / (2 * TILE), stride = H * 2;
  alignas(64) float sums[2 * TILE * TILE];
  alignas(64) bf16 end[2 * TILE * 2 * TILE];
  TileShapes shapes;
  for (long j = 0; j < rank; j += 2 * TILE) {
    const int first = int(std::min<long>(TILE, rank - j)), second = int(std::min<long>(TILE, rank - j - first));
    shapes.set(0, first, 4 * count), shapes.set(4, first);
    shapes.set(1, std::max(second, 1), 4 * count), shapes.set(5, std::max(second, 1));
    shapes.set(6, TILE, 4 * count);
    shapes.use();
    _tile_zero(0);
    _tile_zero(1);
    const bf16* rows = A + j * H;
    for (long b = 0; b < whole; b++) {
      Wanted::step(wanted);
      _tile_loadd(6, x + b * TILE * count, 4 * count);
      _tile_loadd(4, rows + b * 2 * TILE, stride);
      _tile_dpbf16ps(0, 4, 6);
      if (!second) continue;
      _tile_loadd(5, rows + TILE * H + b * 2 * TILE, stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (whole < blocks) {
      const long left = H - whole * 2 * TILE;
      std::memset(end, 0, sizeof end);
      for (int r = 0; r < first + second; r++) std::memcpy(end + r * 2 * TILE, rows + r * H + whole * 2 * TILE, left * 2);
      fence_tiles();
      _tile_loadd(6, x + whole * TILE * count, 4 * count);
      _tile_loadd(4, end, TILE_BYTES);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, end + TILE * 2 * TILE, TILE_BYTES);
      _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, sums, 4 * count);
    if (second) _tile_stored(1, sums + TILE * count, 4 * count);
    for (int i = 0; i < first + second; i++)
      for (int r = 0; r < count; r++) z[r * ldz + j + i] = widen(narrow(sums[i * count + r]));
  }
}

// sums[row][0 .. V·L) += what a tile would add for R rows: sum over j of z[row][j] · B[j].
template <int R, int V>
INLINE void add_terms(vf (&sums)[R][V], const float* z, long ldz, const bf16* B, long rank, long O, Wanted& wanted) {
  for (long first = 0; first < rank; first += RANKS) {
    vf even[R][V] = {}, odd[R][V] = {};
    const auto add = [&](vf (&to)[R][V], long j) __attribute__((always_inline)) {
      vf b[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) b[v] = widen(load<vh>(B + j * O + v * L));
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) to[r][v] += z[r * ldz + j] * b[v];
    };
    const long last = std::min(rank, first + RANKS);
    for (long j = first; j < last; j += 2) {
      Wanted::step(wanted);
      add(even, j);
      if (j + 1 < last) add(odd, j + 1);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] += even[r][v] + odd[r][v];
  }
}

template <int R, int V>
INLINE void expand_columns(float* y, long ldy, const float* z, long ldz, const bf16* B, long rank, long O, Wanted& wanted) {
  vf sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = load<vf>(y + r * ldy + v * L);
  add_terms<R, V>(sums, z, ldz, B, rank, O, wanted);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(y + r * ldy + v * L, sums[r][v]);
}

// y[row] += Bᵀ·z[row] for R rows, B [rank, O].
template <int R>
static void expand_rows(float* y, long ldy, const float* z, long ldz, const bf16* B, long rank, long O, Wanted wanted) {
  constexpr int V = R == 1 ? 4 : 2;
  long o = 0;
  for (; o + V * L <= O; o += V * L) expand_columns<R, V>(y + o, ldy, z, ldz, B + o, rank, O, wanted);
  for (; o + L <= O; o += L) expand_columns<R, 1>(y + o, ldy, z, ldz, B + o, rank, O, wanted);
  for (; o < O; o++)
    for (int r = 0; r < R; r++) {
      float total = 0.0f;
      for (long j = 0; j < rank; j++) total += z[r * ldz + j] * widen(B[j * O + o]);
      y[r * ldy + o] += total;
    }
}

static void expand_any(float* y, long ldy, int count, const float* z, long ldz, const bf16* B, long rank, long O,
                       Wanted wanted) {
  for (int r = 0; r < count; r += 4, wanted = {}) {
    float* to = y + r * ldy;
    const float* from = z + r * ldz;
    switch (count - r) {
      case 1: expand_rows<1>(to, ldy, from, ldz, B, rank, O, wanted); break;
      case 2: expand_rows<2>(to, ldy, from, ldz, B, rank, O, wanted); break;
      case 3: expand_rows<3>(to, ldy, from, ldz, B, rank, O, wanted); break;
      default: expand_rows<4>(to, ldy, from, ldz, B, rank, O, wanted);
    }
  }
}

// `count` rows of one adapter, at most LORA_TOGETHER. `after`: the part that this thread is likely to meet next.
static void adapt(const Lora& call, const Segment& segment, long row, int count, const Part& after) {
  static thread_local Scratch x_room, row_room, z_room;
  const long pairs = num_blocks(call.H) * TILE, ldz = z_stride(call);
  uint32_t* x = x_room.take<uint32_t>(pairs * count + TILE);
  turn_rows(call.x + row * call.ldx, call.ldx, count, call.H, row_room.take<uint32_t>(pairs * count), x);
  float* z = z_room.take<float>(count * ldz);
  for (long s = 0; s < call.num_slices; s++) {
    const Part part(call, segment, s), next = s + 1 < call.num_slices ? Part(call, segment, s + 1) : after;
    float* y = call.y + row * call.ldy + call.slices[s].first;
    if (part.rank) {
      const long rank = part.rank, O = part.O;
      const Wanted b(part.B, rank * O * 2, (rank + RANKS - 1) / RANKS * (call.H / (2 * TILE)));
      const Wanted a(next.A, next.rank * call.H * 2, (rank + 1) / 2 * (O / ((count == 1 ? 4 : 2) * L)));
      shrink_tiles(x, count, part.A, rank, call.H, z, ldz, b);
      expand_any(y, call.ldy, count, z, ldz, part.B, rank, O, a);
    }
    rescale(segment, part, y, call.ldy, count);
  }
}

// ------------------------------------------------------------------------------------------------ many rows

// A as the weights of a linear lie: per WIDE_TILE ranks, [blocks · TILE][WIDE_TILE] pairs, zeros behind rank and H.
INLINE long turned_size(long rank, long H) {
  return (rank + WIDE_TILE - 1) / WIDE_TILE * num_blocks(H) * TILE * WIDE_TILE;
}

static void turn_A(const bf16* A, long rank, long H, uint32_t* out) {
  const long blocks = num_blocks(H), whole = H / (2 * TILE);
  for (long j = 0; j < (rank + WIDE_TILE - 1) / WIDE_TILE * WIDE_TILE; j += TILE) {
    const int rows = int(std::clamp<long>(rank - j, 0, TILE));
    uint32_t* to = out + j / WIDE_TILE * blocks * TILE * WIDE_TILE + j % WIDE_TILE;
    for (long b = 0; b < blocks; b++, to += TILE * WIDE_TILE) {
      const bf16* from = A + j * H + b * 2 * TILE;
      bf16 end[TILE * 2 * TILE] = {};
      for (int r = 0; r < rows && b >= whole; r++)
        std::memcpy(end + r * 2 * TILE, from + r * H, (H - whole * 2 * TILE) * sizeof(bf16));
      if (b < whole) transpose(from, H, rows, to, WIDE_TILE);
      else transpose(end, 2 * TILE, rows, to, WIDE_TILE);
    }
  }
}

// Rows [0, RANKS) of B become pairs, for WIDE_TILE columns: zeros behind `rank`.
static void interleave(const bf16* B, long rank, long O, uint32_t* out) {
  alignas(64) static constexpr uint16_t FIRST[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(FIRST), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (long j = 0; j < RANKS; j += 2, out += WIDE_TILE) {
    const __m512i even = j < rank ? (__m512i)load<vu>(B + j * O) : _mm512_setzero_si512();
    const __m512i odd = j + 1 < rank ? (__m512i)load<vu>(B + (j + 1) * O) : _mm512_setzero_si512();
    store(out, _mm512_permutex2var_epi16(even, first, odd));
    store(out + L, _mm512_permutex2var_epi16(even, second, odd));
  }
}

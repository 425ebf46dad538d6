// Batched LoRA by matrix tiles. Knows no linear.
//
// A few rows of one adapter: A as it lies in memory is the left side, the rows turned to columns the right one. Many rows: A
// is turned once, rows stay rows. B is interleaved; for a single row vectors add it, in the order of a tile.
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

// ------------------------------------------------------------------------------------------------- few rows

// From one pair of turned rows to the next.
INLINE int turned_stride(int count) { return count == 1 || count > 4 ? count : 4; }

// The pairs of `count` rows as columns: [blocks · TILE][turned_stride]. `room` holds them as rows.
INLINE void turn_rows(const float* x, long ldx, int count, long H, uint32_t* room, uint32_t* out) {
  const long pairs = num_blocks(H) * TILE;
  if (count == 1) return to_pairs(x, H, BLOCK_PAIRS, out);
  for (int r = 0; r < count; r++) to_pairs(x + r * ldx, H, BLOCK_PAIRS, room + r * pairs);
  for (long k = 0; k < pairs; k += TILE)
    if (count <= 4) transpose_four(room + k, pairs, count, out + k * 4);
    else transpose(room + k, pairs, count, out + k * count, count);
}

// z[row][rank] = A·x for `count` turned rows, rounded to bf16. A [rank, H]: 32 of its rows at once, tiles 4 and 5; their
// sums are tiles 0 and 1.
static void shrink_tiles(const uint32_t* x, int count, const bf16* A, long rank, long H, Z* z, long ldz, Wanted& wanted) {
  const long blocks = num_blocks(H), whole = H / (2 * TILE), stride = H * 2, x_stride = turned_stride(count);
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
      wanted.step();
      _tile_loadd(6, x + b * TILE * x_stride, 4 * x_stride);
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
      _tile_loadd(6, x + whole * TILE * x_stride, 4 * x_stride);
      _tile_loadd(4, end, TILE_BYTES);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, end + TILE * 2 * TILE, TILE_BYTES);
      _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, sums, 4 * count);
    if (second) _tile_stored(1, sums + TILE * count, 4 * count);
    for (int r = 0; r < count; r++)
      for (int i = 0; i < RANKS; i++) z[r * ldz + j + i] = i < first + second ? narrow(sums[i * count + r]) : bf16(0);
  }
}

// y[0 .. 32·LINES) += what a tile would add: the sum over j of z[j] · B[j]. Two columns side by side are a pair of memory,
// so that a line is widened in place: into the left ones of each two, and the right ones.
template <int LINES>
INLINE void expand_lines(float* y, const float* z, const bf16* B, long rank, long O, Wanted& wanted) {
  const __m512i left = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(1));
  const __m512i first_half = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i second_half = _mm512_add_epi32(first_half, _mm512_set1_epi32(8));
  Wanted next = wanted;
  for (long first = 0; first < rank; first += RANKS) {
    vf terms[2][LINES][2] = {};  // even ones, odd ones
    const long end = std::min(rank, first + RANKS);
    const auto add = [&](vf (&to)[LINES][2], long j) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int n = 0; n < LINES; n++) {
        const vu pairs = load<vu>(B + j * O + 2 * L * n);
        to[n][0] += z[j] * low(pairs);
        to[n][1] += z[j] * high(pairs);
      }
    };
    for (long j = first; j + 2 <= end; j += 2) {
      next.step();
      add(terms[0], j);
      add(terms[1], j + 1);
    }
    if ((end - first) % 2) add(terms[0], end - 1);
#pragma GCC unroll 4
    for (int n = 0; n < LINES; n++) {
      float* to = y + 2 * L * n;
      const __m512 a = (__m512)load<vf>(to), b = (__m512)load<vf>(to + L);
      const vf lefts = (vf)_mm512_permutex2var_ps(a, left, b) + (terms[0][n][0] + terms[1][n][0]);
      const vf rights = (vf)_mm512_permutex2var_ps(a, right, b) + (terms[0][n][1] + terms[1][n][1]);
      store(to, (vf)_mm512_permutex2var_ps((__m512)lefts, first_half, (__m512)rights));
      store(to + L, (vf)_mm512_permutex2var_ps((__m512)lefts, second_half, (__m512)rights));
    }
  }
  wanted = next;
}

// y += Bᵀ·z for one row, from column `first` on. B [rank, O].
static void expand_row(float* y, const Z* z, const bf16* B, long rank, long O, long first, Wanted& wanted) {
  static thread_local Scratch room;
  float* wide = room.take<float>(rank);
  for (long j = 0; j < rank; j++) wide[j] = widen(z[j]);
  long o = first;
  for (; o + 4 * WIDE_TILE <= O; o += 4 * WIDE_TILE) expand_lines<4>(y + o, wide, B + o, rank, O, wanted);
  for (; o + WIDE_TILE <= O; o += WIDE_TILE) expand_lines<1>(y + o, wide, B + o, rank, O, wanted);
  for (; o < O; o++) {
    float total = 0.0f;
    for (long j = 0; j < rank; j++) total += wide[j] * widen(B[j * O + o]);
    y[o] += total;
  }
}

// y[row] += Bᵀ·z[row] for `count` rows.
static void expand_tiles(float* y, long ldy, int count, const Z* z, long ldz, const bf16* B, long rank, long O,
                         Wanted& wanted) {
  alignas(64) uint32_t pairs[TILE * WIDE_TILE];
  TileShapes shapes;
  for (int tile : {0, 1, 4}) shapes.set(tile, count);
  for (int tile : {6, 7}) shapes.set(tile, TILE);
  shapes.use();
  long o = 0;
  for (; o + WIDE_TILE <= O; o += WIDE_TILE) {
    _tile_loadd(0, y + o, ldy * 4);
    _tile_loadd(1, y + o + TILE, ldy * 4);
    for (long j = 0; j < rank; j += RANKS) {
      wanted.step();
      fence_tiles();
      interleave(B + j * O + o, rank - j, O, pairs);
      fence_tiles();
      _tile_loadd(4, z + j, ldz * sizeof(Z));
      _tile_loadd(6, pairs, 4 * WIDE_TILE);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, pairs + TILE, 4 * WIDE_TILE);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, y + o, ldy * 4);
    _tile_stored(1, y + o + TILE, ldy * 4);
  }
  for (int r = 0; r < count && o < O; r++) expand_row(y + r * ldy, z + r * ldz, B, rank, O, o, wanted);
}

// `count` rows of one adapter, at most LORA_TOGETHER. `after`: the part that this thread is likely to meet next.
static void adapt(const Lora& call, const Segment& segment, long row, int count, const Part& after) {
  static thread_local Scratch x_room, row_room, z_room;
  const long pairs = num_blocks(call.H) * TILE, ldz = z_stride(call);
  uint32_t* x = x_room.take<uint32_t>(pairs * turned_stride(count) + TILE);
  turn_rows(call.x + row * call.ldx, call.ldx, count, call.H, row_room.take<uint32_t>(pairs * count), x);
  Z* z = z_room.take<Z>(count * ldz);
  for (long s = 0; s < call.num_slices; s++) {
    const Part part(call, segment, s), next = s + 1 < call.num_slices ? Part(call, segment, s + 1) : after;
    float* y = call.y + row * call.ldy + call.slices[s].first;
    if (part.rank) {
      const long rank = part.rank, O = part.O, tiles = (rank + RANKS - 1) / RANKS;
      const long expand_steps = count == 1 ? rank / 2 * (O / (4 * WIDE_TILE)) : tiles * (O / WIDE_TILE);
      const long bytes = next.rank * (call.H + next.O) * sizeof(bf16);  // B lies behind A
      Wanted wanted(next.A, bytes, tiles * (call.H / (2 * TILE)) + expand_steps);
      shrink_tiles(x, count, part.A, rank, call.H, z, ldz, wanted);
      if (count == 1) expand_row(y, z, part.B, rank, O, 0, wanted);
      else expand_tiles(y, call.ldy, count, z, ldz, part.B, rank, O, wanted);
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

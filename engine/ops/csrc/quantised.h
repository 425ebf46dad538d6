// Linear of weights in 8 or 4 bits: y = W·x + b for any number of rows. Knows no adapter.
//
// Activations are read in 16 bits: number · scale, with a scale per row and group of the weights' K. The product of a
// group is one of integers, exact in any order; the sum over groups is fp32 in one fixed order: equal inputs give equal
// bits in every batch. The lowest value of int4's groups meets the sum of the group's activations.
#pragma once

#include "linear.h"

constexpr int FEW = 4;  // rows up to which a tile is read as it lies in memory

struct Activations {  // of some rows
  int16_t* numbers;   // [rows][padded]
  float* groups;      // [rows][num_groups][2]: scale, and the sum of what is read
  long padded, num_groups;
};

// The largest number of an activation: 16 bits, less where the sum over a long group would not fit 32.
static float highest_number(long group) { return float(std::min(32767L, 0x7fffffffL / (128 * group))); }

// Anything that is not finite makes the scale NaN.
static void read_group(const float* x, long count, float highest, int16_t* numbers, float* group) {
  vf most = {}, zero = {};
  long k = 0;
  for (; k + L <= count; k += L) {
    const vf each = load<vf>(x + k);
    most = vmax(most, vmax(each, -each));
    zero += each * 0.0f;
  }
  float largest = biggest(most), check = sum(zero);
  for (long i = k; i < count; i++) largest = std::max(largest, std::fabs(x[i])), check += x[i] * 0.0f;
  const float inverse = largest > 0.0f && check == 0.0f ? highest / largest : 0.0f;
  vi sums = {};
  for (k = 0; k + L <= count; k += L) {
    const vf each = load<vf>(x + k) * inverse;
    const vi number = __builtin_convertvector(each + (each > 0.0f ? splat(0.5f) : splat(-0.5f)), vi);
    sums += number;
    store(numbers + k, __builtin_convertvector(number, vs));
  }
  int64_t total = 0;
  for (int i = 0; i < L; i++) total += sums[i];
  for (; k < count; k++) {
    const float each = x[k] * inverse;
    numbers[k] = int16_t(each + (each > 0.0f ? 0.5f : -0.5f));
    total += numbers[k];
  }
  group[0] = largest / highest + check;
  group[1] = float(total) * group[0];
}

static void read_row(const Weights& w, const float* x, const Activations& to, long row) {
  int16_t* numbers = to.numbers + row * to.padded;
  float* groups = to.groups + row * to.num_groups * 2;
  const float highest = highest_number(w.group);
  for (long g = 0; g < to.num_groups; g++)
    read_group(x + g * w.group, std::min(w.group, w.K - g * w.group), highest, numbers + g * w.group, groups + 2 * g);
  std::fill(numbers + w.K, numbers + to.padded, int16_t(0));
}

// sums[r][v] = the product of `count` pairs: x from its first number on, tiles from theirs. A function of its own, so that
// nothing but its sums takes registers. What lies NEAR bytes further is prefetched.
template <class Tiles, int R, int V>
__attribute__((noinline)) static void multiply_numbers(vi* to, const int16_t* x, long padded, const char* at,
                                                       long stride, long count) {
  vi sums[R][V] = {};
  for (const char* end = at + count * Tiles::PAIR_BYTES; at < end; at += UNROLL * Tiles::PAIR_BYTES, x += 2 * UNROLL) {
    for (int t = 0; t < V / 2 && Tiles::IS_FAR; t++)
      for (int i = 0; i < UNROLL * Tiles::PAIR_BYTES; i += 64) __builtin_prefetch(at + t * stride + NEAR + i, 0, 2);
    typename Tiles::Raw raw[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) raw[v] = Tiles::fetch(at + v / 2 * stride, v % 2);
#pragma GCC unroll 4
    for (int j = 0; j < UNROLL; j++) {
      vu numbers[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) numbers[v] = Tiles::operand(raw[v], j);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        uint32_t pair;
        std::memcpy(&pair, x + r * padded + 2 * j, 4);
        const vu each = splat(pair);
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) add_products(sums[r][v], numbers[v], each);
      }
    }
  }
  std::memcpy(to, sums, sizeof sums);
}

struct Grid {  // scales and lowest values of a tile's groups; those of the next tile, and its numbers, are `stride` further
  const char* data;
  long stride, group_bytes;
};

// R rows from `row` on against V/2 tiles, `stride` bytes apart.
template <class Tiles, int R, int V>
static void product(const Activations& x, long row, const char* tiles, const Grid& grid, long group, const Out& out,
                    long out_row) {
  vf total[R][V] = {};
  const int16_t* numbers = x.numbers + row * x.padded;
  const float* groups = x.groups + row * x.num_groups * 2;
  const bool has_lowest = grid.group_bytes == group_bytes(INT4);
  for (long g = 0, k = 0; g < x.num_groups; g++, k += group, groups += 2) {
    vi sums[R][V];
    multiply_numbers<Tiles, R, V>(&sums[0][0], numbers + k, x.padded, tiles + k / 2 * Tiles::PAIR_BYTES, grid.stride,
                                  std::min(group, x.padded - k) / 2);
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      const bf16* at = (const bf16*)(grid.data + v / 2 * grid.stride + g * grid.group_bytes) + v % 2 * L;
      const vf scale = widen(load<vh>(at)), lowest = has_lowest ? widen(load<vh>(at + NT)) : vf{};
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const float* each = groups + r * x.num_groups * 2;
        total[r][v] += __builtin_convertvector(sums[r][v], vf) * each[0] * scale + lowest * each[1];
      }
    }
  }
  write<R, V>(total, out, out_row);
}

// `count` rows, at most R, against `num` tiles: two only where is_pair() says so.
constexpr bool is_pair(long rows) { return rows <= 2; }

template <class Tiles, int R>
static void multiply_rows(const Activations& x, long row, long count, const char* tiles, long num, const Grid& grid,
                          long group, const Out& out, long out_row) {
  if (count < R) {
    if constexpr (R > 1) multiply_rows<Tiles, R - 1>(x, row, count, tiles, num, grid, group, out, out_row);
    return;
  }
  if constexpr (is_pair(R))
    if (num == 2) return product<Tiles, R, 4>(x, row, tiles, grid, group, out, out_row);
  product<Tiles, R, 2>(x, row, tiles, grid, group, out, out_row);
}

// `count` rows, whose results start at out_row, against tiles [first, last).
template <class Tiles>
static void run_tiles(const Weights& w, const Activations& x, long count, const Out& out, long out_row, long first,
                      long last) {
  static thread_local Scratch buffer;
  const long bytes = tile_bytes(w), head = head_bytes(w), pairs = x.padded / 2;
  long num = 1;
  for (long t = first; t < last; t += num) {
    const char* tile = w.data + t * bytes;
    const Grid grid{tile, bytes, group_bytes(w.format)};
    const Out to{out.data + t * NT, out.stride, out.num_columns - t * NT, out.bias ? out.bias + t * NT : nullptr};
    if (count <= FEW) {
      num = is_pair(count) && t + 2 <= last ? 2 : 1;
      multiply_rows<Tiles, FEW>(x, 0, count, tile + head, num, grid, w.group, to, out_row);
      continue;
    }
    char* numbers = (char*)buffer.take<uint32_t>(pairs * NT);
    unpack<Tiles>(tile + head, pairs, numbers);
    const long parts = (count + MAX_R - 1) / MAX_R;
    for (long part = 0; part < parts; part++) {
      const long start = count * part / parts, end = count * (part + 1) / parts;
      multiply_rows<UnpackedTile, MAX_R>(x, start, end - start, numbers, 1, grid, w.group, to, out_row + start);
    }
  }
}

static void quantised_linear(const Weights& w, long M, const float* x, long ldx, const Out& out) {
  static thread_local Scratch number_room, group_room;
  const long padded = 2 * num_pairs(w.K), groups = num_groups(w.K, w.group), tiles = num_tiles(w.N);
  const long most = std::min(M, ROWS_AT_ONCE), step = std::clamp(tiles / (4L * pool.size()), 1L, 16L);
  const Activations room{number_room.take<int16_t>(most * padded), group_room.take<float>(most * groups * 2), padded,
                         groups};
  for (long start = 0; start < M; start += most) {
    const long count = std::min(most, M - start);
    for_rows(count, count * w.K / 8, [&](long row) { read_row(w, x + (start + row) * ldx, room, row); });
    pool.run((tiles + step - 1) / step, [&](long task) {
      const long first = task * step, last = std::min(first + step, tiles);
      if (w.format == INT8) run_tiles<Int8Tiles>(w, room, count, out, start, first, last);
      else run_tiles<Int4Tiles>(w, room, count, out, start, first, last);
    });
  }
}

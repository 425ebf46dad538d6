// Matrices of a stored adapter on their way into its packed buffer: scaled, rounded, turned. Knows no file.
#pragma once

#include "vectors.h"

struct Move { int64_t source, rows, columns, target, is_turned; double scale; };  // MOVE in adapters/spans.py

INLINE float wide(bf16 x) { return widen(x); }
INLINE float wide(float x) { return x; }

template <class T> static void scale_row(const T* in, long count, float scale, bf16* out) {
  long i = 0;
  if (std::is_same_v<T, bf16> && scale == 1) std::memcpy(out, in, (i = count) * sizeof *out);
  for (; i < count; i++) out[i] = narrow(wide(in[i]) * scale);
}

template <class T> static void scale_turned(const T* in, long rows, long columns, float scale, bf16* out) {
  constexpr long ROWS = 64, COLUMNS = 64;  // of a block, whose lines stay in the nearest cache
  bf16 block[ROWS * COLUMNS];
  for (long first = 0; first < columns; first += COLUMNS)
    for (long row = 0; row < rows; row += ROWS) {
      const long width = std::min(COLUMNS, columns - first), height = std::min(ROWS, rows - row);
      if (width == columns) scale_row(in + row * columns, height * width, scale, block);
      else for (long i = 0; i < height; i++) scale_row(in + (row + i) * columns + first, width, scale, block + i * width);
      for (long c = 0; c < width; c++) {
        bf16* line = out + (first + c) * rows + row;
        for (long i = 0; i < height; i++) line[i] = block[i * width + c];
      }
    }
}

template <class T> static void move_all(const T* stored, const Move* moves, long count, bf16* buffer) {
  for (const Move* m = moves; m < moves + count; m++) {
    const T* in = stored + m->source;
    bf16* out = buffer + m->target;
    if (m->is_turned) scale_turned(in, m->rows, m->columns, float(m->scale), out);
    else scale_row(in, m->rows * m->columns, float(m->scale), out);
  }
}

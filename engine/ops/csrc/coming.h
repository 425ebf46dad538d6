// Coming: memory that a later operation of a tape reads, in pieces, for operations that compute for long to prefetch on
// their way: while they multiply, the memory has time. Knows no operation.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <vector>

// Some of the pieces, as one task walks over them.
struct Far {
  static constexpr long LINES = 3;  // of 64 bytes, at a time

  const char* const* piece = nullptr;
  long count = 0, piece_lines = 0, line = 0;

  void touch() {
    if (!count) return;
    const char* at = *piece + 64 * line;
#pragma GCC unroll 4
    for (int i = 0; i < LINES; i++) __builtin_prefetch(at + 64 * i, 0, 2);
    line += LINES;
    if (line < piece_lines) return;
    line = 0;
    piece++;
    count--;
  }
};

class Coming {
 public:
  static constexpr size_t MOST = 8 << 20;  // bytes: what comes later would push out what came first

  void clear(size_t piece_bytes) {
    pieces_.clear();
    next_ = 0;
    piece_lines_ = std::max<size_t>(1, piece_bytes / 64);
  }
  bool add(const void* piece) {  // false: it is full
    if ((pieces_.size() + 1) * piece_lines_ * 64 > MOST) return false;
    pieces_.push_back(static_cast<const char*>(piece));
    return true;
  }
  void add_all(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    for (size_t done = 0; done < bytes && add(at + done);) done += piece_lines_ * 64;
  }
  // What `times` calls of touch() get through. From any thread.
  Far take(long times) {
    const long size = pieces_.size();
    if (next_.load(std::memory_order_relaxed) >= size) return {};
    const long wanted = std::max(1L, times * Far::LINES / piece_lines_), first = next_.fetch_add(wanted);
    return {pieces_.data() + first, std::clamp(size - first, 0L, wanted), piece_lines_, 0};
  }

 private:
  std::vector<const char*> pieces_;
  std::atomic<long> next_{0};
  long piece_lines_ = 1;
};

static thread_local Coming coming;  // of the operations that this thread calls

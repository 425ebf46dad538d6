// Pool: the threads of the operations. Knows no operation.
//
// Tasks are claimed one by one, and the caller works too: it waits only for tasks that a helper has begun. A helper that
// the system does not schedule (two busy processes on two cores are enough) costs its help, not a time slice per call,
// which is what a fork-join with a barrier pays. One caller at a time: the engine's step loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <thread>

#include <sched.h>

static inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class F> static void wait_until(const F& is_true) {
  for (int spins = 0; !is_true(); spins++)
    if (spins < 4096) pause_cpu();
    else sched_yield();
}

class Pool {
 public:
  void resize(int num_threads) {
    for (; helpers_ < num_threads - 1; helpers_++) std::thread([this] { help(); }).detach();
    wanted_ = num_threads;
  }
  int size() const { return is_inside_ ? 1 : wanted_; }  // threads that a job of this thread would have

  template <class F> void run(long count, const F& task) {
    if (size() == 1 || count < 2 || is_taken_.test_and_set(std::memory_order_acquire)) {
      for (long i = 0; i < count; i++) task(i);  // alone: also while another thread (one that loads) has the helpers
      return;
    }
    const uint64_t closed = ((state_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | CLOSED;
    state_.store(closed);  // nobody can claim while the job is exchanged
    call_.store([](const void* f, long i) { (*static_cast<const F*>(f))(i); }, std::memory_order_relaxed);
    data_.store(&task, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    state_.store(((closed >> 32) + 1) << 32);
    state_.notify_all();
    while (claim()) {}
    wait_until([&] { return done_.load(std::memory_order_acquire) >= count; });
    is_taken_.clear(std::memory_order_release);
  }

 private:
  static constexpr uint64_t CLOSED = 0xffffffff;
  static constexpr int SPINS = 4096;  // about 0.1 ms: longer than the gap between two operations of a step
  using Call = void (*)(const void*, long);

  bool claim() {  // runs one task of the current job; false if none is left
    uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
      const long index = long(state & CLOSED);
      const Call call = call_.load(std::memory_order_relaxed);
      const void* data = data_.load(std::memory_order_relaxed);
      if (index >= count_.load(std::memory_order_relaxed)) return false;
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      is_inside_ = true;
      call(data, index);
      is_inside_ = false;
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  }

  void help() {
    for (;;) {
      while (claim()) {}
      const uint64_t seen = state_.load(std::memory_order_acquire);
      int spins = 0;
      while (state_.load(std::memory_order_relaxed) >> 32 == seen >> 32 && spins++ < SPINS) pause_cpu();
      if (spins > SPINS) state_.wait(seen);
    }
  }

  std::atomic<uint64_t> state_{CLOSED};  // job number, index of its next task
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> data_{nullptr};
  std::atomic<long> count_{0};
  std::atomic<long> done_{0};
  std::atomic_flag is_taken_ = ATOMIC_FLAG_INIT;
  int helpers_ = 0, wanted_ = 1;
  static inline thread_local bool is_inside_ = false;
};

static Pool& pool = *new Pool;  // never destroyed: helpers outlive main()

// task(i) for i in [0, count), in parts that are worth handing over when `work` (elements) is large.
template <class F> static void for_rows(long count, long work, const F& task) {
  const long step = work < 16384 ? count : std::max(1L, count / (4 * pool.size()));
  if (!count) return;
  pool.run((count + step - 1) / step, [&](long part) {
    for (long i = part * step; i < std::min(count, (part + 1) * step); i++) task(i);
  });
}

// A buffer that only grows, 64-byte aligned: no allocation in a running server. Declared static thread_local.
class Scratch {
 public:
  template <class T> T* take(size_t count) {
    if (count * sizeof(T) > size_) {
      std::free(data_);
      size_ = (count * sizeof(T) + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(64, size_);
    }
    return static_cast<T*>(data_);
  }
  ~Scratch() { std::free(data_); }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Pool: the threads of the operations. Knows no operation.
//
// Each thread has a lane of a job's tasks, begins there and then takes what is left in others', one by one. So a thread mostly
// meets what it prefetched or wrote, call after call. The caller works too: it waits only for tasks that a helper has
// begun. A helper that the system does not schedule (two busy processes on two cores are enough) costs its help, not a time
// slice per call, which is what a fork-join with a barrier pays. One caller at a time: the engine's step loop.
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
    num_threads = std::min(num_threads, MOST);
    for (; helpers_ < num_threads - 1; helpers_++) std::thread([this, lane = helpers_ + 1] { help(lane); }).detach();
    wanted_ = num_threads;
  }
  int size() const { return is_inside_ ? 1 : wanted_; }  // threads that a job of this thread would have

  // Whether the thread that has task i of `count` is likely to have the next one too.
  static bool goes_on(long i, long count, int threads) {
    for (int t = 1; t < threads; t++)
      if (count * t / threads == i + 1) return false;
    return i + 1 < count;
  }

  template <class F> void run(long count, const F& task) {
    const int lanes = size();
    if (lanes == 1 || count < 2 || is_taken_.test_and_set(std::memory_order_acquire)) {
      for (long i = 0; i < count; i++) task(i);  // alone: also while another thread (one that loads) has the helpers
      return;
    }
    const uint32_t closed = job_.load(std::memory_order_relaxed) + 1, job = closed + 1;
    for (int t = 0; t < lanes; t++) lanes_[t].next.store(uint64_t(closed) << 32 | CLOSED, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // nobody can claim while the job is exchanged
    call_.store([](const void* f, long i) { (*static_cast<const F*>(f))(i); }, std::memory_order_relaxed);
    data_.store(&task, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    num_lanes_.store(lanes, std::memory_order_relaxed);
    for (int t = 0; t < lanes; t++) {
      lanes_[t].end.store(count * (t + 1) / lanes, std::memory_order_relaxed);
      lanes_[t].next.store(uint64_t(job) << 32 | uint64_t(count * t / lanes), std::memory_order_release);
    }
    job_.store(job);
    job_.notify_all();
    work(0);
    wait_until([&] { return done_.load(std::memory_order_acquire) >= count; });
    is_taken_.clear(std::memory_order_release);
  }

 private:
  static constexpr int MOST = 256;
  static constexpr uint64_t CLOSED = 0xffffffff;
  static constexpr int SPINS = 4096;  // about 0.1 ms: longer than the gap between two operations of a step
  using Call = void (*)(const void*, long);
  struct alignas(64) Lane {
    std::atomic<uint64_t> next{CLOSED};  // job number, index of its next task
    std::atomic<long> end{0};
  };

  bool claim(Lane& lane) {  // runs one task of the current job; false if none is left here
    uint64_t next = lane.next.load(std::memory_order_acquire);
    for (;;) {
      const long index = long(next & CLOSED);
      const Call call = call_.load(std::memory_order_relaxed);
      const void* data = data_.load(std::memory_order_relaxed);
      if (index >= lane.end.load(std::memory_order_relaxed)) return false;
      if (!lane.next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
      is_inside_ = true;
      call(data, index);
      is_inside_ = false;
      return true;
    }
  }

  void work(int own) {  // runs tasks of the current job until none is left
    const int lanes = num_lanes_.load(std::memory_order_relaxed);
    long done = 0;
    for (int i = 0; i < lanes; i++)
      while (claim(lanes_[(own + i) % lanes])) done++;
    if (done) done_.fetch_add(done, std::memory_order_release);
  }

  void help(int own) {
    for (;;) {
      const uint32_t seen = job_.load(std::memory_order_acquire);
      work(own);
      int spins = 0;
      while (job_.load(std::memory_order_relaxed) == seen && spins++ < SPINS) pause_cpu();
      if (spins > SPINS) job_.wait(seen);
    }
  }

  Lane lanes_[MOST];
  alignas(64) std::atomic<uint32_t> job_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> data_{nullptr};
  std::atomic<int> num_lanes_{1};
  alignas(64) std::atomic<long> done_{0};
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

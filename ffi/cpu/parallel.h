// A loop spread over threads of a pool that somebody else owns.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>

namespace kvcanary::cpu {

// A pool of threads. The caller of a launch may or may not be one of them.
struct Workers {
  int64_t count;                                        // threads of the pool; below 2 nothing is scheduled
  std::function<void(std::function<void()>)> schedule;  // runs a task on one of them at some time, or at once in place
};

// The chunks of one loop: each is handed to whoever asks first, the caller or a task of the pool.
class Chunks {
 public:
  Chunks(int64_t count, int64_t grain) : count_(count), grain_(grain), open_(count) {}

  // Runs chunks until none is left. A body is touched only with a chunk in hand, and a loop ends only when all are
  // finished: a task that starts after the end of the loop, where its body is gone, finds no chunk and returns.
  template <typename Body>
  void run(const Body* body) noexcept {
    int64_t finished = 0;
    for (int64_t begin; (begin = next_.fetch_add(grain_, std::memory_order_relaxed)) < count_;) {
      const int64_t end = std::min(begin + grain_, count_);
      (*body)(begin, end);
      finished += end - begin;
    }
    if (finished == 0 || open_.fetch_sub(finished, std::memory_order_acq_rel) != finished) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_.notify_one();
  }

  // Waits for the chunks that others have in hand. They are running, so that this ends however busy the pool is.
  void wait() noexcept {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return open_.load(std::memory_order_acquire) == 0; });
  }

 private:
  const int64_t count_, grain_;
  std::atomic<int64_t> next_{0};  // where the next chunk begins
  std::atomic<int64_t> open_;     // iterations that are not known to be finished
  std::mutex mutex_;
  std::condition_variable finished_;
};

// Calls body(begin, end) for consecutive pieces of [0, count), at the same time on several threads, and returns when
// all are done. Pieces have `grain` iterations, the last one fewer; a loop of no more than one piece, or on a pool of one
// thread, is one call in place. Nothing waits for a task to start, so that any thread may call this, also one of the
// pool's own while all others are busy. Bodies must not throw. Danger: grain is positive, and count + (workers.count *
// grain) fits int64.
template <typename Body>
void parallel_for(const Workers& workers, int64_t count, int64_t grain, const Body& body) noexcept {
  static_assert(std::is_nothrow_invocable_v<const Body&, int64_t, int64_t>, "A body is noexcept: no exception may leave a task of a pool.");
  if (count <= 0) return;
  const int64_t helpers = std::min(workers.count - 1, (count - 1) / grain);
  std::shared_ptr<Chunks> chunks;
  if (helpers > 0) {
    try {
      chunks = std::make_shared<Chunks>(count, grain);
      for (int64_t i = 0; i < helpers; ++i) workers.schedule([chunks, body = &body] { chunks->run(body); });
    } catch (...) {
      // No memory for another task: those that there are, and this thread, do the work.
    }
  }
  if (!chunks) return body(0, count);
  chunks->run(&body);
  chunks->wait();
}

}  // namespace kvcanary::cpu

// The threads that help with work items. A caller never waits for a helper that has not begun: it
// takes the items itself, and at the end waits only for helpers that are inside of one. On a
// machine with more runnable threads than cores this matters more than anything else here: a
// fork-join team waits, twice a kernel, until the system has run every member of it.
//
// Knows nothing of what is computed. After fork() the child has no helpers and works alone.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "parallel.h"

namespace moeserve {
namespace {

constexpr int SPINS = 20000;  // about 0.2 ms of looking for the next job before a helper sleeps
constexpr int64_t CLOSED = int64_t(1) << 40;

class Pool {
 public:
  void run(int threads, void (*call)(const void*), const void* body) {
    if (!busy_.try_lock()) return call(body);  // another thread's kernel has the helpers
    std::lock_guard<std::mutex> held(busy_, std::adopt_lock);
    while (helpers_ < threads - 1) {
      std::thread([this, number = helpers_] { help(number); }).detach();
      helpers_++;
    }
    call_ = call, body_ = body, wanted_ = threads - 1;
    inside_.fetch_and(~CLOSED);
    epoch_.fetch_add(1);
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    call(body);
    inside_.fetch_or(CLOSED);
    wait_until([this] { return (inside_.load(std::memory_order_acquire) & ~CLOSED) == 0; });
  }

 private:
  void help(int number) {
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < SPINS && epoch_.load(std::memory_order_acquire) == seen; i++) relax();
      if (epoch_.load() == seen) {
        std::unique_lock<std::mutex> lock(sleep_);
        asleep_.fetch_add(1);
        wake_.wait(lock, [&] { return epoch_.load() != seen; });
        asleep_.fetch_sub(1);
      }
      seen = epoch_.load();
      // The job cannot end while this helper counts as inside; if it has ended, it is closed.
      if (!(inside_.fetch_add(1) & CLOSED) && number < wanted_) call_(body_);
      inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex busy_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int64_t> inside_{CLOSED};
  std::atomic<int> asleep_{0};
  int helpers_ = 0;
  // Written while closed, read by helpers that entered while open.
  void (*call_)(const void*) = nullptr;
  const void* body_ = nullptr;
  int wanted_ = 0;
};

}  // namespace

void run_team(int threads, void (*call)(const void*), const void* body) {
  static Pool* pool = new Pool;  // never destroyed: helpers outlive static destructors
  pool->run(threads, call, body);
}

}  // namespace moeserve

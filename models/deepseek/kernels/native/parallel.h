// Work items over the threads of one pool (pool.cpp), and scratch memory that stays with its thread.
//
// Which thread computes an item never changes a result, so items are claimed as threads get free.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeserve {

inline long round_up(long x, long unit) { return (x + unit - 1) / unit * unit; }
inline long ceil_div(long x, long unit) { return (x + unit - 1) / unit; }

// Memory of one purpose of one thread; it only grows and goes with the thread.
struct Scratch {
  char* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  template <class T> T* get(size_t count) {
    size_t bytes = size_t(round_up(long(count * sizeof(T)), 64)) + 64;
    if (bytes > size) {
      std::free(data);
      size = bytes + bytes / 4;
      size = size_t(round_up(long(size), 64));
      data = static_cast<char*>(std::aligned_alloc(64, size));
      if (!data) std::abort();
    }
    return reinterpret_cast<T*>(data);
  }
};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// For waits that end soon unless the thread waited for has lost its core.
template <class Ready> void wait_until(Ready ready) {
  for (int i = 0; !ready(); i++) {
    if (i < 2000)
      relax();
    else
      std::this_thread::yield();
  }
}

// Runs body on the calling thread and on up to threads - 1 helpers, if they come in time.
void run_team(int threads, void (*call)(const void*), const void* body);

template <class Body> void team(int threads, const Body& body) {
  if (threads <= 1) return body();
  run_team(threads, [](const void* p) { (*static_cast<const Body*>(p))(); }, &body);
}

// Items 0 .. count - 1 of one phase.
struct Claims {
  std::atomic<long> next{0}, done{0};
  long count = 0;
  int threads = 1;

  // All items have been computed, not only claimed: what a later phase reads is there.
  void finish() {
    wait_until([this] { return done.load(std::memory_order_acquire) == count; });
  }
};

// Called by each thread of a team: item(i, next) for all i; next (or -1) is the item that this
// thread is likely to do afterwards, so that it can be fetched into the cache meanwhile.
template <class Item> void work(Claims& claims, const Item& item) {
  long i = claims.next.fetch_add(1, std::memory_order_relaxed);
  while (i < claims.count) {
    long next = i + claims.threads;
    item(i, next < claims.count ? next : -1);
    claims.done.fetch_add(1, std::memory_order_release);
    i = claims.next.fetch_add(1, std::memory_order_relaxed);
  }
}

// For bodies without phases: items in parallel, serial when the work (in multiply-adds or the
// like) is too small to wake a thread for.
constexpr double SMALL_WORK = 65536;
inline int useful_threads(int threads, double work, long items) {
  if (work < SMALL_WORK || items < 2) return 1;
  return items < threads ? int(items) : threads;
}
template <class Item> void parallel_items(int threads, double total, long count, Item item) {
  Claims claims;
  claims.count = count;
  int used = claims.threads = useful_threads(threads, total, count);
  team(used, [&] { work(claims, [&](long i, long) { item(i); }); });
}

}  // namespace moeserve

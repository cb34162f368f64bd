// Work items over the threads of one OpenMP pool, and scratch memory that stays with its thread.
//
// Which thread computes an item never changes a result, so items are claimed as threads get free.
#pragma once
#include <atomic>
#include <cstdlib>

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

// A queue of items 0 .. count - 1.
struct Claims {
  std::atomic<long> next{0};
  long count = 0;
};

// One team of threads; with one thread no pool is touched.
template <class Body> void team(int threads, Body body) {
  if (threads <= 1) {
    body();
    return;
  }
#pragma omp parallel num_threads(threads)
  body();
}
inline void team_barrier(int threads) {
  if (threads > 1) {
#pragma omp barrier
  }
}

// Called by each thread of a team: item(i, next) for all i; next is the item that this thread has
// claimed to do afterwards (or -1), so that it can be fetched into the cache meanwhile.
template <class Item> void work(Claims& claims, Item item) {
  long current = claims.next.fetch_add(1, std::memory_order_relaxed);
  while (current < claims.count) {
    long next = claims.next.fetch_add(1, std::memory_order_relaxed);
    item(current, next < claims.count ? next : -1);
    current = next;
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
  int used = useful_threads(threads, total, count);
  team(used, [&] { work(claims, [&](long i, long) { item(i); }); });
}

}  // namespace moeserve

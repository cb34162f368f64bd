// Dense products: packing of weights, linear, the gated MLP, per-head products.
//
// Knows panels and rows; knows nothing of experts or attention.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "api.h"
#include "gated.h"
#include "pack.h"

namespace moeserve {
namespace {

template <class T, class Out>
void linear(const T* x, long x_stride, long rows, const Panels<T>& w, Out* out, long out_stride,
            int threads) {
  static thread_local Scratch padding;
  x = padded_rows(x, rows, w.k, x_stride, padding);
  Rows<T> in{x, x_stride, nullptr};
  long block = row_block<T>(w.k, rows), blocks = ceil_div(rows, block), panels = w.count();
  Claims claims;
  claims.count = blocks * panels;
  double total = double(rows) * double(w.n) * double(w.k);
  int used = claims.threads = useful_threads(threads, total, claims.count);
  team(used, [&] {
    work(claims, [&](long item, long next) {
      long p = item % panels, begin = item / panels * block;
      long end = begin + block < rows ? begin + block : rows;
      long width = w.width(p), count = w.n - p * PANEL < PANEL ? w.n - p * PANEL : PANEL;
      const word* ahead = next < 0 ? nullptr : w.panel(next % panels);
      rows_by_panel<T>(in, begin, end, w.panel(p), width, int(width / LANES), w.steps(), ahead,
                       w.width(next < 0 ? p : next % panels) * w.steps() * 4,
                       [&](long r, const float* c) {
                         store_row(out + r * out_stride + p * PANEL, c, count);
                       });
    });
  });
}

// gate_up [2I, D]: gate's rows first. When I is a multiple of the panel width, gate and up columns
// lie in panels of their own and stream; else columns are cut out of shared panels.
template <class T>
void mlp(const T* x, long x_stride, long rows, const Panels<T>& gate_up, const Panels<T>& down,
         T* out, int threads) {
  static thread_local Scratch padding, hidden_memory;
  long inter = gate_up.n / 2;
  x = padded_rows(x, rows, gate_up.k, x_stride, padding);
  Rows<T> in{x, x_stride, nullptr};
  long stride = round_up(inter, LANES);
  T* hidden = hidden_memory.get<T>(size_t(rows * stride));
  Rows<T> middle{hidden, stride, nullptr};
  bool whole = inter % PANEL == 0;
  long panels = ceil_div(inter, PANEL);
  long block = row_block<T>(gate_up.k, rows), blocks = ceil_div(rows, block);
  long down_block = row_block<T>(inter, rows);
  Claims first, second;
  first.count = blocks * panels;
  second.count = ceil_div(rows, down_block) * down.count();
  double total = 3.0 * double(rows) * double(inter) * double(gate_up.k);
  int used = first.threads = second.threads = useful_threads(threads, total, first.count);
  team(used, [&] {
    static thread_local Scratch gate_memory;
    float* gate = gate_memory.get<float>(size_t(block * PANEL + PANEL));
    work(first, [&](long item, long next) {
      long p = item % panels, begin = item / panels * block;
      long end = begin + block < rows ? begin + block : rows;
      if (whole) {
        const word* ahead = next < 0 ? down.panel(0) : gate_up.panel(next % panels);
        gated_panel<T>(in, begin, end, gate_up.panel(p), gate_up.panel(panels + p), PANEL,
                       gate_up.steps(), ahead, gate, hidden + p * PANEL, stride, PANEL);
        return;
      }
      long from = p * PANEL, to = from + PANEL < inter ? from + PANEL : inter;
      rows_by_columns<T>(in, begin, end, gate_up, from, to,
                         [&](long r, long n0, long count, const float* c) {
                           store_row(gate + (r - begin) * PANEL + (n0 - from), c, count);
                         });
      rows_by_columns<T>(in, begin, end, gate_up, inter + from, inter + to,
                         [&](long r, long n0, long count, const float* c) {
                           n0 -= inter;
                           activate_row(hidden + r * stride + n0,
                                        gate + (r - begin) * PANEL + (n0 - from), c, count);
                         });
      if (to == inter)
        for (long r = begin; r < end; r++)
          std::memset(hidden + r * stride + inter, 0, size_t(stride - inter) * sizeof(T));
    });
    first.finish();
    long columns = down.count();
    work(second, [&](long item, long next) {
      long p = item % columns, begin = item / columns * down_block;
      long end = begin + down_block < rows ? begin + down_block : rows;
      long width = down.width(p), count = down.n - p * PANEL < PANEL ? down.n - p * PANEL : PANEL;
      const word* ahead = next < 0 ? nullptr : down.panel(next % columns);
      rows_by_panel<T>(middle, begin, end, down.panel(p), width, int(width / LANES), down.steps(),
                       ahead, width * down.steps() * 4, [&](long r, const float* c) {
                         store_row(out + r * down.n + p * PANEL, c, count);
                       });
    });
  });
}

// x [T, H, a] by weight [H * b, a] -> out [T, H, b].
template <class T>
void per_head(const T* x, long t_stride, long h_stride, long rows, long heads, const Panels<T>& w,
              T* out, int threads) {
  long b = w.n / heads, a = w.k, wide = round_up(a, per_word<T>());
  long chunks = ceil_div(b, PANEL), block = row_block<T>(a, rows), blocks = ceil_div(rows, block);
  // Rows of one head lie far apart, often at the same place of every page, where they would push
  // each other out of the cache; a block of them is copied together first.
  bool copied = rows > MAX_ROWS || wide != a;
  parallel_items(threads, double(rows) * double(w.n) * double(a), heads * blocks, [&](long item) {
    static thread_local Scratch copy_memory;
    long h = item % heads, begin = item / heads * block;
    long end = begin + block < rows ? begin + block : rows;
    Rows<T> in{x + h * h_stride + begin * t_stride, t_stride, nullptr};
    if (copied) {
      T* copy = copy_memory.get<T>(size_t((end - begin) * wide));
      for (long r = begin; r < end; r++) {
        std::memcpy(copy + (r - begin) * wide, x + r * t_stride + h * h_stride,
                    size_t(a) * sizeof(T));
        if (wide != a) std::memset(copy + (r - begin) * wide + a, 0, sizeof(T));
      }
      in = {copy, wide, nullptr};
    }
    for (long chunk = 0; chunk < chunks; chunk++) {
      long from = h * b + chunk * PANEL;
      long to = chunk + 1 == chunks ? (h + 1) * b : from + PANEL;
      rows_by_columns<T>(in, 0, end - begin, w, from, to,
                         [&](long r, long n0, long count, const float* c) {
                           store_row(out + (begin + r) * w.n + n0, c, count);
                         });
    }
  });
}

}  // namespace
}  // namespace moeserve

using namespace moeserve;

#define PANELS(T, data, n, k) Panels<T>{static_cast<const word*>(data), n, k}

extern "C" {

// Asks for large pages where the kernel gives them on request: streams gain about 5 %.
void ms_advise_large_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  const int64_t large = 2 << 20;
  int64_t begin = round_up(int64_t(data), large), end = (int64_t(data) + bytes) / large * large;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), size_t(end - begin), MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

int64_t ms_packed_bytes(int64_t n, int64_t k, int is_bf16) {
  return 4 * (is_bf16 ? PANELS(bf16, nullptr, n, k).words() : PANELS(float, nullptr, n, k).words());
}

void ms_pack(const void* weight, int64_t n, int64_t k, int is_bf16, void* out, int threads) {
  if (is_bf16)
    pack(static_cast<const bf16*>(weight), PANELS(bf16, out, n, k), threads);
  else
    pack(static_cast<const float*>(weight), PANELS(float, out, n, k), threads);
}

void ms_unpack(const void* packed, int64_t n, int64_t k, int is_bf16, void* weight) {
  if (is_bf16)
    unpack(PANELS(bf16, packed, n, k), static_cast<bf16*>(weight));
  else
    unpack(PANELS(float, packed, n, k), static_cast<float*>(weight));
}

void ms_linear(const void* x, int64_t x_stride, int64_t rows, const void* w, int64_t n, int64_t k,
               int is_bf16, void* out, int64_t out_stride, int out_bf16, int threads) {
  if (is_bf16 && out_bf16)
    linear(static_cast<const bf16*>(x), x_stride, rows, PANELS(bf16, w, n, k),
           static_cast<bf16*>(out), out_stride, threads);
  else if (is_bf16)
    linear(static_cast<const bf16*>(x), x_stride, rows, PANELS(bf16, w, n, k),
           static_cast<float*>(out), out_stride, threads);
  else if (out_bf16)
    linear(static_cast<const float*>(x), x_stride, rows, PANELS(float, w, n, k),
           static_cast<bf16*>(out), out_stride, threads);
  else
    linear(static_cast<const float*>(x), x_stride, rows, PANELS(float, w, n, k),
           static_cast<float*>(out), out_stride, threads);
}

void ms_mlp(const void* x, int64_t x_stride, int64_t rows, const void* gate_up, int64_t hidden,
            int64_t inter, const void* down, int64_t out_features, int is_bf16, void* out,
            int threads) {
  if (is_bf16)
    mlp(static_cast<const bf16*>(x), x_stride, rows, PANELS(bf16, gate_up, 2 * inter, hidden),
        PANELS(bf16, down, out_features, inter), static_cast<bf16*>(out), threads);
  else
    mlp(static_cast<const float*>(x), x_stride, rows, PANELS(float, gate_up, 2 * inter, hidden),
        PANELS(float, down, out_features, inter), static_cast<float*>(out), threads);
}

void ms_per_head(const void* x, int64_t t_stride, int64_t h_stride, int64_t rows, int64_t heads,
                 const void* w, int64_t n, int64_t k, int is_bf16, void* out, int threads) {
  if (is_bf16)
    per_head(static_cast<const bf16*>(x), t_stride, h_stride, rows, heads, PANELS(bf16, w, n, k),
             static_cast<bf16*>(out), threads);
  else
    per_head(static_cast<const float*>(x), t_stride, h_stride, rows, heads, PANELS(float, w, n, k),
             static_cast<float*>(out), threads);
}
}

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

template <class T, class W, class Out>
void linear(const T* x, long x_stride, long rows, const Panels<T, W>& w, Out* out, long out_stride,
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
      rows_by(in, begin, end, w, p, w.panel(p), 0, int(width / LANES), ahead,
              w.panel_words(next < 0 ? p : next % panels), [&](long r, const float* c) {
                store_row_of(out + r * out_stride + p * PANEL, out_stride, end - r, c, count);
              });
    });
  });
}

// gate_up [2I, D]: gate's rows first. When I is a multiple of the panel width, gate and up columns
// lie in panels of their own and stream; else columns are cut out of shared panels.
template <class T, class W, class V>
void mlp(const T* x, long x_stride, long rows, const Panels<T, W>& gate_up,
         const Panels<T, V>& down, T* out, int threads) {
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
        gated_panel(in, begin, end, gate_up, p, gate_up.panel(p), gate_up.panel(panels + p), ahead,
                    gate, hidden + p * PANEL, stride);
        return;
      }
      long from = p * PANEL, to = from + PANEL < inter ? from + PANEL : inter;
      rows_by_columns(in, begin, end, gate_up, from, to,
                      [&](long r, long n0, long count, const float* c) {
                        store_row(gate + (r - begin) * PANEL + (n0 - from), c, count);
                      });
      rows_by_columns(in, begin, end, gate_up, inter + from, inter + to,
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
      rows_by(middle, begin, end, down, p, down.panel(p), 0, int(width / LANES), ahead,
              down.panel_words(p), [&](long r, const float* c) {
                store_row_of(out + r * down.n + p * PANEL, down.n, end - r, c, count);
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
      rows_by_columns(in, 0, end - begin, w, from, to,
                      [&](long r, long n0, long count, const float* c) {
                        store_row_of(out + (begin + r) * w.n + n0, w.n, end - begin - r, c, count);
                      });
    }
  });
}

}  // namespace
}  // namespace moeserve

using namespace moeserve;

#define PANELS(T, data, n, k) Panels<T>{static_cast<const word*>(data), n, k}

namespace {

// Hands `use` a weight by its format (api.h).
template <class T, class Use>
void weight_of(int format, const void* data, long n, long k, const Use& use) {
  if (format & FP8_FORMAT)
    use(Panels<T, e4m3>{static_cast<const word*>(data), n, k});
  else
    use(PANELS(T, data, n, k));
}

}  // namespace

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

void ms_unpack(const void* packed, int64_t n, int64_t k, int format, void* weight) {
  auto run = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    weight_of<T>(format, packed, n, k, [&](const auto& panels) { unpack(panels, typed); });
  };
  format & BF16_FORMAT ? run(static_cast<bf16*>(weight)) : run(static_cast<float*>(weight));
}

int64_t ms_fp8_packed_bytes(int64_t n, int64_t k, int format) {
  return 4 * (format & BF16_FORMAT ? Panels<bf16, e4m3>{nullptr, n, k}.words()
                                   : Panels<float, e4m3>{nullptr, n, k}.words());
}

// weight [n, k] e4m3, row-major; scales [panels, ceil(k / 128)].
void ms_fp8_pack(const void* weight, const float* scales, int64_t n, int64_t k, int format,
                 void* out, int threads) {
  auto run = [&](auto panels) {
    pack(static_cast<const uint8_t*>(weight), scales, panels, threads);
  };
  if (format & BF16_FORMAT)
    run(Panels<bf16, e4m3>{static_cast<const word*>(out), n, k});
  else
    run(Panels<float, e4m3>{static_cast<const word*>(out), n, k});
}

// Whether weights in e4m3 are no slower than dequantised ones.
int ms_fp8_is_fast() { return USE_VBMI; }

void ms_linear(const void* x, int64_t x_stride, int64_t rows, const void* w, int64_t n, int64_t k,
               int format, void* out, int64_t out_stride, int out_bf16, int threads) {
  auto run = [&](auto* typed) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    weight_of<T>(format, w, n, k, [&](const auto& weight) {
      if (out_bf16)
        linear(typed, x_stride, rows, weight, static_cast<bf16*>(out), out_stride, threads);
      else
        linear(typed, x_stride, rows, weight, static_cast<float*>(out), out_stride, threads);
    });
  };
  format & BF16_FORMAT ? run(static_cast<const bf16*>(x)) : run(static_cast<const float*>(x));
}

void ms_mlp(const void* x, int64_t x_stride, int64_t rows, const void* gate_up, int64_t hidden,
            int64_t inter, int gate_up_format, const void* down, int64_t out_features,
            int down_format, void* out, int threads) {
  auto run = [&](auto* typed) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    weight_of<T>(gate_up_format, gate_up, 2 * inter, hidden, [&](const auto& first) {
      weight_of<T>(down_format, down, out_features, inter, [&](const auto& second) {
        mlp(typed, x_stride, rows, first, second, static_cast<T*>(out), threads);
      });
    });
  };
  gate_up_format & BF16_FORMAT ? run(static_cast<const bf16*>(x))
                               : run(static_cast<const float*>(x));
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

// What dense MLPs and experts share: silu(gate) * up of one panel, and how rows are blocked.
#pragma once
#include "fp8.h"

namespace moeserve {

// Rows that are taken through all panels together: their bytes stay in the second-level cache.
template <class T> long row_block(long k, long rows) {
  constexpr long KEPT_BYTES = 384 * 1024;
  long block = KEPT_BYTES / (k * long(sizeof(T)) + 1);
  block = block > 240 ? 240 : block < 48 ? 48 : block / MAX_ROWS * MAX_ROWS;
  return rows < 1 ? 1 : rows < block ? rows : block;
}

// out = silu(gate) * up in fp32, rounded once; n values.
template <class T> void activate_row(T* out, const float* gate, const float* up, long n) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, silu(load(gate + i)) * load(up + i));
  if (i < n) {
    int left = int(n - i);
    store_n(out + i, silu(load_n(gate + i, left)) * load_n(up + i, left), left);
  }
}

// hidden[r, 0 .. width - 1] for the rows of one panel pair, both as panel p of a weight of this
// shape; `gate` is scratch of [rows, PANEL]. `next` is the panel to fetch meanwhile (or null).
template <class T, class W>
void gated_panel(const Rows<T>& x, long begin, long end, const Panels<T, W>& shape, long p,
                 const word* gate_panel, const word* up_panel, const word* next, float* gate,
                 T* hidden, long hidden_stride) {
  long width = shape.width(p), words = shape.panel_words(p);
  int vectors = int(width / LANES);
  rows_by(x, begin, end, shape, p, gate_panel, 0, vectors, up_panel, words,
          [&](long r, const float* c) {
            std::memcpy(gate + (r - begin) * PANEL, c, size_t(width) * 4);
          });
  rows_by(x, begin, end, shape, p, up_panel, 0, vectors, next, words,
          [&](long r, const float* c) {
            activate_row(hidden + r * hidden_stride, gate + (r - begin) * PANEL, c, width);
          });
}

}  // namespace moeserve

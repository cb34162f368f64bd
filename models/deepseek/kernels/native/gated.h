// What dense MLPs and experts share: silu(gate) * up of one panel, and how rows are blocked.
#pragma once
#include "gemm.h"

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

// hidden[r, 0 .. count - 1] for the rows of one panel pair, both `width` wide; `gate` is scratch of
// [rows, PANEL]. `next` is the panel to fetch meanwhile (or null).
template <class T>
void gated_panel(const Rows<T>& x, long begin, long end, const word* gate_panel,
                 const word* up_panel, long width, long steps, const word* next, float* gate,
                 T* hidden, long hidden_stride, long count) {
  int vectors = int(width / LANES);
  long bytes = width * steps * 4;
  rows_by_panel<T>(x, begin, end, gate_panel, width, vectors, steps, up_panel, bytes,
                   [&](long r, const float* c) {
                     std::memcpy(gate + (r - begin) * PANEL, c, size_t(width) * 4);
                   });
  rows_by_panel<T>(x, begin, end, up_panel, width, vectors, steps, next, bytes,
                   [&](long r, const float* c) {
                     activate_row(hidden + r * hidden_stride, gate + (r - begin) * PANEL, c, count);
                   });
}

}  // namespace moeserve

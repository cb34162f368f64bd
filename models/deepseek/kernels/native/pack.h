// Between a row-major weight [N, K] and its panels.
#pragma once
#include "gemm.h"

namespace moeserve {

// Panel p of a weight of this shape, from row-major rows; pads with zeros.
template <class T> void pack_panel(const T* weight, const Panels<T>& shape, long p, word* out) {
  constexpr long per = per_word<T>();
  long width = shape.width(p), n = shape.n, k = shape.k;
  for (long s = 0; s < shape.steps(); s++)
    for (long c = 0; c < width; c++) {
      T values[per] = {};
      long row = p * PANEL + c;
      for (long i = 0; i < per; i++)
        if (row < n && s * per + i < k) values[i] = weight[row * k + s * per + i];
      std::memcpy(out + s * width + c, values, 4);
    }
}

template <class T> void unpack_panel(const word* packed, const Panels<T>& shape, long p, T* weight) {
  constexpr long per = per_word<T>();
  long width = shape.width(p), n = shape.n, k = shape.k;
  for (long c = 0; c < width && p * PANEL + c < n; c++)
    for (long s = 0; s < shape.steps(); s++) {
      T values[per];
      std::memcpy(values, packed + s * width + c, 4);
      for (long i = 0; i < per && s * per + i < k; i++)
        weight[(p * PANEL + c) * k + s * per + i] = values[i];
    }
}

template <class T> void pack(const T* weight, const Panels<T>& out, int threads) {
  parallel_items(threads, double(out.n) * double(out.k), out.count(), [&](long p) {
    pack_panel(weight, out, p, const_cast<word*>(out.panel(p)));
  });
}

template <class T> void unpack(const Panels<T>& packed, T* weight) {
  for (long p = 0; p < packed.count(); p++) unpack_panel(packed.panel(p), packed, p, weight);
}

}  // namespace moeserve

// Between a row-major weight [N, K] and its panels.
#pragma once
#include "fp8.h"

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

// -- in e4m3 -------------------------------------------------------------------------------

// weight [n, k] row-major bytes, scales [panels, ceil(k / 128)].
template <class T>
void pack_panel(const uint8_t* weight, const float* scales, const Panels<T, e4m3>& shape, long p,
                word* out) {
  constexpr long per = per_word<T>();
  long width = shape.width(p), n = shape.n, k = shape.k, count = ceil_div(k, SCALE_SPAN);
  std::memset(out, 0, size_t(shape.panel_words(p)) * 4);
  std::memcpy(out, scales + p * count, size_t(count) * 4);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(out) + Fp8Panel<T>::header_bytes(k);
  for (long c = 0; c < width && p * PANEL + c < n; c++)
    for (long i = 0; i < k; i++) {
      long value = (i / per * width + c) * per + i % per;
      bytes[value / GROUP * GROUP + byte_of(value % GROUP)] = weight[(p * PANEL + c) * k + i];
    }
}

template <class T>
void pack(const uint8_t* weight, const float* scales, const Panels<T, e4m3>& out, int threads) {
  parallel_items(threads, double(out.n) * double(out.k), out.count(), [&](long p) {
    pack_panel(weight, scales, out, p, const_cast<word*>(out.panel(p)));
  });
}

template <class T>
void unpack_panel(const word* packed, const Panels<T, e4m3>& shape, long p, T* weight) {
  static thread_local Scratch plain_memory;
  Panels<T> plain{nullptr, shape.n, shape.k};
  word* words = plain_memory.get<word>(size_t(plain.panel_words(p) + GROUP));
  Fp8Panel<T>{packed, shape.width(p), shape.k}.decode(0, shape.steps(), words);
  unpack_panel(words, plain, p, weight);
}

template <class T> void unpack(const Panels<T, e4m3>& packed, T* weight) {
  for (long p = 0; p < packed.count(); p++) unpack_panel(packed.panel(p), packed, p, weight);
}

}  // namespace moeserve

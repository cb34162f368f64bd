// A position in an FP8 latent cache (fp8_latents.py): e4m3 codes of the latent, an fp32 scale for
// each 128 of them, the rope key as it is. Knows one row; nothing of pages.
#pragma once
#include <cstdint>
#include <cstring>

#include "fp8.h"

namespace moeserve {

inline const float* e4m3_values() {  // of codes 0 .. 255
  static const struct Table {
    alignas(64) float value[256];
    Table() {
      for (int code = 0; code < 128; code++)
        value[code] = magnitudes()[code], value[code + 128] = -magnitudes()[code];
    }
  } table;
  return table.value;
}

// out [rank + rope]: value times scale in fp32, rounded once, then the key.
template <class T> void read_latent(const char* row, long rank, long rope, T* out) {
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(row);
  const float* values = e4m3_values();
  for (long from = 0; from < rank; from += SCALE_SPAN) {
    float scale;
    std::memcpy(&scale, row + rank + from / SCALE_SPAN * 4, 4);
    long end = from + SCALE_SPAN < rank ? from + SCALE_SPAN : rank;
    for (long at = from; at < end; at += LANES) {
      long count = end - at < LANES ? end - at : LANES;
      alignas(64) float wide[LANES] = {};
      for (long i = 0; i < count; i++) wide[i] = values[codes[at + i]];
      store_n(out + at, load(wide) * set1(scale), int(count));
    }
  }
  std::memcpy(out + rank, row + rank + ceil_div(rank, SCALE_SPAN) * 4, size_t(rope) * sizeof(T));
}

}  // namespace moeserve

// Weights kept as e4m3 bytes: a panel is its scales (one a 128 values of K), then its bytes in the
// order of a plain panel. A run of it is turned into plain words in a small buffer that stays in
// the cache, by a table of the 128 magnitudes times the scale, rounded to the model dtype: what
// dequantising beforehand gives, so every product has the same bits.
//
// Knows one panel; knows nothing of how scales were stored or joined.
#pragma once
#include <cmath>

#include "gemm.h"

#if USE_AVX512 && defined(__AVX512VBMI__)
#define USE_VBMI 1
#else
#define USE_VBMI 0
#endif

namespace moeserve {

constexpr long SCALE_SPAN = 128;  // values of K that share a scale
constexpr long GROUP = 64;    // values that are decoded at once

// The byte, in its group, of value 0 .. 63: interleaving the two halves of a decoded group puts the
// values in order. The same on every machine, since bundles travel.
inline long byte_of(long value) { return (value & 31) / 8 * 16 + (value & 32) / 4 + (value & 7); }

inline const float* magnitudes() {  // of codes 0 .. 127
  static const struct Table {
    alignas(64) float value[128];
    Table() {
      for (int code = 0; code < 128; code++)
        value[code] = code < 8 ? std::ldexp(float(code), -9)
                               : std::ldexp(float(8 + code % 8), code / 8 - 10);
      value[127] = NAN;
    }
  } table;
  return table.value;
}

template <class T> struct Decoder;

#if USE_VBMI
// The upper halves of the products as two tables of bytes, looked up 64 at once.
struct ByteTables {
  __m512i low[2], high[2];

  explicit ByteTables(float scale) {
    const float* value = magnitudes();
    __m128i l[8], h[8];
    for (int i = 0; i < 8; i++) {
      __m512i bits = rounded_bits(load(value + 16 * i) * set1(scale));
      l[i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 16));
      h[i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 24));
    }
    for (int i = 0; i < 2; i++) {
      low[i] = joined(l + 4 * i);
      high[i] = joined(h + 4 * i);
    }
  }
  static __m512i joined(const __m128i* x) {
    __m512i a = _mm512_castsi128_si512(x[0]);
    a = _mm512_inserti32x4(a, x[1], 1);
    a = _mm512_inserti32x4(a, x[2], 2);
    return _mm512_inserti32x4(a, x[3], 3);
  }
  void decode(const uint8_t* in, __m512i& first, __m512i& second) const {
    __m512i codes = _mm512_loadu_si512(in);
    __m512i l = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    __m512i h = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    h = _mm512_ternarylogic_epi32(h, codes, _mm512_set1_epi8(char(0x80)), 0x78);  // h ^ sign
    first = _mm512_unpacklo_epi8(l, h);
    second = _mm512_unpackhi_epi8(l, h);
  }
};

template <> struct Decoder<bf16> {
  ByteTables tables;
  explicit Decoder(float scale) : tables(scale) {}
  void run(const uint8_t* in, long groups, word* out) const {
    const ByteTables t = tables;
    for (long g = 0; g < groups; g++, in += GROUP, out += GROUP / 2) {
      __m512i first, second;
      t.decode(in, first, second);
      _mm512_storeu_si512(out, first);
      _mm512_storeu_si512(out + 16, second);
    }
  }
};

template <> struct Decoder<float> {
  float scale;
  explicit Decoder(float s) : scale(s) {}
  void run(const uint8_t* in, long groups, word* out) const {
    const ByteTables t(1.0f);  // e4m3 fits a brain float: exact
    float* to = reinterpret_cast<float*>(out);
    for (long g = 0; g < groups; g++, in += GROUP, to += GROUP) {
      __m512i half[2];
      t.decode(in, half[0], half[1]);
      for (int i = 0; i < 4; i++) {
        __m256i part = i % 2 ? _mm512_extracti64x4_epi64(half[i / 2], 1)
                             : _mm512_castsi512_si256(half[i / 2]);
        __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16);
        store(to + 16 * i, F16{_mm512_castsi512_ps(wide)} * set1(scale));
      }
    }
  }
};
#else
template <class T> struct Decoder {
  T table[256];
  explicit Decoder(float scale) {
    const float* value = magnitudes();
    for (int i = 0; i < 128; i += LANES) {
      store(table + i, load(value + i) * set1(scale));
      store(table + 128 + i, (zero() - load(value + i)) * set1(scale));
    }
    store_one(table + 128, -0.0f * scale);
  }
  static void store_one(float* p, float x) { *p = x; }
  static void store_one(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = uint16_t(bits >> 16);
  }
  void run(const uint8_t* in, long groups, word* out) const {
    T* to = reinterpret_cast<T*>(out);
    for (long g = 0; g < groups; g++, in += GROUP, to += GROUP)
      for (long v = 0; v < GROUP; v++) std::memcpy(to + v, table + in[byte_of(v)], sizeof(T));
  }
};
#endif

// One panel: what lies at `data`, by its shape.
template <class T> struct Fp8Panel {
  const word* data;
  long width, k;

  static constexpr long per = per_word<T>();
  static constexpr long SPAN_STEPS = SCALE_SPAN / per;
  static long header_bytes(long k) { return round_up(ceil_div(k, SCALE_SPAN) * 4, 64); }
  static long words(long width, long k) {
    return (header_bytes(k) + round_up(ceil_div(k, per) * per * width, GROUP)) / 4;
  }

  const float* scales() const { return reinterpret_cast<const float*>(data); }
  const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(data) + header_bytes(k); }

  // Steps from .. from + count - 1 (from: where a scale begins) as plain words; up to a group more
  // is written.
  void decode(long from, long count, word* out) const {
    for (long at = from; at < from + count; at += SPAN_STEPS) {
      long steps = from + count - at < SPAN_STEPS ? from + count - at : SPAN_STEPS;
      Decoder<T>(scales()[at / SPAN_STEPS])
          .run(bytes() + at * width * per, ceil_div(steps * width * per, GROUP),
               out + (at - from) * width);
    }
  }
};

struct e4m3 {};

template <class T> struct Panels<T, e4m3> {
  const word* data;
  long n, k;

  Panels<T> plain() const { return {nullptr, n, k}; }
  long steps() const { return plain().steps(); }
  long count() const { return plain().count(); }
  long width(long p) const { return plain().width(p); }
  long panel_words(long p) const { return Fp8Panel<T>::words(width(p), k); }
  const word* panel(long p) const { return data + p * Fp8Panel<T>::words(PANEL, k); }
  long words() const { return panel(count() - 1) - data + panel_words(count() - 1); }
};

// Few rows: each group is decoded in registers and multiplied at once, with no words in between.
constexpr int FUSED_ROWS = 4;        // of 64 columns: 4 x 4 sums beside tables and words
constexpr int FUSED_ROWS_HALF = 10;  // of 32 columns: 10 x 2

#if USE_VBMI
constexpr long NEAR_BYTES = 8192;  // fetched ahead

// Where KEEP, the words are stored as well, for the tiles of further rows.
template <int ROWS, int GROUPS, bool KEEP = false>
void fused_tile(const word* const* a, const uint8_t* bytes, long b_step, long steps,
                const ByteTables& tables, float* c, long c_stride, bool begins, word* keep) {
  const ByteTables t = tables;
  F16 sum[ROWS][2 * GROUPS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < 2 * GROUPS; v++)
      sum[r][v] = begins ? zero() : load(c + r * c_stride + v * LANES);
  for (long i = 0; i < steps; i++, bytes += b_step) {
    W16 right[2 * GROUPS];
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; g++) {
      prefetch(bytes + NEAR_BYTES + g * GROUP);
      t.decode(bytes + g * GROUP, right[2 * g].v, right[2 * g + 1].v);
    }
    if (KEEP)
      for (int v = 0; v < 2 * GROUPS; v++) store_words(keep + (i * 2 * GROUPS + v) * LANES, right[v]);
#pragma GCC unroll 10
    for (int r = 0; r < ROWS; r++) {
      W16 left = broadcast_word(a[r] + i);
#pragma GCC unroll 4
      for (int v = 0; v < 2 * GROUPS; v++) sum[r][v] = dot_step<bf16>(sum[r][v], left, right[v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < 2 * GROUPS; v++) store(c + r * c_stride + v * LANES, sum[r][v]);
}

using FusedTile = void (*)(const word* const*, const uint8_t*, long, long, const ByteTables&,
                           float*, long, bool, word*);

// A whole panel, 64 or 32 wide, at most FUSED_ROWS_HALF rows -> c [rows, width].
inline void fused_panel(const word* const* rows, int count, const Fp8Panel<bf16>& panel, float* c) {
  static constexpr FusedTile whole[] = {fused_tile<1, 2>, fused_tile<2, 2>, fused_tile<3, 2>,
                                        fused_tile<4, 2>};
  static constexpr FusedTile half[] = {fused_tile<1, 1>, fused_tile<2, 1>, fused_tile<3, 1>,
                                       fused_tile<4, 1>, fused_tile<5, 1>, fused_tile<6, 1>,
                                       fused_tile<7, 1>, fused_tile<8, 1>, fused_tile<9, 1>,
                                       fused_tile<10, 1>};
  const word* a[FUSED_ROWS_HALF];
  for (int r = 0; r < count; r++) a[r] = rows[r];
  const uint8_t* bytes = panel.bytes();
  long steps = ceil_div(panel.k, 2), b_step = 2 * panel.width;
  bool at_once = panel.width == PANEL && count <= FUSED_ROWS;
  for (long k = 0; k < steps; k += Fp8Panel<bf16>::SPAN_STEPS) {
    long span = steps - k < Fp8Panel<bf16>::SPAN_STEPS ? steps - k : Fp8Panel<bf16>::SPAN_STEPS;
    ByteTables tables(panel.scales()[k / Fp8Panel<bf16>::SPAN_STEPS]);
    if (at_once) {
      whole[count - 1](a, bytes, b_step, span, tables, c, panel.width, k == 0, nullptr);
    } else {
      for (long column = 0; column < panel.width; column += 32)
        half[count - 1](a, bytes + 2 * column, b_step, span, tables, c + column, panel.width,
                        k == 0, nullptr);
    }
    bytes += span * b_step;
    for (int r = 0; r < count; r++) a[r] += span;
  }
}

// Four rows by steps from .. from + count - 1 of a panel 64 wide; `keep` gets the words of these.
inline void fused_head(const word* const* rows, const Fp8Panel<bf16>& panel, long from, long count,
                       float* c, word* keep) {
  constexpr long SPAN = Fp8Panel<bf16>::SPAN_STEPS, STEP = 2 * PANEL;
  for (long at = from; at < from + count; at += SPAN) {
    const word* a[FUSED_ROWS];
    for (int r = 0; r < FUSED_ROWS; r++) a[r] = rows[r] + at;
    fused_tile<FUSED_ROWS, 2, true>(a, panel.bytes() + at * STEP, STEP,
                                    from + count - at < SPAN ? from + count - at : SPAN,
                                    ByteTables(panel.scales()[at / SPAN]), c, PANEL, at == 0,
                                    keep + (at - from) * PANEL);
  }
}
#endif

// As rows_by_panel (gemm.h), run by run: a run is decoded, multiplied and the next one fetched
// meanwhile. Between two runs all sums are stored and loaded again, which costs more than words in
// the second-level cache (LONG runs) as soon as there are several tiles.
template <class T, class Emit>
void rows_by_fp8_panel(const Rows<T>& x, long begin, long end, const Fp8Panel<T>& panel, long first,
                       int vectors, const word* next, Emit emit) {
  static const float ones[MAX_ROWS_NARROW] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  constexpr long SHORT = Fp8Panel<T>::SPAN_STEPS, LONG = 512;
  static thread_local Scratch value_memory, sum_memory;
  long limit = row_limit(vectors), stride = vectors * LANES;
  float* sums = sum_memory.get<float>(size_t((end - begin) * stride));
  const word* a[MAX_ROWS_NARROW];
  bool head = false;  // the first four rows are multiplied while words are decoded for the others
#if USE_VBMI
  if constexpr (per_word<T>() == 2) {
    head = first == 0 && vectors * LANES == PANEL;
    if (end - begin <= FUSED_ROWS_HALF && first == 0 && vectors * LANES == panel.width &&
        panel.width % 32 == 0) {
      for (long r = begin; r < end; r++) a[r - begin] = x.at(r);
      fused_panel(a, int(end - begin), panel, sums);
      for (long r = begin; r < end; r++) emit(r, sums + (r - begin) * stride);
      return;
    }
  }
#endif
  long tiles = ceil_div(end - begin - (head ? FUSED_ROWS : 0), limit);
  long steps = ceil_div(panel.k, per_word<T>()), run = head || tiles > 2 ? LONG : SHORT;
  long run_bytes = run * panel.width * per_word<T>();
  word* values = value_memory.get<word>(size_t(run * panel.width + GROUP));
  for (long k = 0; k < steps; k += run) {
    long count = steps - k < run ? steps - k : run, chunks = ceil_div(count, CHUNK);
    long row = begin;
#if USE_VBMI
    if constexpr (per_word<T>() == 2)
      if (head) {
        for (int r = 0; r < FUSED_ROWS; r++) a[r] = x.at(begin + r);
        fused_head(a, panel, k, count, sums, values);
        row += FUSED_ROWS;
      }
#endif
    if (!head) panel.decode(k, count, values);
    const char* at = reinterpret_cast<const char*>(panel.bytes()) + k * panel.width * per_word<T>();
    Ahead ahead{at + run_bytes, ceil_div(run_bytes / 64, chunks * tiles)};
    if (k + run >= steps) ahead.at = reinterpret_cast<const char*>(next);
    if (!ahead.at || (head && k + run < steps)) ahead.lines = 0;  // the head fetches by itself
    for (long t = 0; t < tiles; t++) {
      int rows = int((end - row) / (tiles - t));
      for (int r = 0; r < rows; r++) a[r] = x.at(row + r) + k;
      float* c = sums + (row - begin) * stride;
      if (k == 0)
        any_tile<T, false>(rows, vectors, a, 1, values + first, panel.width, count, c, stride,
                           nullptr, ahead);
      else
        any_tile<T, true>(rows, vectors, a, 1, values + first, panel.width, count, c, stride, ones,
                          ahead);
      if (ahead.at) ahead.at += 64 * ahead.lines * chunks;
      row += rows;
    }
  }
  for (long r = begin; r < end; r++) emit(r, sums + (r - begin) * stride);
}

template <class T, class Emit>
void rows_by(const Rows<T>& x, long begin, long end, const Panels<T, e4m3>& shape, long p,
             const word* panel, long column, int vectors, const word* next, long, Emit emit) {
  rows_by_fp8_panel<T>(x, begin, end, Fp8Panel<T>{panel, shape.width(p), shape.k}, column, vectors,
                       next, emit);
}

}  // namespace moeserve

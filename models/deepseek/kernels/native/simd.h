// Sixteen float lanes and 16-bit brain floats, on AVX-512 (with or without BF16), AVX2 or anything.
//
// Knows instruction sets; knows nothing of tensors. The width is always 16 lanes, so that the order
// of every sum is the same on every row; only the instructions below differ. Contraction is off
// (-ffp-contract=off): a fused multiply-add happens where fma() is written and nowhere else.
//
// MOESERVE_NO_BF16 drops the BF16 instructions, MOESERVE_NO_AVX512 also the 512-bit registers,
// MOESERVE_NO_SIMD all intrinsics: a test builds and compares all of them on one machine.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(MOESERVE_NO_SIMD)
#define MOESERVE_NO_AVX512
#endif
#if defined(MOESERVE_NO_AVX512)
#define MOESERVE_NO_BF16
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && !defined(MOESERVE_NO_AVX512)
#define USE_AVX512 1
#else
#define USE_AVX512 0
#endif
#if USE_AVX512 && defined(__AVX512BF16__) && !defined(MOESERVE_NO_BF16)
#define USE_AVX512_BF16 1
#else
#define USE_AVX512_BF16 0
#endif
#if !USE_AVX512 && defined(__AVX2__) && defined(__FMA__) && !defined(MOESERVE_NO_SIMD)
#define USE_AVX2 1
#else
#define USE_AVX2 0
#endif
#if USE_AVX512 || USE_AVX2
#include <immintrin.h>
#endif

namespace moeserve {

constexpr int LANES = 16;

struct bf16 {
  uint16_t bits;
};

// A word is what one dot step consumes of a row: one float, or a pair of brain floats. Rows may
// start anywhere, so words may be unaligned.
typedef uint32_t word __attribute__((aligned(1), may_alias));

template <class T> constexpr long per_word();
template <> constexpr long per_word<float>() { return 1; }
template <> constexpr long per_word<bf16>() { return 2; }

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float widen(float x) { return x; }

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }       // into level 2
inline void prefetch_write(const void* p) { __builtin_prefetch(p, 1, 3); }
inline void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }  // into level 1

#if USE_AVX512

struct F16 {
  __m512 v;
};
struct W16 {
  __m512i v;
};
inline __mmask16 first(int n) { return __mmask16((1u << n) - 1u); }
inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline void store_n(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 larger(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
// where a <= b: x, else y
inline F16 where_le(F16 a, F16 b, F16 x, F16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ), y.v, x.v)};
}
inline F16 power_of_two(F16 n) {  // n integral, -126..127
  __m512i i = _mm512_cvtps_epi32(n.v);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(127)), 23))};
}
inline F16 widen_load(const bf16* p) {
  __m256i h = _mm256_loadu_si256((const __m256i*)p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline F16 widen_load_n(const bf16* p, int n) {
  __m256i h = _mm256_maskz_loadu_epi16(first(n), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
// Round to nearest even into the upper halves; NaN stays NaN.
inline __m512i rounded_bits(F16 a) {
  __m512i x = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc00000));
}
inline void store(bf16* p, F16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(a), 16)));
}
inline void store_n(bf16* p, F16 a, int n) {
  __m256i h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(a), 16));
  _mm256_mask_storeu_epi16(p, first(n), h);
}
inline W16 load_words(const word* p) { return {_mm512_loadu_si512(p)}; }
inline void store_words(word* p, W16 a) { _mm512_storeu_si512(p, a.v); }
inline W16 broadcast_word(const word* p) { return {_mm512_set1_epi32(int(*p))}; }
// lane i: (even[i], odd[i]) as a pair of brain floats, even in the lower half
inline W16 pair_lanes(F16 even, F16 odd) {
  return {_mm512_or_si512(_mm512_srli_epi32(rounded_bits(even), 16),
                          _mm512_and_si512(rounded_bits(odd), _mm512_set1_epi32(0xffff0000)))};
}
inline W16 pair_lanes(const bf16* even, const bf16* odd) {
  __m512i e = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)even));
  __m512i o = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)odd));
  return {_mm512_or_si512(e, _mm512_slli_epi32(o, 16))};
}
// The words of 64 columns of two rows at once: half the shuffles.
inline void pair_rows(const bf16* even, const bf16* odd, word* out) {
  static const struct Order {
    alignas(64) uint16_t low[32], high[32];
    Order() {
      for (int i = 0; i < 32; i++) {
        low[i] = uint16_t(i / 2 + i % 2 * 32);
        high[i] = uint16_t(low[i] + 16);
      }
    }
  } order;
  __m512i low = _mm512_load_si512(order.low), high = _mm512_load_si512(order.high);
  for (int i = 0; i < 64; i += 32) {
    __m512i e = _mm512_loadu_si512(even + i);
    __m512i o = _mm512_loadu_si512(odd + i);
    _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(e, low, o));
    _mm512_storeu_si512(out + i + 16, _mm512_permutex2var_epi16(e, high, o));
  }
}
template <class T> F16 dot_step(F16 sum, W16 a, W16 b);
template <> inline F16 dot_step<float>(F16 sum, W16 a, W16 b) {
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(a.v), _mm512_castsi512_ps(b.v), sum.v)};
}
template <> inline F16 dot_step<bf16>(F16 sum, W16 a, W16 b) {
#if USE_AVX512_BF16
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  __m512i high = _mm512_set1_epi32(0xffff0000);
  __m512 a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16));
  __m512 b0 = _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16));
  __m512 a1 = _mm512_castsi512_ps(_mm512_and_si512(a.v, high));
  __m512 b1 = _mm512_castsi512_ps(_mm512_and_si512(b.v, high));
  return {_mm512_fmadd_ps(a0, b0, _mm512_fmadd_ps(a1, b1, sum.v))};
#endif
}

#else  // two halves of eight lanes by the compiler's vector extension

typedef float V8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
struct F16 {
  V8 h[2];
};
struct W16 {
  U8 h[2];
};
inline V8 fill8(float x) { return V8{x, x, x, x, x, x, x, x}; }
inline U8 fill8u(uint32_t x) { return U8{x, x, x, x, x, x, x, x}; }
inline F16 set1(float x) { return {{fill8(x), fill8(x)}}; }
inline F16 zero() { return set1(0.0f); }
inline F16 load(const float* p) {
  F16 a;
  std::memcpy(&a, p, 64);
  return a;
}
inline F16 load_n(const float* p, int n) {
  F16 a = zero();
  std::memcpy(&a, p, size_t(n) * 4);
  return a;
}
inline void store(float* p, F16 a) { std::memcpy(p, &a, 64); }
inline void store_n(float* p, F16 a, int n) { std::memcpy(p, &a, size_t(n) * 4); }
inline F16 operator+(F16 a, F16 b) { return {{a.h[0] + b.h[0], a.h[1] + b.h[1]}}; }
inline F16 operator-(F16 a, F16 b) { return {{a.h[0] - b.h[0], a.h[1] - b.h[1]}}; }
inline F16 operator*(F16 a, F16 b) { return {{a.h[0] * b.h[0], a.h[1] * b.h[1]}}; }
inline F16 operator/(F16 a, F16 b) { return {{a.h[0] / b.h[0], a.h[1] / b.h[1]}}; }
inline V8 fma8(V8 a, V8 b, V8 c) {
#if USE_AVX2
  return (V8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
inline F16 fma(F16 a, F16 b, F16 c) {
  return {{fma8(a.h[0], b.h[0], c.h[0]), fma8(a.h[1], b.h[1], c.h[1])}};
}
inline F16 larger(F16 a, F16 b) {
  return {{a.h[0] > b.h[0] ? a.h[0] : b.h[0], a.h[1] > b.h[1] ? a.h[1] : b.h[1]}};
}
inline F16 where_le(F16 a, F16 b, F16 x, F16 y) {
  return {{a.h[0] <= b.h[0] ? x.h[0] : y.h[0], a.h[1] <= b.h[1] ? x.h[1] : y.h[1]}};
}
inline F16 power_of_two(F16 n) {
  F16 out;
  for (int i = 0; i < 2; i++) {
    I8 bits = (__builtin_convertvector(n.h[i], I8) + 127) << 23;
    out.h[i] = (V8)bits;
  }
  return out;
}
inline W16 widen_halves(const bf16* p, int n) {
  uint32_t wide[16] = {};
  for (int i = 0; i < n; i++) wide[i] = uint32_t(p[i].bits) << 16;
  W16 a;
  std::memcpy(&a, wide, 64);
  return a;
}
inline F16 as_float(W16 a) { return {{(V8)a.h[0], (V8)a.h[1]}}; }
inline F16 widen_load(const bf16* p) { return as_float(widen_halves(p, 16)); }
inline F16 widen_load_n(const bf16* p, int n) { return as_float(widen_halves(p, n)); }
inline W16 rounded_bits(F16 a) {
  W16 out;
  for (int i = 0; i < 2; i++) {
    U8 x = (U8)a.h[i];
    U8 r = x + 0x7fffu + ((x >> 16) & 1u);
    out.h[i] = (U8)(a.h[i] == a.h[i] ? (V8)r : (V8)fill8u(0x7fc00000u));
  }
  return out;
}
inline void store_n(bf16* p, F16 a, int n) {
  uint32_t bits[16];
  W16 r = rounded_bits(a);
  std::memcpy(bits, &r, 64);
  for (int i = 0; i < n; i++) p[i].bits = uint16_t(bits[i] >> 16);
}
inline void store(bf16* p, F16 a) { store_n(p, a, 16); }
inline W16 load_words(const word* p) {
  W16 a;
  std::memcpy(&a, p, 64);
  return a;
}
inline void store_words(word* p, W16 a) { std::memcpy(p, &a, 64); }
inline W16 broadcast_word(const word* p) { return {{fill8u(*p), fill8u(*p)}}; }
inline W16 pair_lanes(F16 even, F16 odd) {
  W16 e = rounded_bits(even), o = rounded_bits(odd), out;
  for (int i = 0; i < 2; i++) out.h[i] = (e.h[i] >> 16) | (o.h[i] & 0xffff0000u);
  return out;
}
inline W16 pair_lanes(const bf16* even, const bf16* odd) {
  uint32_t both[16];
  for (int i = 0; i < 16; i++) both[i] = even[i].bits | (uint32_t(odd[i].bits) << 16);
  W16 out;
  std::memcpy(&out, both, 64);
  return out;
}
inline void pair_rows(const bf16* even, const bf16* odd, word* out) {
  for (int i = 0; i < 64; i += 16) store_words(out + i, pair_lanes(even + i, odd + i));
}
template <class T> F16 dot_step(F16 sum, W16 a, W16 b);
template <> inline F16 dot_step<float>(F16 sum, W16 a, W16 b) {
  return fma(as_float(a), as_float(b), sum);
}
template <> inline F16 dot_step<bf16>(F16 sum, W16 a, W16 b) {
  F16 out;
  for (int i = 0; i < 2; i++) {
    V8 a0 = (V8)(a.h[i] << 16), b0 = (V8)(b.h[i] << 16);
    V8 a1 = (V8)(a.h[i] & 0xffff0000u), b1 = (V8)(b.h[i] & 0xffff0000u);
    out.h[i] = fma8(a0, b0, fma8(a1, b1, sum.h[i]));
  }
  return out;
}

#endif

inline void pair_rows(const float* row, const float*, word* out) { std::memcpy(out, row, 256); }
inline F16 widen_load(const float* p) { return load(p); }
inline F16 widen_load_n(const float* p, int n) { return load_n(p, n); }

// exp of each lane: 2^n * p(r), |r| <= ln2 / 2, error about 1 ulp; below -87.3 (and -inf): 0.
inline F16 exp(F16 x) {
  F16 low = set1(-87.3f);
  F16 y = larger(low, x);
  y = where_le(y, set1(88.7f), y, set1(88.7f));
  F16 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  F16 n = (y * set1(1.44269504f) + magic) - magic;
  F16 r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p * r, r, r) + set1(1.0f);
  return where_le(x, low, zero(), p * power_of_two(n));
}
inline F16 sigmoid(F16 x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }
inline F16 silu(F16 x) { return x * sigmoid(x); }

// The sum of all lanes, in one fixed tree.
inline float sum_lanes(F16 a) {
  float x[LANES];
  store(x, a);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) x[i] = x[i] + x[i + width];
  return x[0];
}

}  // namespace moeserve

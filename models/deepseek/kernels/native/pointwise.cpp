// What touches each row once: norms, rotary positions, writing the cache.
#include "api.h"
#include "parallel.h"
#include "simd.h"

namespace moeserve {
namespace {

// Sum of squares in four accumulators of 16 lanes, then one tree: depends on the row alone.
template <class T> float mean_square(const T* x, long n) {
  F16 sum[4] = {zero(), zero(), zero(), zero()};
  long i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      F16 a = widen_load(x + i + j * LANES);
      sum[j] = fma(a, a, sum[j]);
    }
  for (int j = 0; i < n; i += LANES, j++) {
    F16 a = widen_load_n(x + i, n - i < LANES ? int(n - i) : LANES);
    sum[j] = fma(a, a, sum[j]);
  }
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) / float(n);
}

template <class T>
void norm_row(const T* x, const float* weight, float eps, long n, T* out) {
  F16 inverse = set1(1.0f / __builtin_sqrtf(mean_square(x, n) + eps));
  for (long i = 0; i < n; i += LANES) {
    int count = n - i < LANES ? int(n - i) : LANES;
    store_n(out + i, widen_load_n(x + i, count) * inverse * load_n(weight + i, count), count);
  }
}

template <class T>
void rms_norm(const T* x, long stride, long rows, long n, const float* weight, float eps, T* out,
              int threads) {
  parallel_items(threads, double(rows) * double(n), rows,
                 [&](long r) { norm_row(x + r * stride, weight, eps, n, out + r * n); });
}

template <class T>
void add_rms_norm(T* residual, long residual_stride, const T* x, long stride, long rows, long n,
                  const float* weight, float eps, T* out, int threads) {
  parallel_items(threads, double(rows) * double(n), rows, [&](long r) {
    T* sum = residual + r * residual_stride;
    const T* add = x + r * stride;
    for (long i = 0; i < n; i += LANES) {
      int count = n - i < LANES ? int(n - i) : LANES;
      store_n(sum + i, widen_load_n(sum + i, count) + widen_load_n(add + i, count), count);
    }
    norm_row(sum, weight, eps, n, out + r * n);
  });
}

constexpr long MAX_ROPE_DIM = 512;

template <class T>
void rope(const T* x, long t_stride, long h_stride, long rows, long heads, long dim,
          const int64_t* positions, const float* cos_sin, T* out, int threads) {
  parallel_items(threads, 2.0 * double(rows) * double(heads * dim), rows, [&](long r) {
    const float* cosine = cos_sin + positions[r] * dim;
    const float* sine = cosine + dim / 2;
    float rotated[MAX_ROPE_DIM + LANES];
    for (long h = 0; h < heads; h++) {
      const T* from = x + r * t_stride + h * h_stride;
      T* to = out + (r * heads + h) * dim;
      for (long i = 0; i < dim / 2; i++) {
        float even = widen(from[2 * i]), odd = widen(from[2 * i + 1]);
        rotated[2 * i] = even * cosine[i] - odd * sine[i];
        rotated[2 * i + 1] = even * sine[i] + odd * cosine[i];
      }
      for (long i = 0; i < dim; i += LANES)
        store_n(to + i, load(rotated + i), dim - i < LANES ? int(dim - i) : LANES);
    }
  });
}

}  // namespace
}  // namespace moeserve

using namespace moeserve;

extern "C" {

void ms_rms_norm(const void* x, int64_t stride, int64_t rows, int64_t n, int is_bf16,
                 const float* weight, float eps, void* out, int threads) {
  if (is_bf16)
    rms_norm(static_cast<const bf16*>(x), stride, rows, n, weight, eps, static_cast<bf16*>(out),
             threads);
  else
    rms_norm(static_cast<const float*>(x), stride, rows, n, weight, eps, static_cast<float*>(out),
             threads);
}

void ms_add_rms_norm(void* residual, int64_t residual_stride, const void* x, int64_t stride,
                     int64_t rows, int64_t n, int is_bf16, const float* weight, float eps,
                     void* out, int threads) {
  if (is_bf16)
    add_rms_norm(static_cast<bf16*>(residual), residual_stride, static_cast<const bf16*>(x), stride,
                 rows, n, weight, eps, static_cast<bf16*>(out), threads);
  else
    add_rms_norm(static_cast<float*>(residual), residual_stride, static_cast<const float*>(x),
                 stride, rows, n, weight, eps, static_cast<float*>(out), threads);
}

int ms_rope(const void* x, int64_t t_stride, int64_t h_stride, int64_t rows, int64_t heads,
            int64_t dim, int is_bf16, const int64_t* positions, const float* cos_sin,
            int64_t max_position, void* out, int threads) {
  for (int64_t r = 0; r < rows; r++)
    if (positions[r] < 0 || positions[r] >= max_position) return 4;
  if (is_bf16)
    rope(static_cast<const bf16*>(x), t_stride, h_stride, rows, heads, dim, positions, cos_sin,
         static_cast<bf16*>(out), threads);
  else
    rope(static_cast<const float*>(x), t_stride, h_stride, rows, heads, dim, positions, cos_sin,
         static_cast<float*>(out), threads);
  return 0;
}

int ms_write_cache(char* layer, int64_t slots, const char* latent, int64_t latent_stride,
                   const char* k_rope, int64_t rope_stride, int64_t rows, int64_t latent_bytes,
                   int64_t rope_bytes, const int64_t* slot_mapping) {
  for (int64_t r = 0; r < rows; r++)
    if (slot_mapping[r] < 0 || slot_mapping[r] >= slots) return 5;
  for (int64_t r = 0; r < rows; r++) {
    char* to = layer + slot_mapping[r] * (latent_bytes + rope_bytes);
    std::memcpy(to, latent + r * latent_stride, size_t(latent_bytes));
    std::memcpy(to + latent_bytes, k_rope + r * rope_stride, size_t(rope_bytes));
  }
  return 0;
}

const char* ms_instruction_set() {
#if USE_AVX512_BF16
  return "AVX-512 with BF16";
#elif USE_AVX512
  return "AVX-512";
#elif USE_AVX2
  return "AVX2";
#else
  return "portable";
#endif
}
}

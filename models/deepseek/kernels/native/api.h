// The C functions that other files of the library call; the rest is declared where it is defined.
#pragma once
#include <cstdint>

// How a weight is stored, and for rows of which dtype; the same as `is_bf16` where it is plain.
enum { BF16_FORMAT = 1, FP8_FORMAT = 2 };

extern "C" {
void ms_linear(const void* x, int64_t x_stride, int64_t rows, const void* w, int64_t n, int64_t k,
               int format, void* out, int64_t out_stride, int out_bf16, int threads);
void ms_per_head(const void* x, int64_t t_stride, int64_t h_stride, int64_t rows, int64_t heads,
                 const void* w, int64_t n, int64_t k, int is_bf16, void* out, int threads);
void ms_rms_norm(const void* x, int64_t stride, int64_t rows, int64_t n, int is_bf16,
                 const float* weight, float eps, void* out, int threads);
int ms_rope(const void* x, int64_t t_stride, int64_t h_stride, int64_t rows, int64_t heads,
            int64_t dim, int is_bf16, const int64_t* positions, const float* cos_sin,
            int64_t max_position, void* out, int threads);
int ms_write_cache(char* layer, int64_t slots, const char* latent, int64_t latent_stride,
                   const char* k_rope, int64_t rope_stride, int64_t rows, int64_t latent_bytes,
                   int64_t rope_bytes, const int64_t* slot_mapping);
int ms_latent_attention(const void* q_latent, int64_t latent_t, int64_t latent_h,
                        const void* q_rope, int64_t rope_t, int64_t rope_h, int64_t rows,
                        int64_t heads, int64_t rank, int64_t rope, const void* layer, int64_t row_bytes,
                        int64_t blocks, int64_t block_size, const int64_t* positions,
                        const int32_t* query_start, const int32_t* tables, int64_t sequences,
                        int64_t table_width, const int32_t* ancestors, int64_t depth, float scale,
                        int is_bf16, void* out, int threads);
}

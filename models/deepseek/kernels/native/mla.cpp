// A whole absorbed attention layer in one call: for a few rows, the calls from Python would cost as
// much as the arithmetic of the smaller of these steps. The same functions in the same order as
// the parts, so the same bits.
#include "api.h"
#include "parallel.h"

namespace moeserve {
namespace {

struct Mla {  // as in native_mla.py
  int64_t hidden, heads, nope, rope, rank, value, query_rank, max_position;
  const void *qkv_a, *q_b, *w_uk, *w_uv, *o;
  const float *q_a_norm, *kv_a_norm, *cos_sin;
  float scale, eps;
  int32_t is_bf16;
  int32_t qkv_a_format, q_b_format, o_format;
};

}  // namespace
}  // namespace moeserve

using namespace moeserve;

extern "C" int ms_mla(const Mla* m, const void* x, int64_t x_stride, int64_t rows, void* layer,
                      int64_t blocks, int64_t block_size, const int64_t* slot_mapping,
                      const int64_t* positions, const int32_t* query_start, const int32_t* tables,
                      int64_t sequences, int64_t table_width, const int32_t* ancestors,
                      int64_t depth, void* out, int threads) {
  static thread_local Scratch memory;
  int64_t size = m->is_bf16 ? 2 : 4, width = m->nope + m->rope;
  int64_t queries = m->heads * width, cached = m->rank + m->rope;
  int64_t first = m->query_rank ? m->query_rank : queries, joined_width = first + cached;
  // Each part starts at a multiple of 64 bytes.
  int64_t at = 0;
  auto place = [&](int64_t values) {
    int64_t here = at;
    at += round_up(rows * values * size, 64);
    return here;
  };
  int64_t joined = place(joined_width), normed = place(m->query_rank),
          expanded = place(m->query_rank ? queries : 0), latent = place(m->rank),
          k_rope = place(m->rope), q_rope = place(m->heads * m->rope),
          q_latent = place(m->heads * m->rank), attended = place(m->heads * m->rank),
          values = place(m->heads * m->value);
  char* base = memory.get<char>(size_t(at));
  int bf16 = m->is_bf16;

  ms_linear(x, x_stride, rows, m->qkv_a, joined_width, m->hidden, m->qkv_a_format,
            base + joined, joined_width,
            bf16, threads);
  const char* q = base + joined;
  int64_t q_stride = joined_width;
  if (m->query_rank) {
    ms_rms_norm(q, joined_width, rows, m->query_rank, bf16, m->q_a_norm, m->eps, base + normed,
                threads);
    ms_linear(base + normed, m->query_rank, rows, m->q_b, queries, m->query_rank,
              m->q_b_format, base + expanded, queries, bf16, threads);
    q = base + expanded, q_stride = queries;
  }
  ms_rms_norm(base + joined + first * size, joined_width, rows, m->rank, bf16, m->kv_a_norm, m->eps,
              base + latent, threads);
  if (int error = ms_rope(base + joined + (first + m->rank) * size, joined_width, m->rope, rows, 1,
                          m->rope, bf16, positions, m->cos_sin, m->max_position, base + k_rope,
                          threads))
    return error;
  if (int error = ms_write_cache(static_cast<char*>(layer), blocks * block_size, base + latent,
                                 m->rank * size, base + k_rope, m->rope * size, rows,
                                 m->rank * size, m->rope * size, slot_mapping))
    return error;
  if (int error = ms_rope(q + m->nope * size, q_stride, width, rows, m->heads, m->rope, bf16,
                          positions, m->cos_sin, m->max_position, base + q_rope, threads))
    return error;
  ms_per_head(q, q_stride, width, rows, m->heads, m->w_uk, m->heads * m->rank, m->nope, bf16,
              base + q_latent, threads);
  if (int error = ms_latent_attention(
          base + q_latent, m->heads * m->rank, m->rank, base + q_rope, m->heads * m->rope, m->rope,
          rows, m->heads, m->rank, m->rope, layer, 0, blocks, block_size, positions, query_start,
          tables, sequences, table_width, ancestors, depth, m->scale, bf16, base + attended,
          threads))
    return error;
  ms_per_head(base + attended, m->heads * m->rank, m->rank, rows, m->heads, m->w_uv,
              m->heads * m->value, m->rank, bf16, base + values, threads);
  ms_linear(base + values, m->heads * m->value, rows, m->o, m->hidden, m->heads * m->value,
            m->o_format, out, m->hidden, bf16, threads);
  return 0;
}

// The inner loop of every product: a tile of rows by vectors, its sums in registers.
#include "gemm.h"

namespace moeserve {
namespace {

// A pointer that the compiler keeps as a scalar: copying several at once as a vector would wait for
// the scalar stores that have just written them.
inline const word* scalar(const word* p) {
#if defined(__GNUC__)
  asm("" : "+r"(p));
#endif
  return p;
}

template <class T, int ROWS, int VECTORS, bool SCALED>
void tile(const word* const* a_rows, long a_step, const word* b, long b_step, long steps, float* c,
          long c_stride, const float* row_scale, Ahead ahead) {
  F16 sum[ROWS][VECTORS];
  const word* a[ROWS];
  for (int r = 0; r < ROWS; r++) {
    a[r] = scalar(a_rows[r]);
    for (int v = 0; v < VECTORS; v++)
      sum[r][v] = SCALED ? load(c + r * c_stride + v * LANES) * set1(row_scale[r]) : zero();
  }
  long i = 0;
  for (long left = steps; left > 0; left -= CHUNK) {
    for (long n = 0; n < ahead.lines; n++) prefetch(ahead.at + 64 * n);
    ahead.at += 64 * ahead.lines;
    for (long n = left < CHUNK ? left : CHUNK; n > 0; n--) {
      W16 right[VECTORS];
      for (int v = 0; v < VECTORS; v++) right[v] = load_words(b + v * LANES);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        W16 left_word = broadcast_word(a[r] + i);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v] = dot_step<T>(sum[r][v], left_word, right[v]);
      }
      i += a_step;
      b += b_step;
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store(c + r * c_stride + v * LANES, sum[r][v]);
}

template <class T>
using Tile = void (*)(const word* const*, long, const word*, long, long, float*, long, const float*,
                      Ahead);

// The tile of this many rows, 1 .. row_limit(vectors).
template <class T, int V, bool S> Tile<T> tile_of(int rows) {
  static constexpr Tile<T> wide[] = {tile<T, 1, V, S>, tile<T, 2, V, S>, tile<T, 3, V, S>,
                                     tile<T, 4, V, S>, tile<T, 5, V, S>, tile<T, 6, V, S>};
  if constexpr (USE_AVX512 && V <= 2) {
    static constexpr Tile<T> tall[] = {tile<T, 7, V, S>,  tile<T, 8, V, S>,  tile<T, 9, V, S>,
                                       tile<T, 10, V, S>, tile<T, 11, V, S>, tile<T, 12, V, S>};
    if (rows > MAX_ROWS) return tall[rows - MAX_ROWS - 1];
  }
  return wide[rows - 1];
}

}  // namespace

template <class T, bool SCALED>
void any_tile(int rows, int vectors, const word* const* a, long a_step, const word* b, long b_step,
              long steps, float* c, long c_stride, const float* row_scale, Ahead ahead) {
#if USE_AVX512
  Tile<T> run = vectors == 4   ? tile_of<T, 4, SCALED>(rows)
                : vectors == 1 ? tile_of<T, 1, SCALED>(rows)
                : vectors == 2 ? tile_of<T, 2, SCALED>(rows)
                               : tile_of<T, 3, SCALED>(rows);
  run(a, a_step, b, b_step, steps, c, c_stride, row_scale, ahead);
#else
  for (int v = 0; v < vectors; v++)
    tile_of<T, 1, SCALED>(rows)(a, a_step, b + v * LANES, b_step, steps, c + v * LANES, c_stride, row_scale,
                        v == 0 ? ahead : Ahead{});
#endif
}

#define TILE(T, SCALED)                                                                         \
  template void any_tile<T, SCALED>(int, int, const word* const*, long, const word*, long, long, \
                                    float*, long, const float*, Ahead)
TILE(float, false);
TILE(float, true);
TILE(bf16, false);
TILE(bf16, true);

}  // namespace moeserve

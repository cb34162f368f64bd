// Tiles of a matrix product whose sums run over K in one order for every row, however many rows.
//
// out[r, n] = sum_k a[r, k] * b[k, n]: each output element has one accumulator lane, k ascends (by
// words: one float or a pair of brain floats). b lies in panels [N / 64][K words][64] (the last
// panel may be 16, 32 or 48 wide), so a panel is one contiguous stream.
#pragma once
#include "parallel.h"
#include "simd.h"

namespace moeserve {

constexpr long PANEL = 64;
constexpr int MAX_ROWS = 6;       // rows of a full-width tile: 6 x 4 accumulators of 32 registers
constexpr int MAX_ROWS_NARROW = 12;  // rows of a tile one or two vectors wide
#if USE_AVX512
constexpr int MAX_VECTORS = 4;
#else
constexpr int MAX_VECTORS = 1;  // 6 x 2 halves of 16 registers
#endif
constexpr long CHUNK = 8;  // k steps between two bursts of prefetches

inline int row_limit(int vectors) {
#if USE_AVX512
  return vectors <= 2 ? MAX_ROWS_NARROW : MAX_ROWS;
#else
  (void)vectors;
  return MAX_ROWS;
#endif
}

// What a tile reads besides its numbers: `lines` cache lines every CHUNK steps, from `at` on.
struct Ahead {
  const char* at = nullptr;
  long lines = 0;
};

// A pointer that the compiler keeps as a scalar: copying several at once as a vector would wait for
// the scalar stores that have just written them.
inline const word* scalar(const word* p) {
#if defined(__GNUC__)
  asm("" : "+r"(p));
#endif
  return p;
}

// c[r][.] = start + sum over k, with start = 0 or, where scaled, c * row_scale[r].
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

// rows <= row_limit(vectors); vectors 1..4.
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

// A weight [N, K] in panels.
template <class T> struct Panels {
  const word* data;
  long n, k;

  long steps() const { return ceil_div(k, per_word<T>()); }
  long count() const { return ceil_div(n, PANEL); }
  long width(long panel) const {
    long left = round_up(n, LANES) - panel * PANEL;
    return left < PANEL ? left : PANEL;
  }
  const word* panel(long p) const { return data + p * PANEL * steps(); }
  long words() const { return steps() * round_up(n, LANES); }
};

// How rows of a matrix product are found: row r at base + index(r) * stride elements.
template <class T> struct Rows {
  const T* base;
  long stride;
  const int32_t* index;  // null: r itself

  const word* at(long r) const {
    return reinterpret_cast<const word*>(base + (index ? long(index[r]) : r) * stride);
  }
};

// Rows begin .. end - 1 times one panel (from column `column` of it, `vectors` wide) ->
// emit(r, float[16 * vectors]). `next` (or null) is a stream to have in the cache afterwards.
template <class T, class Emit>
void rows_by_panel(const Rows<T>& x, long begin, long end, const word* b, long b_step, int vectors,
                   long steps, const word* next, long next_bytes, Emit emit) {
  alignas(64) float c[MAX_ROWS_NARROW * PANEL];
  const word* a[MAX_ROWS_NARROW];
  long limit = row_limit(vectors);
  long tiles = ceil_div(end - begin, limit);
  long chunks = ceil_div(steps, CHUNK), bursts = tiles * chunks;
  long lines = next && bursts ? ceil_div(next_bytes / 64, bursts) : 0;
  const char* ahead = reinterpret_cast<const char*>(next);
  long row = begin;
  for (long t = 0; t < tiles; t++) {
    int rows = int((end - row) / (tiles - t));  // even tiles: 7 rows are 3 + 4, not 6 + 1
    if (rows > limit) rows = int(limit);
    for (int r = 0; r < rows; r++) a[r] = x.at(row + r);
    any_tile<T, false>(rows, vectors, a, 1, b, b_step, steps, c, vectors * LANES, nullptr,
                Ahead{ahead, lines});
    if (ahead) ahead += lines * 64 * chunks;
    for (int r = 0; r < rows; r++) emit(row + r, c + r * vectors * LANES);
    row += rows;
  }
}

// Columns begin .. end - 1 (any, at most PANEL of them) of a weight, for rows row0 .. row1 - 1 ->
// emit(r, n0, count, float*): columns n0 .. n0 + count - 1 of row r.
template <class T, class Emit>
void rows_by_columns(const Rows<T>& x, long row0, long row1, const Panels<T>& w, long begin,
                     long end, Emit emit) {
  long at = begin;
  while (at < end) {
    long panel = at / PANEL, width = w.width(panel);
    long first = (at - panel * PANEL) / LANES * LANES;  // aligned start inside the panel
    long stop = panel * PANEL + width < end ? panel * PANEL + width : end;
    int vectors = int(ceil_div(stop - panel * PANEL - first, LANES));
    long skip = at - (panel * PANEL + first);
    long count = stop - at;
    rows_by_panel<T>(x, row0, row1, w.panel(panel) + first, width, vectors, w.steps(), nullptr, 0,
                     [&](long r, const float* c) { emit(r, at, count, c + skip); });
    at = stop;
  }
}

// n values of one row, in the type wanted.
template <class Out> void store_row(Out* out, const float* c, long n) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, load(c + i));
  if (i < n) store_n(out + i, load(c + i), int(n - i));
}

// Rows whose words would run past their end (an odd number of brain floats) are copied first.
template <class T> const T* padded_rows(const T* x, long rows, long k, long& stride, Scratch& s) {
  if (per_word<T>() == 1 || k % 2 == 0) return x;
  T* copy = s.get<T>(size_t(rows * (k + 1)));
  for (long r = 0; r < rows; r++) {
    std::memcpy(copy + r * (k + 1), x + r * stride, size_t(k) * sizeof(T));
    std::memset(copy + r * (k + 1) + k, 0, sizeof(T));
  }
  stride = k + 1;
  return copy;
}

}  // namespace moeserve

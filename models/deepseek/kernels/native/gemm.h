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

// One tile: for r < rows and the columns of `vectors` vectors,
//   c[r][.] = start + sum over k of a_rows[r][k * a_step] * b[k * b_step ..],
// start = 0 or, where SCALED, c[r][.] * row_scale[r]. rows <= row_limit(vectors), vectors 1..4.
// In tile.cpp, once for all users.
template <class T, bool SCALED>
void any_tile(int rows, int vectors, const word* const* a_rows, long a_step, const word* b,
              long b_step, long steps, float* c, long c_stride, const float* row_scale,
              Ahead ahead);

// A weight [N, K] in panels, for rows of T, stored as W (fp8.h has the other kind).
template <class T, class W = T> struct Panels {
  const word* data;
  long n, k;

  long steps() const { return ceil_div(k, per_word<T>()); }
  long count() const { return ceil_div(n, PANEL); }
  long width(long panel) const {
    long left = round_up(n, LANES) - panel * PANEL;
    return left < PANEL ? left : PANEL;
  }
  long panel_words(long p) const { return width(p) * steps(); }
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

// A panel is a stream from memory, and how it is best fetched depends on how many tiles share it
// (measured on AMD Zen 5, GB/s of one core with cold weights): one row keeps up with the hardware's
// own prefetching (49); 2 to 6 rows want it asked for NEAR ahead (37 -> 43); for two small tiles the
// panel goes in slices of SLICE steps that both take before the next (29 -> 44); more tiles are
// bound by arithmetic and spread the fetching of the whole next panel.
constexpr long NEAR = 1536;  // words
constexpr long SLICE = 64;   // steps
constexpr long SLICED_ROWS = 10;

template <class T>
void sliced_tiles(const Rows<T>& x, long begin, long end, const word* b, long b_step, int vectors,
                  long steps, float* c) {
  static const float ones[MAX_ROWS_NARROW] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const word* a[MAX_ROWS_NARROW];
  long middle = begin + (end - begin) / 2, stride = vectors * LANES;
  for (long k = 0; k < steps; k += SLICE) {
    long count = steps - k < SLICE ? steps - k : SLICE, lines = CHUNK * b_step * 4 / 64 / 2;
    Ahead ahead{reinterpret_cast<const char*>(b + (k + SLICE) * b_step), lines};
    for (int half = 0; half < 2; half++) {
      long from = half ? middle : begin, to = half ? end : middle;
      for (long r = from; r < to; r++) a[r - from] = x.at(r) + k;
      float* sums = c + (from - begin) * stride;
      if (k == 0)
        any_tile<T, false>(int(to - from), vectors, a, 1, b, b_step, count, sums, stride, nullptr,
                           ahead);
      else
        any_tile<T, true>(int(to - from), vectors, a, 1, b + k * b_step, b_step, count, sums,
                          stride, ones, ahead);
      ahead.at += 64 * lines * (SLICE / CHUNK);
    }
  }
}

// Rows begin .. end - 1 times one panel (from column `column` of it, `vectors` wide) ->
// emit(r, float[16 * vectors]). `next` (or null) is a stream to have in the cache afterwards.
template <class T, class Emit>
void rows_by_panel(const Rows<T>& x, long begin, long end, const word* b, long b_step, int vectors,
                   long steps, const word* next, long next_bytes, Emit emit) {
  alignas(64) float c[MAX_ROWS_NARROW * PANEL];
  const word* a[MAX_ROWS_NARROW];
  long limit = row_limit(vectors), tiles = ceil_div(end - begin, limit), stride = vectors * LANES;
  if (tiles == 2 && end - begin <= SLICED_ROWS) {
    sliced_tiles(x, begin, end, b, b_step, vectors, steps, c);
    for (long r = begin; r < end; r++) emit(r, c + (r - begin) * stride);
    return;
  }
  long chunks = ceil_div(steps, CHUNK), lines = 0;
  const char* ahead = reinterpret_cast<const char*>(next);
  if (tiles > 1 && next) lines = ceil_div(next_bytes / 64, tiles * chunks);
  if (tiles == 1 && end - begin > 1) {
    ahead = reinterpret_cast<const char*>(b + NEAR);
    lines = CHUNK * b_step * 4 / 64;
  }
  long row = begin;
  for (long t = 0; t < tiles; t++) {
    int rows = int((end - row) / (tiles - t));  // even tiles: 13 rows are 4 + 4 + 5
    for (int r = 0; r < rows; r++) a[r] = x.at(row + r);
    any_tile<T, false>(rows, vectors, a, 1, b, b_step, steps, c, stride, nullptr,
                       Ahead{ahead, lines});
    if (tiles > 1 && ahead) ahead += lines * 64 * chunks;
    for (int r = 0; r < rows; r++) emit(row + r, c + r * stride);
    row += rows;
  }
}

// The same with panel `p` of a weight of this shape, which lies at `panel`.
template <class T, class Emit>
void rows_by(const Rows<T>& x, long begin, long end, const Panels<T>& shape, long p,
             const word* panel, long column, int vectors, const word* next, long next_words,
             Emit emit) {
  rows_by_panel<T>(x, begin, end, panel + column, shape.width(p), vectors, shape.steps(), next,
                   next_words * 4, emit);
}

// Columns begin .. end - 1 (any, at most PANEL of them) of a weight, for rows row0 .. row1 - 1 ->
// emit(r, n0, count, float*): columns n0 .. n0 + count - 1 of row r.
template <class T, class W, class Emit>
void rows_by_columns(const Rows<T>& x, long row0, long row1, const Panels<T, W>& w, long begin,
                     long end, Emit emit) {
  long at = begin;
  while (at < end) {
    long panel = at / PANEL, width = w.width(panel);
    long first = (at - panel * PANEL) / LANES * LANES;  // aligned start inside the panel
    long stop = panel * PANEL + width < end ? panel * PANEL + width : end;
    int vectors = int(ceil_div(stop - panel * PANEL - first, LANES));
    long skip = at - (panel * PANEL + first);
    long count = stop - at;
    rows_by(x, row0, row1, w, panel, w.panel(panel), first, vectors, nullptr, 0,
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

// The same for one row of an output whose rows are `stride` apart, `left` of them from this one on.
// The place of the row that the next tile stores is asked for: rows lie so far apart that hardware
// fetches nothing by itself, and a tile over a short K ends before its lines have come.
template <class Out>
void store_row_of(Out* out, long stride, long left, const float* c, long n) {
  store_row(out, c, n);
  if (left <= MAX_ROWS) return;
  const char* coming = reinterpret_cast<const char*>(out + MAX_ROWS * stride);
  for (long i = 0; i < n * long(sizeof(Out)); i += 64) prefetch_write(coming + i);
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

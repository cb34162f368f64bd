// Online softmax over fixed partitions of absolute positions, for columns of (query, head).
//
// A partition has 128 positions; four make a span. Inside a span partitions follow each other with
// a running maximum; spans are merged in ascending order. Both cuts lie at absolute positions, so
// neither the chunk a query came in, nor its neighbours, nor which thread did which span matters.
// Scores are held transposed, [position][column]: 16 columns fill a vector, so maximum, exp and
// sum run over positions without crossing lanes.
#pragma once
#include <cmath>

#include "gemm.h"

namespace moeserve {

constexpr long PARTITION = 128;
constexpr long SPAN = 512;

// The words of one step of 16 value columns: the value itself, or a pair of positions.
inline W16 value_words(const float* even, const float*) {
  return load_words(reinterpret_cast<const word*>(even));
}
inline W16 value_words(const bf16* even, const bf16* odd) { return pair_lanes(even, odd); }

// The running state of `columns` (a multiple of 16) columns.
struct Running {
  float* peak;   // [columns]
  float* total;  // [columns]
  float* mixed;  // [columns][width]
};

inline size_t running_floats(long columns, long width) { return size_t(columns * (width + 2)); }

inline Running running_at(float* memory, long columns) {
  return {memory, memory + columns, memory + 2 * columns};
}

inline void reset(const Running& r, long columns, long width) {
  for (long c = 0; c < columns; c++) r.peak[c] = -INFINITY, r.total[c] = 0;
  std::memset(r.mixed, 0, size_t(columns * width) * 4);
}

// Scores [count][columns] of positions start .. start + count - 1 -> probabilities as words of a
// left operand, [ceil(count / per_word)][columns]; updates peak and total, leaves in shrink what
// the earlier sums must be multiplied by. limits[c]: the last position column c may see.
template <class T>
void soften(float* scores, long count, long start, long columns, const float* limits, float scale,
            const Running& run, float* shrink, word* chances) {
  for (long c = 0; c < columns; c += LANES) {
    F16 limit = load(limits + c), none = set1(-INFINITY), top = none;
    for (long p = 0; p < count; p++) {
      F16 s = load(scores + p * columns + c) * set1(scale);
      s = where_le(set1(float(start + p)), limit, s, none);
      store(scores + p * columns + c, s);
      top = larger(s, top);
    }
    F16 before = load(run.peak + c), peak = larger(top, before);
    store(run.peak + c, peak);
    // A column that sees nothing yet keeps -inf as its maximum; 0 stands in for it below.
    F16 base = where_le(peak, set1(-3.0e38f), zero(), peak);
    F16 less = exp(before - base), total = load(run.total + c) * less;
    store(shrink + c, less);
    for (long p = 0; p < count; p += per_word<T>()) {
      F16 even = exp(load(scores + p * columns + c) - base);
      total = total + even;
      if constexpr (per_word<T>() == 1) {
        store(reinterpret_cast<float*>(chances) + p * columns + c, even);
      } else {
        F16 odd = zero();
        if (p + 1 < count) {
          odd = exp(load(scores + (p + 1) * columns + c) - base);
          total = total + odd;
        }
        store_words(chances + p / 2 * columns + c, pair_lanes(even, odd));
      }
    }
    store(run.total + c, total);
  }
}

// Columns 64p .. of value rows [count] -> one panel [steps][width], zero padded.
template <class T>
void value_panel(const T* const* rows, long count, const Panels<T>& shape, long p, word* to) {
  constexpr long per = per_word<T>();
  static const T nothing[LANES] = {};
  long width = shape.width(p), column = p * PANEL, left = shape.n - column;
  for (long s = 0; s < shape.steps(); s++, to += width) {
    const T* even = rows[s * per] + column;
    const T* odd = per == 1 ? even : s * per + 1 < count ? rows[s * per + 1] + column : nullptr;
    if (odd && left >= PANEL) {
      pair_rows(even, odd, to);
      continue;
    }
    for (long v = 0; v < width; v += LANES) {
      T edge[2][LANES] = {};
      size_t n = size_t(left - v < LANES ? left - v : LANES) * sizeof(T);
      std::memcpy(edge[0], even + v, n);
      std::memcpy(edge[1], odd ? odd + v : nothing, n);
      store_words(to + v, value_words(edge[0], edge[1]));
    }
  }
}

// mixed[c] = mixed[c] * shrink[c] + sum over positions of chance * value, for value rows [count] of
// `width` values; `panel` is memory for one panel. fetch(i) for i = 0 .. count - 1, spread over the
// tiles, asks for position i of the next partition.
template <class T, class Fetch>
void mix(const word* chances, long columns, const T* const* rows, long count, long width,
         word* panel, const float* shrink, float* mixed, Fetch fetch) {
  Panels<T> shape{panel, width, round_up(count, per_word<T>())};
  long stride = round_up(width, LANES), fetched = 0, done = 0;
  const word* a[MAX_ROWS_NARROW];
  for (long p = 0; p < shape.count(); p++) {
    value_panel(rows, count, shape, p, panel);
    int vectors = int(shape.width(p) / LANES), limit = row_limit(vectors);
    long tiles = ceil_div(columns, limit), c = 0;
    for (long t = 0; t < tiles; t++) {
      int tall = int(ceil_div(columns - c, tiles - t));
      for (int r = 0; r < tall; r++) a[r] = chances + c + r;
      for (long until = count * ++done / (tiles * shape.count()); fetched < until;)
        fetch(fetched++);
      any_tile<T, true>(tall, vectors, a, columns, panel, shape.width(p), shape.steps(),
                  mixed + c * stride + p * PANEL, stride, shrink + c, Ahead{});
      c += tall;
    }
  }
}

// into = into merged with one later span (or the first: into is reset).
inline void merge(const Running& into, const Running& span, long columns, long width) {
  for (long c = 0; c < columns; c++) {
    float peak = into.peak[c] > span.peak[c] ? into.peak[c] : span.peak[c];
    if (peak == -INFINITY) continue;
    float scales[LANES] = {into.peak[c] - peak, span.peak[c] - peak};
    store(scales, exp(load(scales)));
    F16 left = set1(scales[0]), right = set1(scales[1]);
    into.total[c] = into.total[c] * scales[0] + span.total[c] * scales[1];
    into.peak[c] = peak;
    for (long v = 0; v < width; v += LANES) {
      float* to = into.mixed + c * width + v;
      store(to, fma(load(span.mixed + c * width + v), right, load(to) * left));
    }
  }
}

// Query columns as a right operand: panels [columns / 64][steps][64] from rows of `k` values.
template <class T, class Row>
void query_panels(long columns, long used, long k, word* out, Row row) {
  Panels<T> shape{out, columns, k};
  for (long c = 0; c < columns; c++) {
    long p = c / PANEL, width = shape.width(p);
    word* to = out + p * PANEL * shape.steps() + c % PANEL;
    if (c >= used) {
      for (long s = 0; s < shape.steps(); s++) to[s * width] = 0;
      continue;
    }
    const word* from = row(c);
    for (long s = 0; s < shape.steps(); s++) to[s * width] = from[s];
  }
}

// scores[p][c] (+)= key row p . query column c
template <class T>
void score(const word* const* keys, long count, const word* queries, long columns, long k,
           bool add, float* scores) {
  static const float ones[MAX_ROWS_NARROW] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  Panels<T> shape{queries, columns, k};
  for (long p = 0; p < shape.count(); p++) {
    int vectors = int(shape.width(p) / LANES), limit = row_limit(vectors);
    long tiles = ceil_div(count, limit), at = 0, fetched = 0;
    for (long t = 0; t < tiles; t++) {
      int rows = int(ceil_div(count - at, tiles - t));
      // A tile reads its rows a word at a time, too slowly for the hardware to run ahead of it.
      if (p == 0)
        for (; fetched < count && fetched < at + 2 * limit; fetched++)
          for (long i = 0; i < shape.steps() * 4; i += 64)
            prefetch_near(reinterpret_cast<const char*>(keys[fetched]) + i);
      float* to = scores + at * columns + p * PANEL;
      if (add)
        any_tile<T, true>(rows, vectors, keys + at, 1, shape.panel(p), shape.width(p),
                          shape.steps(), to, columns, ones, Ahead{});
      else
        any_tile<T, false>(rows, vectors, keys + at, 1, shape.panel(p), shape.width(p),
                           shape.steps(), to, columns, nullptr, Ahead{});
      at += rows;
    }
  }
}

// Where a sequence's positions lie in the paged cache.
template <class T> struct Pages {
  const T* layer;
  const int32_t* blocks;
  long block_size, width;

  const T* row(long position) const {
    return layer + (long(blocks[position / block_size]) * block_size + position % block_size) * width;
  }
};

}  // namespace moeserve

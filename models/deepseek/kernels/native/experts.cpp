// The sparse half of a layer: the router, the grouped expert product, the weighted sum.
//
// An expert's bundle is [gate panel 0, up panel 0, gate panel 1, ...] of [I, D], then the panels of
// down [D, I]: a work item of the first phase streams one gate panel and its up panel.
#include <cmath>
#include <vector>

#include "api.h"
#include "gated.h"
#include "pack.h"

namespace moeserve {
namespace {

template <class T, class W> struct Bundle {
  using Row = T;
  long hidden, inter;

  Panels<T, W> shape() const { return {nullptr, inter, hidden}; }
  Panels<T, W> down(const word* slot) const {
    return {slot + 2 * shape().words(), hidden, inter};
  }
  const word* gate(const word* slot, long p) const {
    return slot + 2 * (shape().panel(p) - shape().panel(0));
  }
  const word* up(const word* slot, long p) const {
    return gate(slot, p) + shape().panel_words(p);
  }
  long words() const { return 2 * shape().words() + down(nullptr).words(); }
};

template <class T>
void store_expert(const T* gate, const T* up, const T* down, const Bundle<T, T>& b, word* slot) {
  Panels<T, T> shape = b.shape();
  for (long p = 0; p < shape.count(); p++) {
    pack_panel(gate, shape, p, const_cast<word*>(b.gate(slot, p)));
    pack_panel(up, shape, p, const_cast<word*>(b.up(slot, p)));
  }
  pack(down, b.down(slot), 1);
}

// A matrix in e4m3: its bytes [n, k] and its scales [panels, ceil(k / 128)].
struct Fp8Matrix {
  const uint8_t* values;
  const float* scales;
};

template <class T>
void store_expert(const Fp8Matrix& gate, const Fp8Matrix& up, const Fp8Matrix& down,
                  const Bundle<T, e4m3>& b, word* slot) {
  Panels<T, e4m3> shape = b.shape();
  for (long p = 0; p < shape.count(); p++) {
    pack_panel(gate.values, gate.scales, shape, p, const_cast<word*>(b.gate(slot, p)));
    pack_panel(up.values, up.scales, shape, p, const_cast<word*>(b.up(slot, p)));
  }
  pack(down.values, down.scales, b.down(slot), 1);
}

template <class T, class W>
void fetch_expert(const word* slot, const Bundle<T, W>& b, T* gate, T* up, T* down) {
  Panels<T, W> shape = b.shape();
  for (long p = 0; p < shape.count(); p++) {
    unpack_panel(b.gate(slot, p), shape, p, gate);
    unpack_panel(b.up(slot, p), shape, p, up);
  }
  unpack(b.down(slot), down);
}

struct Segment {  // rows begin .. end - 1 of the pairs go through one slot
  long slot, begin, end;
};

template <class T, class W>
void experts(const T* x, long x_rows, long x_stride, const int32_t* pair_rows,
             const int32_t* offsets, const word* weights, long slots, const Bundle<T, W>& bundle,
             T* out, int threads) {
  static thread_local Scratch padding, hidden_memory;
  static thread_local std::vector<Segment> segment_memory;
  std::vector<Segment>& segments = segment_memory;
  segments.clear();
  x = padded_rows(x, x_rows, bundle.hidden, x_stride, padding);
  long pairs = offsets[slots], stride = round_up(bundle.inter, LANES);
  long block = row_block<T>(bundle.hidden, pairs);
  for (long slot = 0; slot < slots; slot++)
    for (long at = offsets[slot]; at < offsets[slot + 1]; at += block)
      segments.push_back(
          {slot, at, at + block < offsets[slot + 1] ? at + block : offsets[slot + 1]});
  T* hidden = hidden_memory.get<T>(size_t(pairs * stride));
  Rows<T> in{x, x_stride, pair_rows}, middle{hidden, stride, nullptr};
  Panels<T, W> shape = bundle.shape(), down_shape = bundle.down(nullptr);
  long panels = shape.count(), columns = down_shape.count();
  auto slot_words = [&](long slot) { return weights + slot * bundle.words(); };
  Claims first, second;
  first.count = long(segments.size()) * panels;
  second.count = long(segments.size()) * columns;
  double total = 3.0 * double(pairs) * double(bundle.inter) * double(bundle.hidden);
  int used = first.threads = second.threads = useful_threads(threads, total, first.count);
  team(used, [&] {
    static thread_local Scratch gate_memory;
    float* gate = gate_memory.get<float>(size_t(block * PANEL + PANEL));
    work(first, [&](long item, long next) {
      const Segment& s = segments[size_t(item / panels)];
      long p = item % panels;
      const word* ahead =
          next < 0 ? nullptr
                   : bundle.gate(slot_words(segments[size_t(next / panels)].slot), next % panels);
      // The pad columns of the last panel become silu(0) * 0 = 0, so hidden is whole words.
      gated_panel(in, s.begin, s.end, shape, p, bundle.gate(slot_words(s.slot), p),
                  bundle.up(slot_words(s.slot), p), ahead, gate, hidden + p * PANEL, stride);
    });
    first.finish();
    work(second, [&](long item, long next) {
      const Segment& s = segments[size_t(item / columns)];
      Panels<T, W> down = bundle.down(slot_words(s.slot));
      long p = item % columns, width = down.width(p);
      long count = down.n - p * PANEL < PANEL ? down.n - p * PANEL : PANEL;
      const word* ahead = nullptr;
      if (next >= 0)
        ahead = bundle.down(slot_words(segments[size_t(next / columns)].slot)).panel(next % columns);
      rows_by(middle, s.begin, s.end, down, p, down.panel(p), 0, int(width / LANES), ahead,
              down.panel_words(p), [&](long r, const float* c) {
                store_row_of(out + r * bundle.hidden + p * PANEL, bundle.hidden, s.end - r, c, count);
              });
    });
  });
}

// -- the router ----------------------------------------------------------------------------

struct Gate {
  long experts, hidden, top_k, groups, kept_groups;
  int sigmoid, top2, renormalise;
  float scale;
};

// Logits of ROWS rows against COUNT weights: lanes run along the hidden dimension, one tree at the
// end, so a logit depends on its row and its weight alone.
template <class T, int ROWS, int COUNT>
void logits_of(const T* const* x, const float* const* w, long hidden, float (*out)[COUNT]) {
  F16 sum[ROWS][COUNT];
  for (int r = 0; r < ROWS; r++)
    for (int e = 0; e < COUNT; e++) sum[r][e] = zero();
  auto step = [&](auto load_x, auto load_w) {
    F16 right[COUNT];
    for (int e = 0; e < COUNT; e++) right[e] = load_w(w[e]);
    for (int r = 0; r < ROWS; r++) {
      F16 left = load_x(x[r]);
      for (int e = 0; e < COUNT; e++) sum[r][e] = fma(left, right[e], sum[r][e]);
    }
  };
  long i = 0;
  for (; i + LANES <= hidden; i += LANES)
    step([&](const T* p) { return widen_load(p + i); }, [&](const float* p) { return load(p + i); });
  if (i < hidden) {
    int left = int(hidden - i);
    step([&](const T* p) { return widen_load_n(p + i, left); },
         [&](const float* p) { return load_n(p + i, left); });
  }
  for (int r = 0; r < ROWS; r++)
    for (int e = 0; e < COUNT; e++) out[r][e] = sum_lanes(sum[r][e]);
}

// The largest not yet taken, the lowest index among equals; never fails, even on NaN.
long take_largest(const float* values, long n, char* taken) {
  long best = -1;
  for (long i = 0; i < n; i++)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  taken[best] = 1;
  return best;
}

void choose(const Gate& g, float* score, const float* bias, float* choice, char* taken,
            int32_t* ids, float* weights) {
  long n = g.experts;
  if (g.sigmoid) {
    for (long i = 0; i < n; i += LANES) store(score + i, sigmoid(load(score + i)));
  } else {
    float peak = score[0];
    for (long i = 1; i < n; i++) peak = score[i] > peak ? score[i] : peak;
    float sum = 0;
    for (long i = 0; i < n; i += LANES) store(score + i, exp(load(score + i) - set1(peak)));
    for (long i = 0; i < n; i++) sum += score[i];
    for (long i = 0; i < n; i++) score[i] = score[i] / sum;
  }
  for (long i = 0; i < n; i++) choice[i] = bias ? score[i] + bias[i] : score[i];
  if (g.groups > 1) {
    long size = n / g.groups;
    float* group_score = choice + n;
    for (long j = 0; j < g.groups; j++) {
      float one = -INFINITY, two = -INFINITY;
      for (long i = j * size; i < (j + 1) * size; i++) {
        if (choice[i] > one)
          two = one, one = choice[i];
        else if (choice[i] > two)
          two = choice[i];
      }
      group_score[j] = g.top2 && size > 1 ? one + two : one;
    }
    std::memset(taken, 0, size_t(g.groups));
    for (long j = 0; j < g.kept_groups; j++) take_largest(group_score, g.groups, taken);
    for (long j = 0; j < g.groups; j++)
      if (!taken[j])
        for (long i = j * size; i < (j + 1) * size; i++) choice[i] = g.sigmoid ? -INFINITY : 0.0f;
  }
  std::memset(taken, 0, size_t(n));
  float total = 0;
  for (long k = 0; k < g.top_k; k++) {
    ids[k] = int32_t(take_largest(choice, n, taken));
    weights[k] = score[ids[k]];
    total += weights[k];
  }
  for (long k = 0; k < g.top_k; k++) {
    float w = g.renormalise ? weights[k] / (total + 1e-20f) : weights[k];
    weights[k] = w * g.scale;
  }
}

template <class T>
void gate(const T* x, long stride, long rows, const float* weight, const float* bias, const Gate& g,
          int32_t* ids, float* weights, int threads) {
  static thread_local Scratch score_memory;
  constexpr long GROUP = 8, TALL = 2;  // experts and rows whose sums run side by side
  constexpr long BLOCK = 16;            // rows of a work item
  long padded = round_up(g.experts, LANES);
  float* scores = score_memory.get<float>(size_t(rows * padded));
  // Few rows: experts are split as well, or one thread would read all weights.
  long blocks = ceil_div(rows, BLOCK);
  long parts = blocks >= 4 * threads ? 1 : ceil_div(g.experts, 4 * GROUP);
  long part = round_up(ceil_div(g.experts, parts), GROUP);
  double total = double(rows) * double(g.experts) * double(g.hidden);
  Claims first, second;
  int used = first.threads = second.threads = useful_threads(threads, total, blocks * parts);
  first.count = blocks * parts;
  second.count = rows;
  team(used, [&] {
    static thread_local Scratch choice_memory;
    work(first, [&](long item, long) {
      long top = item / parts * BLOCK, bottom = top + BLOCK < rows ? top + BLOCK : rows;
      long begin = item % parts * part;
      long end = begin + part < g.experts ? begin + part : g.experts;
      for (long e = begin; e < end; e += GROUP) {
        const float* w[GROUP];
        for (long i = 0; i < GROUP; i++) w[i] = weight + (e + i < end ? e + i : end - 1) * g.hidden;
        long count = e + GROUP < end ? GROUP : end - e;
        for (long row = top; row < bottom; row += TALL) {
          const T* at[TALL] = {x + row * stride, x + (row + 1 < bottom ? row + 1 : row) * stride};
          float out[TALL][GROUP];
          long tall = bottom - row < TALL ? bottom - row : TALL;
          if (tall == TALL)
            logits_of<T, TALL, GROUP>(at, w, g.hidden, out);
          else
            logits_of<T, 1, GROUP>(at, w, g.hidden, out);
          for (long r = 0; r < tall; r++)
            std::memcpy(scores + (row + r) * padded + e, out[r], size_t(count) * 4);
        }
      }
    });
    first.finish();
    float* choice = choice_memory.get<float>(size_t(4 * padded));
    char* taken = reinterpret_cast<char*>(choice + 3 * padded);
    work(second, [&](long row, long) {
      float* score = scores + row * padded;
      for (long i = g.experts; i < padded; i++) score[i] = 0;
      choose(g, score, bias, choice, taken, ids + row * g.top_k, weights + row * g.top_k);
    });
  });
}

template <class T>
void combine(const T* y, long hidden, const int64_t* index, const float* weights, long rows,
             long top_k, float* out, int threads) {
  parallel_items(threads, double(rows) * double(top_k) * double(hidden), rows, [&](long row) {
    const int64_t* at = index + row * top_k;
    const float* w = weights + row * top_k;
    float* to = out + row * hidden;
    for (long d = 0; d < hidden; d += LANES) {
      int n = hidden - d < LANES ? int(hidden - d) : LANES;
      F16 sum = zero();
      for (long k = 0; k < top_k; k++)
        if (at[k] >= 0) sum = sum + widen_load_n(y + at[k] * hidden + d, n) * set1(w[k]);
      store_n(to + d, sum, n);
    }
  });
}

}  // namespace
}  // namespace moeserve

using namespace moeserve;

namespace {

// Hands `use` the layout of a bundle by its format (api.h).
template <class Use> void bundle_of(int format, long hidden, long inter, const Use& use) {
  switch (format) {
    case 0: return use(Bundle<float, float>{hidden, inter});
    case BF16_FORMAT: return use(Bundle<bf16, bf16>{hidden, inter});
    case FP8_FORMAT: return use(Bundle<float, e4m3>{hidden, inter});
    default: return use(Bundle<bf16, e4m3>{hidden, inter});
  }
}

}  // namespace

extern "C" {

int64_t ms_bundle_bytes(int64_t hidden, int64_t inter, int format) {
  int64_t bytes = 0;
  bundle_of(format, hidden, inter, [&](const auto& bundle) { bytes = 4 * bundle.words(); });
  return bytes;
}

// gate, up [inter, hidden] and down [hidden, inter] row-major, to or from one bundle.
void ms_store_expert(const void* gate, const void* up, const void* down, int64_t hidden,
                     int64_t inter, int is_bf16, void* slot) {
  auto run = [&](auto* typed) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    store_expert<T>(typed, static_cast<const T*>(up), static_cast<const T*>(down), {hidden, inter},
                    static_cast<word*>(slot));
  };
  is_bf16 ? run(static_cast<const bf16*>(gate)) : run(static_cast<const float*>(gate));
}

// The same in e4m3, each with its scales [panels, ceil(columns / 128)].
void ms_fp8_store_expert(const void* gate, const float* gate_scales, const void* up,
                         const float* up_scales, const void* down, const float* down_scales,
                         int64_t hidden, int64_t inter, int format, void* slot) {
  auto matrix = [](const void* values, const float* scales) {
    return Fp8Matrix{static_cast<const uint8_t*>(values), scales};
  };
  Fp8Matrix g = matrix(gate, gate_scales), u = matrix(up, up_scales), d = matrix(down, down_scales);
  if (format & BF16_FORMAT)
    store_expert<bf16>(g, u, d, {hidden, inter}, static_cast<word*>(slot));
  else
    store_expert<float>(g, u, d, {hidden, inter}, static_cast<word*>(slot));
}

void ms_fetch_expert(const void* slot, int64_t hidden, int64_t inter, int format, void* gate,
                     void* up, void* down) {
  bundle_of(format, hidden, inter, [&](const auto& bundle) {
    using T = typename std::decay_t<decltype(bundle)>::Row;
    fetch_expert(static_cast<const word*>(slot), bundle, static_cast<T*>(gate),
                 static_cast<T*>(up), static_cast<T*>(down));
  });
}

int ms_experts(const void* x, int64_t x_rows, int64_t x_stride, const int32_t* pair_rows,
               int64_t pairs, const int32_t* offsets, const void* weights, int64_t slots,
               int64_t hidden, int64_t inter, int format, void* out, int threads) {
  for (int64_t i = 0; i < slots; i++)
    if (offsets[i] > offsets[i + 1]) return 1;
  if (offsets[0] != 0 || offsets[slots] != pairs) return 1;
  for (int64_t i = 0; i < pairs; i++)
    if (pair_rows[i] < 0 || pair_rows[i] >= x_rows) return 2;
  if (pairs == 0) return 0;
  bundle_of(format, hidden, inter, [&](const auto& bundle) {
    using T = typename std::decay_t<decltype(bundle)>::Row;
    experts(static_cast<const T*>(x), x_rows, x_stride, pair_rows, offsets,
            static_cast<const word*>(weights), slots, bundle, static_cast<T*>(out), threads);
  });
  return 0;
}

void ms_gate(const void* x, int64_t stride, int64_t rows, int is_bf16, const float* weight,
             const float* bias, int64_t experts, int64_t hidden, int64_t top_k, int64_t groups,
             int64_t kept_groups, int sigmoid, int top2, int renormalise, float scale, int32_t* ids,
             float* weights, int threads) {
  Gate g{experts, hidden, top_k, groups, kept_groups, sigmoid, top2, renormalise, scale};
  if (is_bf16)
    gate(static_cast<const bf16*>(x), stride, rows, weight, bias, g, ids, weights, threads);
  else
    gate(static_cast<const float*>(x), stride, rows, weight, bias, g, ids, weights, threads);
}

// slots [rows, top_k], -1: none -> pairs sorted by slot, then row, then k. Gives the number of
// valid pairs, or -1 for a slot outside of -1 .. slot_count - 1.
int64_t ms_sort_pairs(const int32_t* slots, int64_t rows, int64_t top_k, int64_t slot_count,
                      int32_t* pair_rows, int32_t* offsets, int64_t* index) {
  static thread_local Scratch next_memory;
  int32_t* next = next_memory.get<int32_t>(size_t(slot_count));
  std::memset(next, 0, size_t(slot_count) * 4);
  for (int64_t i = 0; i < rows * top_k; i++) {
    if (slots[i] < -1 || slots[i] >= slot_count) return -1;
    if (slots[i] >= 0) next[slots[i]]++;
  }
  int32_t sum = 0;
  for (int64_t s = 0; s < slot_count; s++) {
    offsets[s] = sum;
    sum += next[s];
    next[s] = offsets[s];
  }
  offsets[slot_count] = sum;
  for (int64_t i = 0; i < rows * top_k; i++) {
    index[i] = -1;
    if (slots[i] < 0) continue;
    int32_t at = next[slots[i]]++;
    pair_rows[at] = int32_t(i / top_k);
    index[i] = at;
  }
  return sum;
}

int ms_combine(const void* y, int64_t y_rows, int64_t hidden, int is_bf16, const int64_t* index,
               const float* weights, int64_t rows, int64_t top_k, float* out, int threads) {
  for (int64_t i = 0; i < rows * top_k; i++)
    if (index[i] >= y_rows) return 3;
  if (is_bf16)
    combine(static_cast<const bf16*>(y), hidden, index, weights, rows, top_k, out, threads);
  else
    combine(static_cast<const float*>(y), hidden, index, weights, rows, top_k, out, threads);
  return 0;
}
}

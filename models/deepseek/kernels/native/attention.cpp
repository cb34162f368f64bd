// Attention over the paged latent cache: absorbed (all heads share one key, the latent itself) and
// naive (keys and values expanded a head at a time, for long prefills in fast mode).
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "api.h"
#include "branches.h"
#include "latents.h"

namespace moeserve {
namespace {

std::vector<Query> query_tiles(const Batch& b, long rows_per_tile) {
  std::vector<Query> tiles;
  for (long s = 0; s < b.sequences; s++)
    for (long at = b.query_start[s]; at < b.query_start[s + 1]; at += rows_per_tile) {
      Query q{s, at, std::min(at + rows_per_tile, long(b.query_start[s + 1])), 0, NO_BRANCHES};
      for (long r = q.begin; r < q.end; r++) q.last = std::max(q.last, long(b.positions[r]));
      if (b.ancestors)
        for (long r = q.begin; r < q.end; r++)
          q.branches = std::min(q.branches, first_branch(b, s, r));
      tiles.push_back(q);
    }
  // The longest first, so that the last to finish is short.
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const Query& a, const Query& c) { return a.last > c.last; });
  return tiles;
}

template <class T> struct Latent {
  const T* q_latent;
  long latent_t, latent_h;
  const T* q_rope;
  long rope_t, rope_h;
  const T* layer;
  long row_bytes;  // of a position in FP8 (latents.h); 0: layer is as T says
  long heads, rank, rope;
  float scale;
  T* out;

  long width() const { return rank + rope; }
  long bytes() const { return row_bytes ? row_bytes : width() * long(sizeof(T)); }
  const char* memory() const { return reinterpret_cast<const char*>(layer); }
};

// Memory one tile needs, carved from one allocation of its thread.
template <class T> struct TileMemory {
  word* queries;
  float* limits;
  float* opened;
  float* scores;
  float* shrink;
  word* chances;
  word* values;
  float* states;  // what is left: running states

  // most: entries of a partition
  TileMemory(Scratch& s, long columns, long key, long most, size_t state_floats) {
    size_t c = size_t(columns), n = size_t(most);
    size_t query_words = c * size_t(ceil_div(key, per_word<T>()));
    size_t all = query_words + 3 * c + 2 * c * n + PANEL * n + state_floats;
    queries = s.get<word>(all);
    limits = reinterpret_cast<float*>(queries + query_words);
    opened = limits + c;
    shrink = opened + c;
    scores = shrink + c;
    chances = reinterpret_cast<word*>(scores + c * n);
    values = chances + c * n;
    states = reinterpret_cast<float*>(values + PANEL * n);
  }
};

template <class T>
void latent_span(const Latent<T>& in, const Batch& b, const Query& q, long columns, long first,
                 const TileMemory<T>& m, const Running& run) {
  long last = std::min(first + SPAN - 1, q.last);
  Pages<char> pages{in.memory(), b.tables + q.sequence * b.table_width, b.block_size, in.bytes()};
  auto typed = [](const char* row) { return reinterpret_cast<const T*>(row); };
  static thread_local std::vector<const T*> found;
  found.resize(size_t(q.most()));
  const T** rows = found.data();
  long stride = round_up(in.rank, LANES);
  reset(run, columns, stride);
  for (long start = first; start <= last; start += PARTITION) {
    long count = std::min(PARTITION, last + 1 - start);
    long alike = std::min(count, std::max(q.branches - start, 0L));
    for (long p = 0; p < alike; p++) rows[p] = typed(pages.row(start + p));
    static thread_local Entries entries;
    bool branched = alike < count;
    if (branched) {
      entries.find<T>(b, q, start + alike, start + count);
      count = alike;
      for (long slot : entries.slots) rows[count++] = typed(in.memory() + slot * in.bytes());
      open_limits(m.limits, columns, start + alike, m.opened);
    }
    if (in.row_bytes) {
      static thread_local Scratch memory;
      T* read = memory.get<T>(size_t(q.most() * in.width()) + 2);
      for (long p = 0; p < count; p++, read += in.width()) {
        read_latent<T>(reinterpret_cast<const char*>(rows[p]), in.rank, in.rope, read);
        rows[p] = read;
      }
    }
    score<T>(reinterpret_cast<const word* const*>(rows), count, m.queries, columns, in.width(),
             false, m.scores);
    if (branched)
      entries.hide_unseen(q.end - q.begin, in.heads, columns, m.scores + alike * columns);
    soften<T>(m.scores, count, start, columns, branched ? m.opened : m.limits, in.scale, run,
              m.shrink, m.chances);
    mix<T>(m.chances, columns, rows, count, in.rank, m.values, m.shrink, run.mixed, [&](long i) {
      if (start + PARTITION + i > q.last) return;
      const char* row = pages.row(start + PARTITION + i);
      for (long at = 0; at < in.bytes(); at += 64) prefetch(row + at);
    });
  }
}

template <class T>
void latent_queries(const Latent<T>& in, const Batch& b, const Query& q, long columns,
                    const TileMemory<T>& m) {
  long used = (q.end - q.begin) * in.heads;
  static thread_local Scratch row_memory;
  T* joined = row_memory.get<T>(size_t(in.width()) + 2);
  query_panels<T>(columns, used, in.width(), m.queries, [&](long c) {
    long row = q.begin + c / in.heads, head = c % in.heads;
    std::memcpy(joined, in.q_latent + row * in.latent_t + head * in.latent_h,
                size_t(in.rank) * sizeof(T));
    std::memcpy(joined + in.rank, in.q_rope + row * in.rope_t + head * in.rope_h,
                size_t(in.rope) * sizeof(T));
    return reinterpret_cast<const word*>(joined);
  });
  for (long c = 0; c < columns; c++)
    m.limits[c] = c < used ? float(b.positions[q.begin + c / in.heads]) : -1.0f;
}

template <class T>
void finish(const Running& run, long begin, long used, long heads, long width, T* out) {
  long stride = round_up(width, LANES);
  for (long c = 0; c < used; c++) {
    T* to = out + (begin * heads + c) * width;
    F16 total = set1(run.total[c]);
    for (long v = 0; v < width; v += LANES) {
      // Adding zero makes -0 and 0 one: a masked partition may have changed the sign of a zero.
      F16 value = load(run.mixed + c * stride + v) / total + zero();
      store_n(to + v, value, width - v < LANES ? int(width - v) : LANES);
    }
  }
}

template <class T> void latent_attention(const Latent<T>& in, const Batch& b, int threads) {
  constexpr long COLUMNS = 128;  // (query, head) pairs a tile: the state of all fits the cache
  long per_tile = std::max(1L, COLUMNS / in.heads);
  std::vector<Query> tiles = query_tiles(b, per_tile);
  if (tiles.empty()) return;
  long stride = round_up(in.rank, LANES);
  double work_size = 0;
  for (const Query& q : tiles)
    work_size += double(q.last + 1) * double((q.end - q.begin) * in.heads * in.width()) * 2;
  auto columns_of = [&](const Query& q) {
    return round_up((q.end - q.begin) * in.heads, LANES);
  };
  long spans = tiles[0].last / SPAN + 1;
  if (threads == 1 || long(tiles.size()) >= 2 * threads || spans == 1) {
    parallel_items(threads, work_size, long(tiles.size()), [&](long i) {
      static thread_local Scratch memory;
      const Query& q = tiles[size_t(i)];
      long columns = columns_of(q);
      size_t state = running_floats(columns, stride);
      TileMemory<T> m(memory, columns, in.width(), q.most(), 2 * state);
      latent_queries(in, b, q, columns, m);
      Running all = running_at(m.states, columns), one = running_at(m.states + state, columns);
      for (long first = 0; first <= q.last; first += SPAN) {
        const Running& run = first == 0 ? all : one;
        latent_span(in, b, q, columns, first, m, run);
        if (first > 0) merge(all, one, columns, stride);
      }
      finish(all, q.begin, (q.end - q.begin) * in.heads, in.heads, in.rank, in.out);
    });
    return;
  }
  // Few tiles with long contexts: spans are work items, merged in the same order afterwards.
  static thread_local Scratch partial_memory;
  struct Item {
    size_t tile;
    long first;
    size_t offset;
  };
  std::vector<Item> items;
  size_t floats = 0;
  for (size_t i = 0; i < tiles.size(); i++)
    for (long first = 0; first <= tiles[i].last; first += SPAN) {
      items.push_back({i, first, floats});
      floats += running_floats(columns_of(tiles[i]), stride);
    }
  float* partial = partial_memory.get<float>(floats);
  parallel_items(threads, work_size, long(items.size()), [&](long i) {
    static thread_local Scratch memory;
    const Item& item = items[size_t(i)];
    const Query& q = tiles[item.tile];
    long columns = columns_of(q);
    TileMemory<T> m(memory, columns, in.width(), q.most(), 0);
    latent_queries(in, b, q, columns, m);
    latent_span(in, b, q, columns, item.first, m, running_at(partial + item.offset, columns));
  });
  for (size_t i = 0, at = 0; i < tiles.size(); i++) {
    const Query& q = tiles[i];
    long columns = columns_of(q);
    Running all = running_at(partial + items[at++].offset, columns);
    for (; at < items.size() && items[at].tile == i; at++)
      merge(all, running_at(partial + items[at].offset, columns), columns, stride);
    finish(all, q.begin, (q.end - q.begin) * in.heads, in.heads, in.rank, in.out);
  }
}

// -- naive form ----------------------------------------------------------------------------

template <class T> struct Naive {
  const T* q;
  long t_stride, h_stride;
  const T* layer;
  long row_bytes;  // as Latent's
  long heads, rank, nope, rope, value;
  float scale;
  T* out;
};

// The slots of a sequence's keys: those of its positions, then those that only branches have. At
// branches[slot]: which of them a slot is, from the first branch on.
struct Keys {
  std::vector<long> slots;
  std::unordered_map<long, long> branches;

  Keys(const Batch& b, long sequence, const std::vector<Query>& tiles, long context) {
    long first = context;
    for (const Query& q : tiles) first = std::min(first, q.branches);
    for (long p = 0; p < context; p++) {
      slots.push_back(b.slot(sequence, p));
      if (p >= first) branches.emplace(slots.back(), p);
    }
    if (first == context) return;
    for (long r = b.query_start[sequence]; r < b.query_start[sequence + 1]; r++)
      for (long i = 0, nodes = b.nodes(r); i < nodes; i++) {
        long slot = b.ancestors[r * b.depth + i];
        if (branches.emplace(slot, long(slots.size())).second) slots.push_back(slot);
      }
  }
};

template <class T>
void naive_attention(const Naive<T>& in, const Batch& b, const Panels<T>& kv_b, int threads) {
  constexpr long QUERIES = 64;  // one head's queries a tile
  constexpr long EXPANDED_BYTES = 64L << 20;
  static thread_local Scratch expanded_memory;
  long per_head = in.nope + in.value, query = in.nope + in.rope;
  long stride = round_up(in.value, LANES);
  for (long s = 0; s < b.sequences; s++) {
    Batch one = b;
    one.query_start = b.query_start + s;
    one.tables = b.tables + s * b.table_width;
    one.sequences = 1;
    std::vector<Query> tiles = query_tiles(one, QUERIES);
    if (tiles.empty()) continue;
    Keys found(one, 0, tiles, tiles[0].last + 1);
    long context = long(found.slots.size()), width = in.rank + in.rope;
    // Rows of the cache as an index into the layer, for the product that expands them.
    std::vector<int32_t> index(found.slots.begin(), found.slots.end());
    const T* layer = in.layer;
    if (in.row_bytes) {
      static thread_local Scratch memory;
      T* read = memory.get<T>(size_t(context * width) + 2);
      const char* cached = reinterpret_cast<const char*>(in.layer);
      parallel_items(threads, double(context) * double(width), context, [&](long i) {
        read_latent<T>(cached + found.slots[size_t(i)] * in.row_bytes, in.rank, in.rope,
                       read + i * width);
      });
      for (long i = 0; i < context; i++) index[size_t(i)] = int32_t(i);
      layer = read;
    }
    Rows<T> latents{layer, width, index.data()};
    long group = EXPANDED_BYTES / (context * per_head * long(sizeof(T)));
    group = std::max(1L, std::min(in.heads, group));
    for (long head = 0; head < in.heads; head += group) {
      long heads = std::min(group, in.heads - head), wide = heads * per_head;
      T* expanded = expanded_memory.get<T>(size_t(context * wide) + 2);
      long block = 240, blocks = ceil_div(context, block), chunks = ceil_div(wide, PANEL);
      double total = double(context) * double(wide) * double(in.rank);
      parallel_items(threads, total, blocks * chunks, [&](long item) {
        long begin = item / chunks * block, end = std::min(begin + block, context);
        long from = head * per_head + item % chunks * PANEL;
        long to = std::min(from + PANEL, (head + heads) * per_head);
        rows_by_columns<T>(latents, begin, end, kv_b, from, to,
                           [&](long r, long n0, long count, const float* c) {
                             store_row_of(expanded + r * wide + n0 - head * per_head, wide, end - r,
                                          c, count);
                           });
      });
      total = 0;
      for (const Query& q : tiles)
        total += double(q.last + 1) * double((q.end - q.begin) * heads * (query + in.value));
      parallel_items(threads, total, long(tiles.size()) * heads, [&](long item) {
        static thread_local Scratch memory;
        const Query& q = tiles[size_t(item / heads)];
        long h = item % heads, used = q.end - q.begin, columns = round_up(used, LANES);
        TileMemory<T> m(memory, columns, in.nope + in.rope + 2, q.most(),
                        running_floats(columns, stride));
        word* rope_queries = m.queries + columns * ceil_div(in.nope, per_word<T>());
        auto row = [&](long c) {
          return in.q + (q.begin + c) * in.t_stride + (head + h) * in.h_stride;
        };
        query_panels<T>(columns, used, in.nope, m.queries,
                        [&](long c) { return reinterpret_cast<const word*>(row(c)); });
        query_panels<T>(columns, used, in.rope, rope_queries,
                        [&](long c) { return reinterpret_cast<const word*>(row(c) + in.nope); });
        for (long c = 0; c < columns; c++)
          m.limits[c] = c < used ? float(b.positions[q.begin + c]) : -1.0f;
        Running run = running_at(m.states, columns);
        reset(run, columns, stride);
        std::vector<const T*> keys(size_t(q.most())), values(size_t(q.most()));
        std::vector<long> which(size_t(q.most()));
        for (long start = 0; start <= q.last; start += PARTITION) {
          long count = std::min(PARTITION, q.last + 1 - start);
          long alike = std::min(count, std::max(q.branches - start, 0L));
          for (long p = 0; p < alike; p++) which[size_t(p)] = start + p;
          static thread_local Entries entries;
          bool branched = alike < count;
          if (branched) {
            entries.find<T>(one, q, start + alike, start + count);
            count = alike;
            for (long slot : entries.slots) which[size_t(count++)] = found.branches.at(slot);
            open_limits(m.limits, columns, start + alike, m.opened);
          }
          for (long p = 0; p < count; p++)
            keys[size_t(p)] = expanded + which[size_t(p)] * wide + h * per_head;
          score<T>(reinterpret_cast<const word* const*>(keys.data()), count, m.queries, columns,
                   in.nope, false, m.scores);
          for (size_t p = 0; p < size_t(count); p++) {
            values[p] = keys[p] + in.nope;
            keys[p] = layer + long(index[size_t(which[p])]) * width + in.rank;
          }
          score<T>(reinterpret_cast<const word* const*>(keys.data()), count, rope_queries, columns,
                   in.rope, true, m.scores);
          if (branched) entries.hide_unseen(used, 1, columns, m.scores + alike * columns);
          soften<T>(m.scores, count, start, columns, branched ? m.opened : m.limits, in.scale, run,
                    m.shrink, m.chances);
          mix<T>(m.chances, columns, values.data(), count, in.value, m.values, m.shrink, run.mixed, [](long) {});
        }
        for (long c = 0; c < used; c++) {
          Running at{run.peak + c, run.total + c, run.mixed + c * stride};
          finish(at, 0, 1, 1, in.value,
                 in.out + ((q.begin + c) * in.heads + head + h) * in.value);
        }
      });
    }
  }
}

int check(const Batch& b, long rows, long blocks) {
  if (b.query_start[0] != 0 || b.query_start[b.sequences] != rows) return 6;
  for (long s = 0; s < b.sequences; s++) {
    if (b.query_start[s] > b.query_start[s + 1]) return 6;
    long last = -1;
    for (long r = b.query_start[s]; r < b.query_start[s + 1]; r++) {
      if (b.positions[r] < 0) return 4;
      last = std::max(last, long(b.positions[r]));
      long nodes = b.nodes(r);
      if (nodes > b.positions[r] + 1) return 8;
      for (long i = 0; i < (b.ancestors ? b.depth : 0); i++) {
        long slot = b.ancestors[r * b.depth + i];
        if (i < nodes ? slot >= blocks * b.block_size : slot != -1) return 8;
      }
    }
    if (last < 0) continue;
    if (last / b.block_size >= b.table_width) return 7;
    for (long i = 0; i <= last / b.block_size; i++) {
      int32_t block = b.tables[s * b.table_width + i];
      if (block < 0 || block >= blocks) return 7;
    }
  }
  return 0;
}

}  // namespace
}  // namespace moeserve

using namespace moeserve;

extern "C" {

int ms_latent_attention(const void* q_latent, int64_t latent_t, int64_t latent_h,
                        const void* q_rope, int64_t rope_t, int64_t rope_h, int64_t rows,
                        int64_t heads, int64_t rank, int64_t rope, const void* layer,
                        int64_t row_bytes, int64_t blocks, int64_t block_size, const int64_t* positions,
                        const int32_t* query_start, const int32_t* tables, int64_t sequences,
                        int64_t table_width, const int32_t* ancestors, int64_t depth, float scale,
                        int is_bf16, void* out, int threads) {
  Batch b{positions, query_start, tables, sequences, table_width, block_size, ancestors, depth};
  if (int error = check(b, rows, blocks)) return error;
  auto run = [&](auto* x) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
    latent_attention(Latent<T>{x, latent_t, latent_h, static_cast<const T*>(q_rope), rope_t, rope_h,
                               static_cast<const T*>(layer), row_bytes, heads, rank, rope, scale,
                               static_cast<T*>(out)},
                     b, threads);
  };
  is_bf16 ? run(static_cast<const bf16*>(q_latent)) : run(static_cast<const float*>(q_latent));
  return 0;
}

int ms_naive_attention(const void* q, int64_t t_stride, int64_t h_stride, int64_t rows,
                       int64_t heads, int64_t rank, int64_t nope, int64_t rope, int64_t value,
                       const void* layer, int64_t row_bytes, int64_t blocks, int64_t block_size,
                       const void* kv_b,
                       const int64_t* positions, const int32_t* query_start, const int32_t* tables,
                       int64_t sequences, int64_t table_width, const int32_t* ancestors,
                       int64_t depth, float scale, int is_bf16, void* out, int threads) {
  Batch b{positions, query_start, tables, sequences, table_width, block_size, ancestors, depth};
  if (int error = check(b, rows, blocks)) return error;
  auto run = [&](auto* x) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
    naive_attention(Naive<T>{x, t_stride, h_stride, static_cast<const T*>(layer), row_bytes, heads,
                             rank, nope, rope, value, scale, static_cast<T*>(out)},
                    b, Panels<T>{static_cast<const word*>(kv_b), heads * (nope + value), rank},
                    threads);
  };
  is_bf16 ? run(static_cast<const bf16*>(q)) : run(static_cast<const float*>(q));
  return 0;
}
}

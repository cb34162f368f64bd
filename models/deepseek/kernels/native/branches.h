// Trees of drafts: rows of one tile that find different keys at the same position.
//
// A position that is several rows' has an entry for each key that some row finds there, and a row
// sees one of them; of the others its probability is zero, and zero times a value changes no sum.
// So a row sums the same numbers in the same order as in a chain along its path. Brain floats are
// summed in pairs of positions: an entry then is the pair of keys that a row finds at two.
#pragma once
#include <algorithm>
#include <climits>
#include <vector>

#include "attention.h"

namespace moeserve {

struct Batch {
  const int64_t* positions;
  const int32_t* query_start;
  const int32_t* tables;
  long sequences, table_width, block_size;
  const int32_t* ancestors;  // [rows][depth] slots, -1 behind the entries; null: no trees
  long depth;

  // Where a position of a sequence lies but for trees.
  long slot(long sequence, long position) const {
    long block = tables[sequence * table_width + position / block_size];
    return block * block_size + position % block_size;
  }
  // The nodes on a row's path: its last positions.
  long nodes(long row) const {
    long n = 0;
    if (ancestors)
      while (n < depth && ancestors[row * depth + n] >= 0) n++;
    return n;
  }
  long slot_seen(long sequence, long row, long position, long nodes_of_row) const {
    long node = position - (positions[row] + 1 - nodes_of_row);
    return node < 0 ? slot(sequence, position) : long(ancestors[row * depth + node]);
  }
};

constexpr long NO_BRANCHES = LONG_MAX;

struct Query {  // rows begin .. end - 1 of one sequence, which see positions 0 .. last
  long sequence, begin, end, last;
  long branches;  // from this position on (even) rows may find different keys

  // Entries of a partition, at most.
  long most() const {
    if (branches > last) return PARTITION;
    return PARTITION + (end - begin) * std::min(PARTITION, last + 2 - branches);
  }
};

// A tree that is a chain in the sequence's own slots has no branches.
inline long first_branch(const Batch& b, long sequence, long row) {
  long nodes = b.nodes(row), first = b.positions[row] + 1 - nodes;
  for (long i = 0; i < nodes; i++)
    if (b.ancestors[row * b.depth + i] != b.slot(sequence, first + i)) return (first + i) & ~1L;
  return NO_BRANCHES;
}

// Positions from .. to - 1 of a partition (from is even), as the rows of a tile find them.
struct Entries {
  std::vector<long> slots;
  std::vector<char> seen;  // [entry][row]

  template <class T> void find(const Batch& b, const Query& q, long from, long to) {
    constexpr long per = per_word<T>();
    long rows = q.end - q.begin;
    slots.clear();
    seen.clear();
    for (long p = from; p < to; p += per) {
      size_t group = slots.size();
      for (long r = 0; r < rows; r++) {
        long row = q.begin + r, last = b.positions[row], nodes = b.nodes(row), wanted[per];
        if (last < p) continue;
        for (long i = 0; i < per; i++)
          wanted[i] = p + i <= last ? b.slot_seen(q.sequence, row, p + i, nodes) : -1;
        size_t at = group;
        while (at < slots.size() && !fits<per>(at, wanted)) at += per;
        if (at == slots.size()) {
          slots.resize(at + per, -1);
          seen.resize((at + per) * size_t(rows), 0);
        }
        for (long i = 0; i < per; i++)
          if (wanted[i] >= 0) {
            slots[at + size_t(i)] = wanted[i];
            seen[(at + size_t(i)) * size_t(rows) + size_t(r)] = 1;
          }
      }
    }
    // Half a pair: something to read, which nobody sees.
    for (size_t at = 1; at < slots.size(); at++)
      if (slots[at] < 0) slots[at] = slots[at - 1];
  }

  // scores [entry][columns], of each row `heads` columns.
  void hide_unseen(long rows, long heads, long columns, float* scores) const {
    for (size_t i = 0; i < seen.size(); i++) {
      if (seen[i]) continue;
      float* from = scores + long(i) / rows * columns + long(i) % rows * heads;
      std::fill(from, from + heads, -INFINITY);
    }
  }

 private:
  template <long per> bool fits(size_t at, const long* wanted) const {
    for (long i = 0; i < per; i++) {
      long there = slots[at + size_t(i)];
      if (there >= 0 && wanted[i] >= 0 && there != wanted[i]) return false;
    }
    return true;
  }
};

// Limits where entries have taken the place of positions from `from` on: what a row sees of them
// is told by hide_unseen.
inline void open_limits(const float* limits, long columns, long from, float* opened) {
  for (long c = 0; c < columns; c++) opened[c] = limits[c] < float(from) ? limits[c] : INFINITY;
}

}  // namespace moeserve

// Grouped product (mixture of experts): row p times the matrix of a table that p selects at run time.
//
// Few rows (decoding) are a product each, and the columns of all of them pass as one stream. More rows, or more than
// there are matrices, are first sorted by matrix, with a counting sort that each tile repeats, as it is cheap compared
// with any product; then each selected matrix is multiplied by its rows. Other matrices are not read. An element's sum
// has product()'s order: bits depend neither on other selections nor on tiles.
#pragma once

#include "cuda/loop/failure.cuh"
#include "cuda/loop/matmul.cuh"

namespace ark::loop {

// Strides in elements. `runs`: the index holds the end of each matrix's rows.
struct Experts {
  int64_t rows, experts, depth;
  int64_t a_depth;
  int64_t table_expert, table_depth, table_column;
  int64_t out_column;
  bool a_aligned, table_aligned;  // as a_aligned and b_aligned of each product
  Cache table_cache;
  bool runs;
};

// So few rows are not sorted, if each may have a matrix of its own. (Reading a matrix once for its rows takes 1.5 times
// as long as reading it for one row in the stream; with more rows than matrices it is read less often than that.)
inline constexpr int kSeparateRows = 16;

// The positions of each product's rows; `order` maps them to the user's rows.
template <class AAt, class OutAt>
struct SortedRows {
  static constexpr bool kEven = false;
  const int* order;
  AAt a_at;
  OutAt out_at;
  ARK_LOOP int64_t a(int r) const { return a_at(order[r]); }
  ARK_LOOP int64_t b(int) const { return 0; }
  ARK_LOOP int64_t out(int r) const { return out_at(order[r]); }
};

// The same if each row is a separate product.
template <class AAt, class OutAt>
struct SeparateRows {
  static constexpr bool kEven = false;
  const int64_t* matrices;  // offset of each row's matrix
  AAt a_at;
  OutAt out_at;
  ARK_LOOP int64_t a(int r) const { return a_at(r); }
  ARK_LOOP int64_t b(int r) const { return matrices[r]; }
  ARK_LOOP int64_t out(int r) const { return out_at(r); }
};

ARK_LOOP bool any_thread(bool x) {
  return Block::all(x, [](bool one, bool other) { return one || other; });
}

// The rows of matrix e are `order`[first[e] .. first[e + 1]). Returns false if an index is out of range.
template <Experts s, class I, class IndexAt>
ARK_LOOP bool order_rows(const Context& context, const I* index, IndexAt index_at, int* first, int* order) {
  constexpr int kRows = s.rows, kExperts = s.experts;
  bool bad = false;
  if constexpr (s.runs) {
    for (int e = thread(); e < kExperts; e += kThreads) {
      const int64_t begin = e == 0 ? 0 : load_one(index + index_at(e - 1)), end = load_one(index + index_at(e));
      if (!index_fits(context, end, kRows + 1) || !index_fits(context, begin, end + 1)) bad = true;
      first[e + 1] = static_cast<int>(end);
    }
    if (thread() == 0) first[0] = 0;
    for (int p = thread(); p < kRows; p += kThreads) order[p] = p;
    return !any_thread(bad);
  } else {
    constexpr int kEach = (kExperts + kThreads - 1) / kThreads;  // matrices per thread
    int* const counts = reinterpret_cast<int*>(workspace());
    int* const sums = counts + kEach * kThreads;
    static_assert((kEach + 1) * kThreads * 4 <= kWorkspaceBytes);
    sync();
    for (int e = thread(); e < kEach * kThreads; e += kThreads) counts[e] = 0;
    sync();
    for (int p = thread(); p < kRows; p += kThreads) {
      const int64_t e = load_one(index + index_at(p));
      if (index_fits(context, e, kExperts))
        atomicAdd(counts + e, 1);
      else
        bad = true;
    }
    if (any_thread(bad)) return false;
    int mine = 0;
    for (int e = 0; e < kEach; ++e) mine += counts[thread() * kEach + e];
    sums[thread()] = mine;
    sync();
    if (thread() * kEach <= kExperts) {
      int before = 0;
      for (int t = 0; t < thread(); ++t) before += sums[t];
      for (int e = thread() * kEach; e < (thread() + 1) * kEach && e <= kExperts; ++e) {
        first[e] = before;
        before += counts[e];
      }
      if (kExperts == kEach * kThreads && thread() == kThreads - 1) first[kExperts] = before;
    }
    sync();
    for (int e = warp(); e < kExperts; e += kWarps) {
      if (counts[e] == 0) continue;
      int at = first[e];
      for (int p = lane(); p - lane() < kRows; p += 32) {
        const bool chosen = p < kRows && load_one(index + index_at(p)) == e;
        const uint32 all = __ballot_sync(~0u, chosen);
        if (chosen) order[at + __popc(all & ((1u << lane()) - 1))] = p;
        at += __popc(all);
      }
    }
    return true;
  }
}

// Columns [c0, c1) of all rows. The `*_at` functions return the offset of row p (with runs: of index entry e).
// `scratch` has room for one int per row, one per matrix, and one more.
template <Experts s, class A, class W, class I, class Out, class AAt, class IndexAt, class OutAt>
ARK_LOOP void grouped_product(const Context& context, const A* a, const W* table, const I* index, Out* out, AAt a_at,
                              IndexAt index_at, OutAt out_at, int64_t c0, int64_t c1, char* scratch) {
  constexpr Product of_one{.depth = s.depth,
                           .a_row = 0,
                           .a_depth = s.a_depth,
                           .b_depth = s.table_depth,
                           .b_column = s.table_column,
                           .out_row = 0,
                           .out_column = s.out_column,
                           .bias_row = 0,
                           .bias_column = 0,
                           .a_aligned = s.a_aligned,
                           .b_aligned = s.table_aligned,
                           .b_cache = s.table_cache};
  const NoBias* const no_bias = nullptr;
  if constexpr (!s.runs && s.rows <= kSeparateRows && s.rows <= s.experts) {
    __shared__ int64_t matrices[kSeparateRows];
    bool bad = false;
    sync();  // the previous use has ended
    if (thread() < s.rows) {
      const int64_t e = load_one(index + index_at(thread()));
      bad = !index_fits(context, e, s.experts);
      matrices[thread()] = e * s.table_expert;
    }
    if (any_thread(bad)) return;
    few_rows<1, of_one>(SeparateRows<AAt, OutAt>{matrices, a_at, out_at}, a, table, out, no_bias, 0, 1, s.rows, c0, c1);
  } else {
    auto* const first = reinterpret_cast<int*>(scratch);
    int* const order = first + s.experts + 1;
    sync();  // the previous use has ended
    if (!order_rows<s>(context, index, index_at, first, order)) return;
    sync();
    const int last = first[s.experts];
    for_elements((s.rows - last) * (c1 - c0), [&](int64_t i) {  // rows after the last run
      store_one(out + out_at(last + i / (c1 - c0)) + (c0 + i % (c1 - c0)) * s.out_column, 0.0f);
    });
    const SortedRows<AAt, OutAt> at{order, a_at, out_at};
    // With few rows per matrix memory is the limit. In float32, larger tiles leave no registers for the rows'
    // positions.
    constexpr int64_t kInTiles = kIsHalf<W> ? s.rows : 64;
    constexpr int kMost = least<int64_t>(s.rows, s.rows <= 8 * s.experts ? kTensorRows : kInTiles);
    int e = 0;
    for (int from = 0, to; from < last; from = to) {
      while (first[e + 1] <= from) ++e;
      to = least(first[e + 1], from + kMost);
      product_of<kMost, of_one>(at, a, table + e * s.table_expert, out, no_bias, from, to, c0, c1);
    }
  }
}

}  // namespace ark::loop

// Embedding bags: the table rows that a bag names, pooled by sum, mean or maximum in the bag's order.
//
// Bag b is indices [offsets[b], offsets[b + 1]); the last one ends at the last index, or at a last offset. The padding
// index is ignored; an empty bag gives zeros. Sums are float32. Adjacent threads take adjacent columns of a bag. Every
// offset and index is checked before its row is read; an invalid one ends the launch with an error.
#pragma once

#include "cuda/loop/failure.cuh"
#include "cuda/loop/hinted.cuh"
#include "cuda/loop/ops.cuh"

namespace ark::loop {

// Strides in elements.
struct Bags {
  int64_t table_rows, table_row, table_column;
  int64_t indices, index, offset;
  int64_t bags;
  bool last_offset;
  int64_t weight;
  int64_t out_row, out_column;
  int64_t padding;
};

enum class Pooling { sum, mean, max };
struct NoWeights {};

// Pools column c of the rows that indices [from, to) name.
template <Pooling kMode, class T, class I, class W>
ARK_LOOP float pool_column(const Context& context, const Bags& s, const T* table, const I* index, const W* weights,
                           int64_t from, int64_t to, int64_t c) {
  constexpr int kAhead = 4;  // rows in flight together
  float total = 0;
  int64_t count = 0;
  for (int64_t begin = from; begin < to; begin += kAhead) {
    float x[kAhead];
    bool counts[kAhead];
    ARK_UNROLL for (int i = 0; i < kAhead; ++i) {
      const int64_t at = begin + i, row = at < to ? load_one(index + at * s.index) : 0;
      counts[i] = at < to && index_fits(context, row, s.table_rows) && row != s.padding;
      x[i] = counts[i] ? load_one(table + row * s.table_row + c * s.table_column) : 0.0f;
      if constexpr (!kSame<W, NoWeights>)
        if (counts[i]) x[i] *= load_one(weights + at * s.weight);
    }
    ARK_UNROLL for (int i = 0; i < kAhead; ++i) {
      if (!counts[i]) continue;
      if constexpr (kMode == Pooling::max)
        total = count == 0 || x[i] > total ? x[i] : total;
      else
        total += x[i];
      ++count;
    }
  }
  return kMode == Pooling::mean && count > 0 ? total / static_cast<float>(count) : total;
}

// Offsets are reported without a dimension (step_failure.cpp names them).
ARK_LOOP bool offset_fits(const Context& context, int64_t offset, int64_t most) {
  return index_fits(context, offset, most + 1, offset, -1);
}

// Bags [b0, b1) and columns [c0, c1).
template <Pooling kMode, class T, class I, class O, class W, class Out>
ARK_LOOP void pool(const Context& context, const Bags& s, const T* table, const I* index, const O* offsets,
                   const W* weights, Out* out, int64_t b0, int64_t b1, int64_t c0, int64_t c1) {
  if (!offset_fits(context, load_one(offsets), 0)) return;  // the first bag must start at the first index
  const uint32 columns = static_cast<uint32>(c1 - c0);
  for_elements((b1 - b0) * columns, [&](int64_t i) {
    const uint32 element = static_cast<uint32>(i), bag = element / columns;
    const int64_t b = b0 + bag, c = c0 + (element - bag * columns);
    const int64_t from = load_one(offsets + b * s.offset);
    const bool ends = b + 1 == s.bags && !s.last_offset;
    const int64_t to = ends ? s.indices : load_one(offsets + (b + 1) * s.offset);
    if (!offset_fits(context, from, s.indices) || !offset_fits(context, to, s.indices)) return;
    if (!offset_fits(context, from, to)) return;
    store_one(out + b * s.out_row + c * s.out_column,
              pool_column<kMode>(context, s, table, index, weights, from, to, c));
  });
}

}  // namespace ark::loop

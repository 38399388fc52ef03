// Combines the parts of a split attention: each row's sums, maximum score and total of every block of positions
// (compiler/passes/split_kv.hpp), in the order of blocks.
#pragma once

#include "cuda/loop/attention_rows.cuh"
#include "cuda/loop/runs.cuh"

namespace ark::loop {

// Strides in elements. Rows of `sums` and `states` are contiguous and grouped by head.
struct AttentionParts {
  int64_t queries;
  int64_t sums, states;  // from part to part
  int64_t out_head, out_row, out_column;
  bool nan_rows;  // see Attention
};

// Heads [begin, end). Half a warp takes a row, and loads its run of columns before it knows the parts' weights.
template <int kParts, int kColumns, AttentionParts s, class Out>
ARK_LOOP void combine_parts(const float* sums, const float* states, Out* out, int64_t begin, int64_t end) {
  constexpr int kLanes = PartWeights::kLanes, kGroups = kThreads / kLanes;
  constexpr int kEach = kColumns % 4 == 0 ? 4 : 1, kRun = kLanes * kEach;
  static_assert(kParts <= PartWeights::kMost);
  const int rows = static_cast<int>((end - begin) * s.queries), first = static_cast<int>(begin * s.queries);
#pragma unroll 1
  for (int turn = 0; turn < rows; turn += kGroups) {
    const int number = turn + thread() / kLanes;
    const bool there = number < rows;
    const int row = first + (there ? number : 0);
    int c = lane() % kLanes * kEach;
    struct alignas(4 * kEach) Few {
      float values[kEach];
    };
    Few given[kParts];
    const auto load = [&] {
      const float* const from = sums + row * kColumns + (c < kColumns ? c : 0);
      ARK_UNROLL for (int p = 0; p < kParts; ++p) given[p] = *reinterpret_cast<const Few*>(from + p * s.sums);
    };
    load();
    const PartWeights parts(states + row * 2, s.states, kParts);
    const float factor = last_factor(parts.total(), s.nan_rows);
    Out* const to = out + row / s.queries * s.out_head + row % s.queries * s.out_row;
    for (int run = 0;;) {
      Few sum = {};
      ARK_UNROLL for (int p = 0; p < kParts; ++p) {
        const float weight = parts.of(p);
        ARK_UNROLL for (int i = 0; i < kEach; ++i) sum.values[i] = fused(given[p].values[i], weight, sum.values[i]);
      }
      ARK_UNROLL for (int i = 0; i < kEach; ++i) sum.values[i] *= factor;
      if (there && c < kColumns) {
        if constexpr (s.out_column == 1)
          store_pieces(to + c, sum.values);
        else
          ARK_UNROLL for (int i = 0; i < kEach; ++i) store_one(to + (c + i) * s.out_column, sum.values[i]);
      }
      run += kRun;
      if (run >= kColumns) break;
      c += kRun;
      load();
    }
  }
}

}  // namespace ark::loop

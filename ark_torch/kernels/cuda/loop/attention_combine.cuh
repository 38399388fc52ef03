// Attention from what its parts left: of each row the sums, the greatest score and the total of every block of
// positions (plan/split_positions.hpp), combined in the order of blocks. A warp has a row.
#pragma once

#include "cuda/loop/attention_rows.cuh"

namespace ark::loop {

// Strides in elements. Rows of `sums` and `states` lie one after the other, those of a head together.
struct AttentionParts {
  int64_t queries;
  int64_t sums, states;  // from part to part
  int64_t out_head, out_row, out_column;
};

// Heads [begin, end).
template <int kParts, int kColumns, AttentionParts s, class Out>
ARK_LOOP void combine_parts(const float* sums, const float* states, Out* out, int64_t begin, int64_t end) {
  constexpr int kRuns = (kColumns + 31) / 32;  // of 32 columns
#pragma unroll 1
  for (int row = static_cast<int>(begin * s.queries) + warp(); row < static_cast<int>(end * s.queries); row += kWarps) {
    float given[kRuns][kParts];
    ARK_UNROLL for (int run = 0; run < kRuns; ++run) ARK_UNROLL for (int p = 0; p < kParts; ++p) {
      const int c = run * 32 + lane();
      given[run][p] = kColumns % 32 == 0 || c < kColumns ? sums[p * s.sums + row * kColumns + c] : 0.0f;
    }
    const PartWeights parts(states + row * 2, s.states, kParts);
    const float factor = last_factor(parts.total());
    Out* const to = out + row / s.queries * s.out_head + row % s.queries * s.out_row;
    ARK_UNROLL for (int run = 0; run < kRuns; ++run) {
      const int c = run * 32 + lane();
      float sum = 0;
      ARK_UNROLL for (int p = 0; p < kParts; ++p) sum = fused(given[run][p], parts.of(p), sum);
      if (kColumns % 32 == 0 || c < kColumns) store_one(to + c * s.out_column, sum * factor);
    }
  }
}

}  // namespace ark::loop

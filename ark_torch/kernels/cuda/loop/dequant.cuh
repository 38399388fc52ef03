// A tile of a product with quantized weights: out[r, c] = sum over d of a[r, d] w[d, c] (+ bias[r, c]). Weights are
// decoded in registers, so that only codes stream from memory: int8, float8 (e4m3), or two 4-bit codes per byte.
//
// Half types use tensor cores (dequant_tensor.cuh). float32 rows, and operands not aligned or grouped as tensor cores
// need, are computed element by element. The choice depends only on shapes, strides, alignment and types. Several
// products that share their rows pass as one run of columns.
#pragma once

#include "cuda/loop/lane_scales.cuh"
#include "cuda/loop/staged_scales.cuh"

namespace ark::loop {

// A column per warp, an element per lane.
template <int Rows, class A, class Share>
ARK_LOOP void dequant_plain(const A* a, const Share& share, int r0, int rows) {
  constexpr Product s = Share::kProduct;
  constexpr Codes q = Share::q;
  for (int c = share.c0 + warp(); c < share.c1; c += kWarps) {
    const auto* const codes = share.column(c);
    float sums[Rows] = {};
    ARK_ROLLED for (int d = lane(); d < s.depth; d += 32) {
      const int g = d / q.group;
      float w = Coding<q, typename Share::Element, f16>::one(codes, d);
      if constexpr (!q.zero_after) w -= share.zero(g, c);
      w *= share.scale(g, c);
      if constexpr (q.zero_after) w += share.zero(g, c);
      ARK_UNROLL for (int r = 0; r < Rows; ++r) if (r < rows) sums[r] =
          fused(load_one(a + (r0 + r) * s.a_row + d * s.a_depth), w, sums[r]);
    }
    ARK_UNROLL for (int r = 0; r < Rows; ++r) {
      const float one[1] = {sums[r]};
      const float sum = fold_lanes<16, 1>(one);
      if (lane() == 0 && r < rows)
        finish_one(s, now(share.out) + (r0 + r) * s.out_row, now(share.bias), r0 + r, c, sum);
    }
  }
}

template <int kMost, class Columns>
struct CodeStream {
  using Type = StagedScales<Columns, kMost>;
};
template <class Columns>
struct CodeStream<0, Columns> {
  using Type = LaneScales<Columns>;
};

// How kRows rows, at most as many as fit a tensor core, are multiplied with the columns of shares.
template <int kRows, class First, class... Rest>
struct DequantRuns {
  using Runs = CodedRuns<First, Rest...>;
  using Slices = CodeSlices<Runs>;
  static constexpr int kMost = kRows <= kStagedRows ? most_staged_columns<kRows, Runs>() : 0;
  using Stream = typename CodeStream<kMost, Runs>::Type;
};

template <int kRows, bool kStaged, class AAt, class First, class... Rest>
ARK_LOOP void dequant_runs(AAt a, const First& first, const Rest&... rest) {
  using How = DequantRuns<kRows, First, Rest...>;
  using Runs = typename How::Runs;
  using Slices = typename How::Slices;
  static_assert(kWorkspaceBytes / 4 / kRows - 8 >= Slices::split.slices * Slices::kTogether);
  const auto runs = [&] { return Runs(0, first.anew(), rest.anew()...); };
  if (kStaged) wait_copies<0>();
  in_slices<kRows, How::kMost>(
      kRows, 1, 0, runs().total, Slices::split.slices, Slices::kTogether,
      [&](int, int, int c, int batches, Parts parts) {
        dequant_parts<kRows, typename How::Stream>(a, runs(), c, batches, parts, kStaged && c == 0);
      },
      [&](int row, int c, float sum) { runs().template finish<!Slices::kScaledHere>(row, c, sum); });
}

template <int64_t kRows, class A, class First>
inline constexpr bool kDequantsInRuns =
    kIsHalf<A>&& kDequantsByTensor<First::kProduct, First::q>&& kRows <= kTensorRows;

// Begins to copy the scales of the columns that dequant_products<kRows, true>() multiplies first, whose rows a head of
// the task makes meanwhile. The head leaves workspace() alone.
template <int64_t kRows, class AAt, class First, class... Rest>
ARK_LOOP void stage_scales(AAt, const First& first, const Rest&... rest) {
  if constexpr (kDequantsInRuns<kRows, typename Pointee<AAt>::Type, First> && kRows <= kStagedRows) {
    using How = DequantRuns<kRows, First, Rest...>;
    using Slices = typename How::Slices;
    if constexpr (How::kMost > 0 && How::Stream::kSyncs) {
      const typename How::Runs runs(0, first, rest...);
      const int width = (least(runs.total, How::kMost) + Slices::kTogether - 1) / Slices::kTogether * Slices::kTogether;
      How::Stream::stage(runs, 0, Parts(Slices::split.slices, width).at(kRows, 0, 0), width);
    }
  }
}

// All kRows rows of a with the columns of each share. The shares use the same encoding. kStaged: after stage_scales().
template <int64_t kRows, bool kStaged = false, class AAt, class First, class... Rest>
ARK_LOOP void dequant_products(AAt a, const First& first, const Rest&... rest) {
  using A = typename Pointee<AAt>::Type;
  static_assert((kSame<typename First::Element, typename Rest::Element> && ...));
  if constexpr (kDequantsInRuns<kRows, A, First>) {
    dequant_runs<kRows, kStaged>(a, first, rest...);
  } else {
    ARK_ROLLED for (int r = 0; r < kRows; r += kTensorRows) {
      constexpr int kMost = least<int64_t>(kRows, kTensorRows);
      const int rows = least<int>(kRows - r, kTensorRows);
      dequant_plain<kMost>(now(a), first, r, rows);
      (dequant_plain<kMost>(now(a), rest, r, rows), ...);
    }
  }
}

}  // namespace ark::loop

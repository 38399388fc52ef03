// Chooses the kernel by shapes and types. See attention_kernel.hpp.
#include "compiler/schedule/attention_kernel.hpp"

#include <algorithm>

#include "compiler/graph/stage_queries.hpp"
#include "compiler/schedule/matmul_tile.hpp"

namespace ark::compiler {

namespace {

constexpr int64_t kGroupRows = 64;  // of a warp group, with 64 value columns
constexpr int64_t kGroups = 4;

// Figures of an H200 (docs/measurements.md).
constexpr double kStartUs = 2;
constexpr double kAllPositionsUs = 0.6, kPositionUs = 0.0125;  // attention_groups.cuh: 64 rows
// attention_flash.cuh: of up to 256 rows, of a block of 64 positions, of an element of the mask, of combining groups.
constexpr double kPassUs = 1.5, kBlockUs = 1.1, kBusyGroupUs = 0.17, kScannedUs = 3e-5, kCombineUs = 1;

int64_t rows_of(const Graph& graph, const AttentionStage& attention) {
  const Value &q = graph.values()[attention.q], &k = graph.values()[attention.k];
  return q.shape[1] / k.shape[1] * q.shape[2];
}

AttentionKernel kernel_for(const Graph& graph, const AttentionStage& attention, int64_t rows) {
  constexpr int64_t kFewRows = 16, kMostPositions = 512, kMostByGroups = 2 * kGroupRows;
  const auto value = [&](int index) { return graph.values()[static_cast<size_t>(index)]; };
  const Value q = value(attention.q), k = value(attention.k), v = value(attention.v);
  const int64_t columns = q.shape[3];
  if (size_of(q.type) != 2 || q.type != k.type || k.type != v.type || columns != v.shape[3] || rows <= kFewRows ||
      (columns != 64 && columns != 128) || attention.states >= 0 || attention.added.k >= 0)
    return AttentionKernel::plain;
  const auto same_along = [](const Value& mask, size_t dim) { return mask.shape[dim] == 1 || mask.strides[dim] == 0; };
  const bool one_mask =
      attention.mask < 0 || (same_along(value(attention.mask), 1) && same_along(value(attention.mask), 2));
  const bool by_groups = columns == 64 && k.shape[2] <= kMostPositions && one_mask && !attention.causal;
  return by_groups && rows <= kMostByGroups ? AttentionKernel::groups : AttentionKernel::flash;
}

}  // namespace

AttentionKernel attention_kernel(const Graph& graph, const AttentionStage& attention) {
  return kernel_for(graph, attention, rows_of(graph, attention));
}

double attention_task_us(const Graph& graph, const AttentionStage& attention, int64_t rows, double attended) {
  const Value& k = graph.values()[attention.k];
  const auto positions = static_cast<double>(k.shape[2]);
  if (kernel_for(graph, attention, rows) == AttentionKernel::groups)
    return kStartUs + static_cast<double>(wholes(rows, kGroupRows)) * (kAllPositionsUs + kPositionUs * positions);
  const int64_t halves = std::max<int64_t>(1, k.shape[3] / 64), sets = std::max<int64_t>(1, kGroups / halves);
  const int64_t turns = std::max<int64_t>(1, sets / wholes(rows, kGroupRows));  // as attend_flash() chooses
  const double blocks = attended * static_cast<double>(wholes(k.shape[2], 64)) / static_cast<double>(turns);
  double us = kStartUs + (turns > 1 ? kCombineUs : 0);
  for (int64_t first = 0; first < rows; first += kGroupRows * sets) {
    const int64_t busy = std::min(sets, wholes(rows - first, kGroupRows) * turns) * halves;
    us += kPassUs + blocks * (kBlockUs + kBusyGroupUs * static_cast<double>(busy));
  }
  if (attention.mask < 0 || attention.causal) return us;
  const Value& mask = graph.values()[attention.mask];
  const bool of_heads = mask.shape[1] > 1 && mask.strides[1] != 0, of_rows = mask.shape[2] > 1 && mask.strides[2] != 0;
  const int64_t heads = graph.values()[attention.q].shape[1] / k.shape[1];
  const double masks = (of_rows ? static_cast<double>(rows) / static_cast<double>(heads) : 1) *
                       (of_heads ? static_cast<double>(heads) : 1);
  return us + kScannedUs * masks * positions;
}

}  // namespace ark::compiler

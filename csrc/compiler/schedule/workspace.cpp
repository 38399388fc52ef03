// Sizes the workspace by the stages that need most of it. See workspace.hpp.
#include "compiler/schedule/workspace.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <variant>

#include "cuda/loop/group.cuh"

namespace ark::compiler {

namespace {

constexpr int64_t kStagedRows = 8;     // of products whose scales are staged (cuda/loop/staged_scales.cuh)
constexpr int64_t kMostStaged = 1024;  // bytes of a column, which leave room for a batch of columns

// Bytes of a column's scales and zeros, which are staged in the workspace.
int64_t staged_bytes(const Graph& graph, const MatmulStage& product) {
  const auto value = [&](int index) -> const Value& { return graph.values()[static_cast<size_t>(index)]; };
  const Codes& codes = product.codes;
  // A whole column's scale is applied last, and other groups than of whole slices are not for tensor cores.
  const bool staged = codes.group == product.k ? codes.zero >= 0 : codes.group % 128 == 0;
  if (codes.bits == 0 || product.m > kStagedRows || size_of(value(product.a).type) != 2 || !staged) return 0;
  int64_t bytes = 0;
  for (const int of : {codes.scale, codes.zero}) {
    if (of < 0) continue;
    const std::vector<int64_t>& strides = value(of).strides;
    const bool in_turns = strides.size() > 1 && strides.back() == 2 && strides[strides.size() - 2] != 1;
    bytes += product.k / codes.group * size_of(value(of).type) * (in_turns ? 2 : 1);
  }
  return bytes;
}

// Whether the stage's kernel uses all of the workspace, for larger tiles or for sorting. Products of few rows
// (cuda/loop/lanes.cuh) can take turns in less.
bool takes_all(const Graph& graph, const Stage& stage) {
  if (std::holds_alternative<SelectStage>(stage.body) || std::holds_alternative<ExpertsStage>(stage.body)) return true;
  for (const MatmulStage& product : matmuls_of(stage)) {
    // kFewRows of matmul.cuh; with quantized weights, the rows whose sums leave room for columns
    const int64_t few =
        product.codes.bits != 0 ? kStagedRows : 2 * size_of(graph.values()[static_cast<size_t>(product.b)].type);
    if (product.m > few || staged_bytes(graph, product) > kMostStaged) return true;
  }
  if (const AttentionStage* attention = attention_of(stage)) {
    const Value &q = graph.values()[static_cast<size_t>(attention->q)],
                &k = graph.values()[static_cast<size_t>(attention->k)];
    constexpr int64_t few = 16;  // kFewQueries of attention.cuh
    return q.shape[1] / k.shape[1] * q.shape[2] > few;
  }
  return false;
}

}  // namespace

int workspace_bytes(const Plan& plan) {
  const bool all = std::any_of(plan.stages.begin(), plan.stages.end(),
                               [&](const Stage& stage) { return takes_all(plan.graph, stage); });
  return all ? loop::kWorkspaceBytes : loop::kSmallWorkspaceBytes;
}

}  // namespace ark::compiler

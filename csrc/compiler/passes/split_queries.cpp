// Chooses the parts and blocks and makes one stage for each. See split_queries.hpp.
#include "compiler/passes/split_queries.hpp"

#include <algorithm>
#include <utility>

#include "compiler/passes/attention_parts.hpp"
#include "compiler/schedule/attention_kernel.hpp"
#include "compiler/schedule/matmul_tile.hpp"

namespace ark::compiler {

namespace {

constexpr int64_t kTileRows = 64;  // query rows, over all heads that share keys, of one tile of the attention kernel
constexpr int64_t kFewRows =
    16;  // up to this many the kernel uses another algorithm: blocks as small would make bits depend on the cut

// Whether later query rows attend to more positions, certainly or, with a mask of its own for each row, probably.
bool is_triangular(const Graph& graph, const AttentionStage& attention) {
  if (attention.causal || attention.mask < 0) return attention.causal;
  const Value& mask = graph.values()[attention.mask];
  return mask.shape[2] > 1 && mask.strides[2] != 0;
}

// The share of query rows [begin, end) in the operations that the stage counts, which knows of a mask nothing.
double share_of(const Graph& graph, const AttentionStage& attention, int64_t begin, int64_t end) {
  const auto queries = static_cast<double>(graph.values()[attention.q].shape[2]);
  const auto first = static_cast<double>(begin), past = static_cast<double>(end);
  if (!is_triangular(graph, attention)) return (past - first) / queries;
  const auto keys = static_cast<double>(graph.values()[attention.k].shape[2]);
  const double before = attention.causal ? 0 : std::max(0.0, keys - queries);  // positions that all rows attend to
  const auto work = [&](double from, double to) { return (to - from) * (2 * before + from + to); };
  return work(first, past) / (attention.causal ? work(0, queries) : 2 * queries * keys);
}

// Query rows per block, in whole tiles of the kernel. `tasks`: of one block.
int64_t block_rows(const Graph& graph, const AttentionStage& attention, int64_t tasks, const Target& target) {
  const int64_t queries = graph.values()[attention.q].shape[2], heads = heads_of(graph, attention);
  const int64_t least = std::max<int64_t>(1, kTileRows / heads);
  const auto whole = [&](int64_t blocks) { return wholes(wholes(queries, blocks), least) * least; };
  const int64_t most = wholes(queries, least);
  if (target.name != "sm_90a" || attention_kernel(graph, attention) == AttentionKernel::plain)
    return whole(std::clamp<int64_t>(target.workers / tasks, 1, most));
  int64_t best = queries;
  double best_us = 0;
  for (int64_t blocks = 1; blocks <= most; ++blocks) {
    const int64_t rows = whole(blocks), all = tasks * wholes(queries, rows);
    const auto task_us = [&](double attended) {
      return attention_task_us(graph, attention, std::min(rows, queries) * heads, attended);
    };
    // Tasks of different length are shared out by their estimates.
    const double mean = 0.5 + 0.5 / static_cast<double>(wholes(queries, rows));
    const double us = is_triangular(graph, attention)
                          ? std::max(task_us(1), static_cast<double>(all) * task_us(mean) / target.workers)
                          : static_cast<double>(wholes(all, target.workers)) * task_us(1);
    if (blocks == 1 || us < best_us - 1e-9) best = rows, best_us = us;
  }
  return best;
}

}  // namespace

std::vector<Stage> split_queries(Graph& graph, std::vector<Stage> stages, const Target& target) {
  std::vector<Stage> split;
  for (Stage& stage : stages) {
    const auto* attention = std::get_if<AttentionStage>(&stage.body);
    const int64_t queries = attention == nullptr ? 0 : graph.values()[attention->q].shape[2];
    if (attention == nullptr || queries * heads_of(graph, *attention) <= kFewRows) {
      split.push_back(std::move(stage));
      continue;
    }
    const int64_t heads = heads_of(graph, *attention);
    const std::vector<Stage> parts = parts_across(graph, stage, target);
    const int64_t rows = block_rows(graph, *attention, stage.extent * static_cast<int64_t>(parts.size()), target);
    std::vector<int64_t> bounds = {0};
    while (bounds.back() < queries) {
      const int64_t left = queries - bounds.back();
      bounds.push_back(left <= rows || (left - rows) * heads <= kFewRows ? queries : bounds.back() + rows);
    }
    // The longest tasks come first, as others then fill what they leave.
    const bool backwards = is_triangular(graph, *attention);
    const size_t blocks = bounds.size() - 1;
    for (size_t i = 0; i < blocks; ++i) {
      const size_t block = backwards ? blocks - 1 - i : i;
      const int64_t begin = bounds[block], end = bounds[block + 1];
      const double share = share_of(graph, *attention, begin, end);
      for (const Stage& part : parts)
        split.push_back(blocks == 1 ? part : attention_part(graph, part, 2, begin, end, share));
    }
  }
  return split;
}

}  // namespace ark::compiler

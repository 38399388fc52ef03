// Chooses the blocks of query rows and makes one stage per block. See split_queries.hpp.
#include "compiler/passes/split_queries.hpp"

#include <algorithm>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"

namespace ark::compiler {

namespace {

constexpr int64_t kTileRows = 64;  // query rows, over all heads that share keys, of one tile of the attention kernel
constexpr int64_t kFewRows =
    16;  // up to this many the kernel uses another algorithm: blocks as small would make bits depend on the cut

// A view of rows [begin, end) of dimension 2; the value itself if it has one row for all.
Value rows_of(Value value, int64_t begin, int64_t end) {
  if (value.shape[2] == 1) return value;
  value.offset += begin * value.strides[2];
  value.shape[2] = end - begin;
  return value;
}

// Query rows per block: as few as give every worker a tile, in whole tiles of the kernel.
int64_t block_rows(const Graph& graph, const Stage& stage, const AttentionStage& attention, int workers) {
  const Value &q = graph.values()[attention.q], &k = graph.values()[attention.k];
  const int64_t queries = q.shape[2], heads = q.shape[1] / k.shape[1];
  const int64_t least = std::max<int64_t>(1, kTileRows / heads);
  const int64_t blocks = std::clamp<int64_t>(workers / stage.extent, 1, (queries + least - 1) / least);
  const int64_t rows = (queries + blocks - 1) / blocks;
  return (rows + least - 1) / least * least;
}

}  // namespace

std::vector<Stage> split_queries(Graph& graph, std::vector<Stage> stages, const Target& target) {
  std::vector<Stage> split;
  for (Stage& stage : stages) {
    const auto* attention = std::get_if<AttentionStage>(&stage.body);
    const int64_t queries = attention == nullptr ? 0 : graph.values()[attention->q].shape[2];
    const int64_t rows = attention == nullptr ? 0 : block_rows(graph, stage, *attention, target.workers);
    if (rows >= queries) {
      split.push_back(std::move(stage));
      continue;
    }
    const int64_t heads = graph.values()[attention->q].shape[1] / graph.values()[attention->k].shape[1];
    for (int64_t begin = 0, end = 0; begin < queries; begin = end) {
      end = (queries - begin - rows) * heads <= kFewRows ? queries : begin + rows;
      Stage block = stage;
      AttentionStage& body = std::get<AttentionStage>(block.body);
      const auto view = [&](int& value) {
        if (value < 0) return;
        const int part = view_value(graph, rows_of(graph.values()[value], begin, end));
        for (Access& access : block.accesses)
          if (access.value == value) access.value = part;
        value = part;
      };
      body.first_query = attention->first_query + begin;
      view(body.q);
      view(body.mask);
      view(body.out);
      block.flops = stage.flops * static_cast<double>(end - begin) / static_cast<double>(queries);
      block.bytes = bytes_of(graph, {body.q, body.k, body.v, body.out});
      split.push_back(std::move(block));
    }
  }
  return split;
}

}  // namespace ark::compiler

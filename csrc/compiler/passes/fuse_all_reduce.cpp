// Finds the all_reduces that can be fused, then turns their producers into senders. See fuse_all_reduce.hpp.
#include "compiler/passes/fuse_all_reduce.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <utility>
#include <variant>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/graph/box.hpp"
#include "compiler/graph/stage_moves.hpp"
#include "compiler/passes/lower_collectives.hpp"
#include "compiler/passes/prologue_fusion.hpp"
#include "compiler/schedule/events.hpp"
#include "protocol/packet.hpp"

namespace ark::compiler {

namespace {

struct PushedSum {
  size_t maker, collective;  // stages
  size_t product;            // index among the maker's products
  Value out;                 // the product's result, moved to where the sum belongs
};

bool adds_floats(const Graph& graph, const Stage& stage) {
  if (!is_spread(stage) || std::get<CollectiveStage>(stage.body).nodes > 1) return false;
  const Node& node = graph.nodes()[static_cast<size_t>(stage.node)];
  const Value& input = graph.values()[std::get<CollectiveStage>(stage.body).input];
  return node.op == "all_reduce" && node.text("reduce_op") == "sum" && is_floating(input.type);
}

// The stages before `past` that touch the buffer.
std::vector<size_t> touchers(const Graph& graph, const std::vector<Stage>& stages, size_t past, int buffer) {
  std::vector<size_t> found;
  for (size_t stage = 0; stage < past; ++stage) {
    const std::vector<Access>& all = stages[stage].accesses;
    if (std::any_of(all.begin(), all.end(),
                    [&](const Access& one) { return graph.values()[one.value].buffer == buffer; }))
      found.push_back(stage);
  }
  return found;
}

// Checks what the stages alone can tell. plain_buffers() decides the rest.
std::vector<PushedSum> candidates(const Graph& graph, const std::vector<Stage>& stages) {
  std::vector<PushedSum> found;
  for (size_t index = 0; index < stages.size(); ++index) {
    if (!adds_floats(graph, stages[index])) continue;
    const auto& collective = std::get<CollectiveStage>(stages[index].body);
    const Value &in = graph.values()[collective.input], &sum = graph.values()[collective.output];
    const std::vector<size_t> makers = touchers(graph, stages, index, in.buffer);
    const size_t all = touchers(graph, stages, stages.size(), in.buffer).size();
    if (makers.size() != 1 || graph.buffers()[in.buffer].kind != Buffer::Kind::temporary) continue;
    if (in.buffer != sum.buffer && (all != 2 || !touchers(graph, stages, index, sum.buffer).empty())) continue;
    const std::vector<size_t> readers = touchers(graph, stages, stages.size(), sum.buffer);
    if (readers.back() == index) continue;  // without a reader, no rank would wait for the others
    if (std::any_of(readers.begin(), readers.end(),
                    [&](size_t one) { return one > index && !std::holds_alternative<RowProgram>(stages[one].body); }))
      continue;
    const Stage& maker = stages[makers[0]];
    const auto products = matmuls_of(maker);
    const auto product = std::find_if(products.begin(), products.end(), [&](const MatmulStage& one) {
      return graph.values()[one.out].buffer == in.buffer;
    });
    if (product == products.end() || few_rows_of(maker) < 0 || !maker.tail.empty() || !product->finish.empty())
      continue;
    Value out = graph.values()[product->out];
    if (box_of(out) != box_of(in) || out.elements() != in.elements()) continue;
    out.offset += sum.offset - in.offset;
    out.buffer = sum.buffer;
    found.push_back({makers[0], index, static_cast<size_t>(product - products.begin()), out});
  }
  return found;
}

std::vector<Stage> pushing(Graph& graph, std::vector<Stage> stages, const std::vector<PushedSum>& sums) {
  for (auto one = sums.rbegin(); one != sums.rend(); ++one) {  // backwards, so that erasing a stage keeps the remaining
                                                               // indices valid
    Stage& maker = stages[one->maker];
    const Stage& stage = stages[one->collective];
    const auto& collective = std::get<CollectiveStage>(stage.body);
    const Value& input = graph.values()[collective.input];
    const auto bytes = static_cast<uint64_t>(input.elements() * size_of(input.type));
    auto* const several = std::get_if<ProductsStage>(&maker.body);
    MatmulStage& product = several != nullptr ? several->products[one->product] : std::get<MatmulStage>(maker.body);
    product.push = {stage.node,       collective.ranks, collective.number,
                    collective.place, collective.half,  static_cast<int64_t>(protocol::packet_bytes(bytes)),
                    stage.extent};
    const int out = view_value(graph, one->out);
    for (Access& access : maker.accesses)
      if (access.write && access.value == product.out) access.value = out;
    product.out = out;
    maker.replicable = false;  // each part is sent once
    join_names(maker, stage);
    stages.erase(stages.begin() + static_cast<std::ptrdiff_t>(one->collective));
  }
  return stages;
}

bool take_turns(const std::vector<Stage>& stages) {
  std::vector<int64_t> places;
  for (const Stage& stage : stages)
    if (is_spread(stage)) places.push_back(std::get<CollectiveStage>(stage.body).place);
  std::sort(places.begin(), places.end());
  return std::adjacent_find(places.begin(), places.end()) != places.end();
}

}  // namespace

std::vector<Stage> fuse_all_reduce(Graph& graph, std::vector<Stage> stages, const Target& target) {
  if (!target.packets_of_rows || take_turns(stages)) return stages;
  std::vector<PushedSum> sums = candidates(graph, stages);
  while (!sums.empty()) {
    std::vector<Stage> pushed = pushing(graph, stages, sums);
    const std::vector<char> plain = plain_buffers(graph, pushed, target);
    if (std::erase_if(sums, [&](const PushedSum& one) { return plain[one.out.buffer] != 0; }) == 0) return pushed;
  }
  return stages;
}

}  // namespace ark::compiler

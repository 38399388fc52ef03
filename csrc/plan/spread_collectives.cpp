// See spread_collectives.hpp.
#include "plan/spread_collectives.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "error.hpp"
#include "plan/fuse_views.hpp"
#include "protocol/packet.hpp"

namespace ark::plan {

namespace {

constexpr int kMostExchangeRanks = 8;                     // cuda/loop/launch.cuh
constexpr int64_t kLeastTileBytes = 1024;                 // of packets in whole rows
constexpr int64_t kMostExchangeBytes = int64_t{1} << 28;  // of a region's packets that come to a rank

[[noreturn]] void refuse_exchange(const Node& node, const std::string& why) {
  ErrorContext context;
  context.remedy = "Leave this operator to another backend.";
  throw Error(ErrorKind::invalid_argument,
              "the CUDA target cannot run stage " + node.op + " (" + node.origin + "): " + why, context);
}

void check_exchange(const Graph& graph, const Node& node, const CollectiveStage& body) {
  if (body.ranks > kMostExchangeRanks)
    refuse_exchange(node, "a group of " + std::to_string(body.ranks) + " ranks; loop kernels exchange packets among " +
                              std::to_string(kMostExchangeRanks));
  const Value &in = graph.values()[body.input], &out = graph.values()[body.output];
  const bool from_parts = node.op == "reduce_scatter", to_parts = node.op == "all_gather";
  if (in.elements() * (to_parts ? body.ranks : 1) != out.elements() * (from_parts ? body.ranks : 1) ||
      (node.op == "all_to_all" && in.elements() % body.ranks != 0))
    refuse_exchange(node, "parts of different sizes");
  for (const char* const splits : {"input_splits", "output_splits"}) {
    const std::vector<int64_t> sizes =
        node.attributes.count(splits) != 0 ? node.integers(splits) : std::vector<int64_t>{};
    if (std::adjacent_find(sizes.begin(), sizes.end(), std::not_equal_to<>()) != sizes.end())
      refuse_exchange(node, "parts of different sizes");
  }
  if (node.op != "all_reduce" && node.op != "reduce_scatter") return;
  const std::string op = node.text("reduce_op");
  static const std::set<std::string> known = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  if (known.count(op) == 0) refuse_exchange(node, "there is no reduce_op '" + op + "'");
  const bool bitwise = op == "band" || op == "bor" || op == "bxor";
  if ((bitwise && is_floating(in.type)) || (op == "avg" && !is_floating(in.type)))
    refuse_exchange(node, op + " of " + name_of(in.type));
}

// As `parts` rows of `part` elements; one row is flat.
int in_parts(Graph& graph, int index, int64_t parts, int64_t part) {
  Value value = graph.values()[index];
  value.shape = parts == 1 ? Shape{part} : Shape{parts, part};
  value.strides = parts == 1 ? Shape{1} : Shape{part, 1};
  return view_value(graph, value);
}

}  // namespace

std::vector<Stage> spread_collectives(Graph& graph, std::vector<Stage> stages) {
  int64_t slots = 0;
  for (Stage& stage : stages) {
    auto* const body = std::get_if<CollectiveStage>(&stage.body);
    if (body == nullptr) continue;
    const Node node = graph.nodes()[static_cast<size_t>(stage.node)];
    body->ranks = static_cast<int>(node.integer("ranks"));
    if (body->ranks == 0) continue;
    check_exchange(graph, node, *body);
    const int64_t from = node.op == "reduce_scatter" || node.op == "all_to_all" ? body->ranks : 1;
    const int64_t to = node.op == "all_gather" || node.op == "all_to_all" ? body->ranks : 1;
    const int64_t part = graph.values()[body->input].elements() / from;
    const int64_t size = size_of(graph.values()[body->input].type);
    body->input = in_parts(graph, body->input, from, part);
    body->output = in_parts(graph, body->output, to, part);
    body->slots = slots;
    slots += 2 * body->ranks * static_cast<int64_t>(protocol::packet_bytes(static_cast<uint64_t>(part * size)));
    stage.extent = part;
    stage.grain = std::max<int64_t>(1, kLeastTileBytes / size);
    stage.accesses = {{body->input, from > 1 ? 1 : 0, false}, {body->output, to > 1 ? 1 : 0, true}};
    if (slots > kMostExchangeBytes)
      refuse_exchange(node, "with the collectives before it, it takes " + std::to_string(slots >> 20) +
                                " MB for packets; a region can have " + std::to_string(kMostExchangeBytes >> 20));
  }
  exchanges_of(graph, stages);  // of one group
  return stages;
}

Exchanges exchanges_of(const Graph& graph, const std::vector<Stage>& stages) {
  Exchanges all;
  const auto note = [&](uint64_t word) {
    all.fingerprint = (all.fingerprint ^ word) * 0x9e3779b97f4a7c15u;
    all.fingerprint ^= all.fingerprint >> 29;
  };
  for (const Stage& stage : stages) {
    if (!is_spread(stage)) continue;
    const auto& body = std::get<CollectiveStage>(stage.body);
    const Node& node = graph.nodes()[static_cast<size_t>(stage.node)];
    const int64_t group = node.integer("group");
    if (all.ranks != 0 && group != all.group) refuse_exchange(node, "the region has collectives of another group too");
    all.group = group;
    all.ranks = body.ranks;
    const Value& input = graph.values()[body.input];
    for (const char letter : node.op + "/" + (node.attributes.count("reduce_op") != 0 ? node.text("reduce_op") : ""))
      note(static_cast<uint64_t>(letter));
    for (const int64_t word : {static_cast<int64_t>(input.type), stage.extent, body.slots, int64_t{body.ranks}})
      note(static_cast<uint64_t>(word));
    all.bytes = body.slots + 2 * body.ranks *
                                 static_cast<int64_t>(
                                     protocol::packet_bytes(static_cast<uint64_t>(stage.extent * size_of(input.type))));
  }
  return all;
}

}  // namespace ark::plan

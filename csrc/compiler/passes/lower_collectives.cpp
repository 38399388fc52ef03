// Cuts collectives into elements of a rank's part and assigns each a place for its packets. See lower_collectives.hpp.
#include "compiler/passes/lower_collectives.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"
#include "cuda/loop/between.cuh"
#include "protocol/packet.hpp"
#include "util/error.hpp"
#include "util/format.hpp"

namespace ark::compiler {

namespace {

constexpr int kMostExchangeRanks = loop::kMostRanks;
constexpr int64_t kUnitBytes = 16;  // moved by one thread (cuda/loop/exchange.cuh); no element is larger
// Limits of a rank's packet memory. Beyond the first, collectives take turns in shared places.
constexpr int64_t kEnoughBytes = int64_t{64} << 20, kMostBytes = int64_t{512} << 20;
constexpr int64_t kMostBetween = 8;  // collectives in flight at once when they take turns
// Between nodes: bytes of a part in a message, and the most of them that are in flight. A larger tensor gains more by
// the parts that a collective of its own divides it in than it loses by a launch.
constexpr int64_t kChunkBytes = loop::kChunkBytes, kMostLanes = 64;
constexpr int64_t kMostOverNodes = kMostLanes / 2 * kChunkBytes;  // so that two collectives have lanes

[[noreturn]] void refuse_exchange(const Node& node, const std::string& why) {
  ErrorContext context;
  context.remedy = "Leave this operator to another backend.";
  throw Error(ErrorKind::invalid_argument,
              formatted("the CUDA target cannot run stage {} ({}): {}", node.op, node.origin, why), context);
}

int64_t chunks_of(int64_t bytes) {
  return (bytes + kChunkBytes - 1) / kChunkBytes;
}

void check_exchange(const Graph& graph, const Node& node, const CollectiveStage& body) {
  if (body.ranks > kMostExchangeRanks)
    refuse_exchange(
        node, formatted("a group of {} ranks; loop kernels exchange packets among {}", body.ranks, kMostExchangeRanks));
  const Value &in = graph.values()[body.input], &out = graph.values()[body.output];
  if (body.nodes > 1) {
    const std::string reduce_op = node.attributes.count("reduce_op") != 0 ? node.text("reduce_op") : "";
    const std::string why =
        why_not_over_nodes(node.op, reduce_op, in.type, in.elements() * size_of(in.type), body.nodes, body.ranks);
    if (!why.empty()) refuse_exchange(node, "of loop kernels' tasks, " + why);
  }
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
  if (known.count(op) == 0) refuse_exchange(node, formatted("there is no reduce_op '{}'", op));
  const bool bitwise = op == "band" || op == "bor" || op == "bxor";
  if ((bitwise && is_floating(in.type)) || (op == "avg" && !is_floating(in.type)))
    refuse_exchange(node, formatted("{} of {}", op, name_of(in.type)));
}

// Views the value as `parts` rows of `part` elements; one row is flat.
int in_parts(Graph& graph, int index, int64_t parts, int64_t part) {
  Value value = graph.values()[index];
  value.shape = parts == 1 ? Shape{part} : Shape{parts, part};
  value.strides = parts == 1 ? Shape{1} : Shape{part, 1};
  return view_value(graph, value);
}

// The number of places for packets, `bytes` each, with so many lanes: one per collective if memory and lanes allow.
// With fewer, each collective waits for the one that is half as many places before it.
int64_t places_for(int64_t count, int64_t bytes, int64_t lanes) {
  const int64_t most = lanes == 0 ? count : kMostLanes / lanes;
  if (2 * count * bytes <= kEnoughBytes && count <= most) return count;
  const int64_t pairs = std::min(kEnoughBytes / (4 * bytes), most / 2);
  return std::min(count, 2 * std::clamp<int64_t>(pairs, 1, kMostBetween));
}

}  // namespace

std::string why_not_over_nodes(const std::string& op, const std::string& reduce_op, ScalarType type, int64_t bytes,
                               int nodes, int places) {
  if (op != "all_reduce") return formatted("over several nodes they have all_reduce, not {}", op);
  if (reduce_op != "sum" && reduce_op != "avg") return formatted("over several nodes they add, not {}", reduce_op);
  if (!is_floating(type)) return formatted("over several nodes they add floating-point numbers, not {}", name_of(type));
  if (bytes > kMostOverNodes)
    return formatted("over several nodes they add up to {} KB, not {}", kMostOverNodes >> 10, (bytes + 1023) >> 10);
  if (nodes > loop::kMostNodes || places > loop::kMostRanks)
    return formatted("they reach {} nodes of {} ranks, not {} of {}", loop::kMostNodes, loop::kMostRanks, nodes,
                     places);
  return "";
}

std::vector<Stage> lower_collectives(Graph& graph, std::vector<Stage> stages, const Target&) {
  std::vector<Stage*> spread;
  int64_t bytes = 0, lanes = 0;  // per place
  for (Stage& stage : stages) {
    auto* const body = std::get_if<CollectiveStage>(&stage.body);
    if (body == nullptr) continue;
    const Node node = graph.nodes()[static_cast<size_t>(stage.node)];
    body->ranks = static_cast<int>(node.integer("ranks"));
    if (body->ranks == 0) continue;
    if (node.attributes.count("nodes") != 0) body->nodes = std::max(1, static_cast<int>(node.integer("nodes")));
    body->ranks /= body->nodes;
    check_exchange(graph, node, *body);
    const int64_t from = node.op == "reduce_scatter" || node.op == "all_to_all" ? body->ranks : 1;
    const int64_t to = node.op == "all_gather" || node.op == "all_to_all" ? body->ranks : 1;
    const int64_t part = graph.values()[body->input].elements() / from;
    const int64_t size = size_of(graph.values()[body->input].type);
    body->input = in_parts(graph, body->input, from, part);
    body->output = in_parts(graph, body->output, to, part);
    stage.extent = part;
    stage.grain = kUnitBytes / size;
    if (body->nodes > 1) {
      body->chunk = kChunkBytes;
      stage.grain = kChunkBytes / size;
      lanes = std::max(lanes, chunks_of(part * size));
    }
    stage.accesses = {{body->input, from > 1 ? 1 : 0, false}, {body->output, to > 1 ? 1 : 0, true}};
    spread.push_back(&stage);
    const auto packets = static_cast<int64_t>(protocol::packet_bytes(static_cast<uint64_t>(part * size)));
    bytes = std::max(bytes, body->ranks * packets);
    if (4 * bytes > kMostBytes)
      refuse_exchange(node,
                      formatted("it takes {} MB for packets; a region can have {}", 4 * bytes >> 20, kMostBytes >> 20));
  }
  const auto count = static_cast<int64_t>(spread.size());
  const int64_t places = count > 0 ? places_for(count, bytes, lanes) : 0;
  for (int64_t i = 0; i < count; ++i) {
    auto& body = std::get<CollectiveStage>(spread[static_cast<size_t>(i)]->body);
    body.number = static_cast<int>(i) + 1;
    body.place = i % places * bytes;
    body.half = places * bytes;
    body.lane = static_cast<int>(i % places * lanes);
    // Reading the output of the collective that many before makes this one wait for that one's tiles, or for whoever
    // overwrote them since.
    if (places < count && i >= places / 2) {
      const auto& before = std::get<CollectiveStage>(spread[static_cast<size_t>(i - places / 2)]->body);
      spread[static_cast<size_t>(i)]->accesses.push_back({before.output, -1, false});
    }
  }
  exchanges_of(graph, stages);  // throws unless all are of one group
  return stages;
}

Exchanges exchanges_of(const Graph& graph, const std::vector<Stage>& stages) {
  Exchanges all;
  const auto note = [&](uint64_t word) {
    all.fingerprint = (all.fingerprint ^ word) * 0x9e3779b97f4a7c15u;
    all.fingerprint ^= all.fingerprint >> 29;
  };
  std::map<int, std::pair<Push, int>> exchanges;  // by number: the exchange, and a value it moves, which has the type
  std::map<int, const CollectiveStage*> over_nodes;
  for (const Stage& stage : stages) {
    if (const auto* one = std::get_if<CollectiveStage>(&stage.body); one != nullptr && one->ranks > 0) {
      exchanges[one->number] = {{stage.node, one->ranks, one->number, one->place, one->half, 0, stage.extent},
                                one->input};
      if (one->nodes > 1) over_nodes[one->number] = one;
    }
    for (const MatmulStage& one : matmuls_of(stage))
      if (one.push.ranks > 0) exchanges[one.push.number] = {one.push, one.out};
  }
  for (const auto& [number, exchange] : exchanges) {
    const auto& [body, value] = exchange;
    const Node& node = graph.nodes()[static_cast<size_t>(body.node)];
    const int64_t group = node.integer("group");
    if (all.ranks != 0 && group != all.group) refuse_exchange(node, "the region has collectives of another group too");
    all.group = group;
    all.ranks = body.ranks;
    all.bytes = 2 * body.half;
    const auto type = static_cast<int64_t>(graph.values()[value].type);
    for (const char letter : node.op + "/" + (node.attributes.count("reduce_op") != 0 ? node.text("reduce_op") : ""))
      note(static_cast<uint64_t>(letter));
    for (const int64_t word :
         {type, body.elements, int64_t{number}, body.place, body.half, int64_t{body.ranks}, body.apart})
      note(static_cast<uint64_t>(word));
    const auto found = over_nodes.find(number);
    if (found == over_nodes.end()) continue;
    const CollectiveStage& over = *found->second;
    const int64_t size = size_of(graph.values()[value].type);
    all.nodes = over.nodes;
    all.lanes = std::max(all.lanes, over.lane + static_cast<int>(chunks_of(body.elements * size)));
    all.message_bytes =
        std::max(all.message_bytes, static_cast<int64_t>(loop::wire_bytes(static_cast<uint64_t>(over.chunk), over.ranks,
                                                                          static_cast<uint64_t>(size))));
    for (const int64_t word : {int64_t{over.nodes}, int64_t{over.lane}, over.chunk}) note(static_cast<uint64_t>(word));
  }
  all.ranks *= all.nodes;
  return all;
}

}  // namespace ark::compiler

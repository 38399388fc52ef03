// Walks each buffer's accesses in program order. A read depends on every earlier write that it may overlap, a write on
// every earlier access that it may overlap.
#include "compiler/fuse/fuse_dependencies.hpp"

#include <algorithm>

#include "compiler/graph/box.hpp"
#include "compiler/graph/graph_check.hpp"

namespace ark::compiler {

bool is_row_node(const Node& node) {
  return find_pointwise(node.op) != nullptr || is_reduction(node.op) || node.op == "iota";
}

namespace {

struct BufferAccess {
  int node;
  bool write;
  Box bytes;
};

// An iota into a temporary, or a fill of one with a literal.
bool may_be_inlined(const Graph& graph, const Node& node) {
  if (graph.buffer_of(node.outputs[0]).kind != Buffer::Kind::temporary) return false;
  if (node.op == "iota") return true;
  return (node.op == "copy" || node.op == "cast") && graph.values()[node.inputs[0]].is_literal();
}

}  // namespace

Dependencies find_dependencies(const Graph& graph) {
  const auto& nodes = graph.nodes();
  Dependencies result;
  result.before.resize(nodes.size());
  result.readers.resize(nodes.size());
  result.inlined.resize(nodes.size(), false);
  result.inlined_writer.resize(graph.buffers().size(), -1);

  std::vector<int> writers(graph.buffers().size(), 0);
  for (const Node& node : nodes) {
    for (int output : node.outputs) ++writers[graph.values()[output].buffer];
  }
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (nodes[n].outputs.size() != 1 || !is_row_node(nodes[n])) continue;
    const int buffer = graph.values()[nodes[n].outputs[0]].buffer;
    if (writers[buffer] != 1 || !may_be_inlined(graph, nodes[n])) continue;
    result.inlined[n] = true;
    result.inlined_writer[buffer] = static_cast<int>(n);
  }

  std::vector<std::vector<BufferAccess>> accesses(graph.buffers().size());
  const auto depend = [&](int node, int on, bool value) {
    if (node == on) return;
    auto& edges = result.before[node];
    const auto found = std::find_if(edges.begin(), edges.end(), [&](const auto& edge) { return edge.node == on; });
    if (found == edges.end()) {
      edges.push_back({on, value});
    } else {
      found->value = found->value || value;
    }
    if (value) {
      auto& readers = result.readers[on];
      if (readers.empty() || readers.back() != node) readers.push_back(node);
    }
  };
  const auto touch = [&](int node, int value, bool write) {
    const Value& touched = graph.values()[value];
    if (touched.is_literal()) return;
    if (writers[touched.buffer] == 0) return;  // only read
    const Box bytes = box_of(touched);
    for (const BufferAccess& earlier : accesses[touched.buffer]) {
      if (!write && !earlier.write) continue;
      if (!write && result.inlined[earlier.node] && is_row_node(nodes[node])) continue;
      if (overlap(bytes, earlier.bytes)) depend(node, earlier.node, !write && earlier.write);
    }
    accesses[touched.buffer].push_back({node, write, bytes});
  };
  int collective = -1;  // the last one: all ranks must issue collectives in the graph's order
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (is_collective(nodes[n].op)) {
      if (collective >= 0) depend(static_cast<int>(n), collective, false);
      collective = static_cast<int>(n);
    }
    for (int input : nodes[n].inputs) touch(static_cast<int>(n), input, false);
    for (int output : nodes[n].outputs) touch(static_cast<int>(n), output, true);
  }
  result.live.resize(nodes.size(), false);
  for (size_t n = nodes.size(); n-- > 0;) {
    auto& readers = result.readers[n];
    readers.erase(std::remove_if(readers.begin(), readers.end(), [&](int reader) { return !result.live[reader]; }),
                  readers.end());
    const bool acts = is_collective(nodes[n].op) || nodes[n].op == "check" || nodes[n].op == "stop";
    result.live[n] = !readers.empty() || acts;
    for (int output : nodes[n].outputs) {
      if (graph.buffer_of(output).kind != Buffer::Kind::temporary) result.live[n] = true;
    }
  }
  return result;
}

}  // namespace ark::compiler

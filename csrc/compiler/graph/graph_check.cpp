// Shape rules that several operators share (broadcasting, reduced dimensions), and the format of a graph's error
// messages.
#include "compiler/graph/graph_check.hpp"

#include <algorithm>
#include <set>

#include "util/error.hpp"
#include "util/format.hpp"

namespace ark::compiler {

void fail_node(const Node& node, const std::string& what) {
  throw Error(ErrorKind::invalid_argument,
              formatted("plan: {}{}: {}", node.op, node.origin.empty() ? "" : " of " + node.origin, what));
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

bool broadcasts_to(const Shape& from, const Shape& to) {
  if (from.size() > to.size()) return false;
  for (size_t i = 0; i < from.size(); ++i) {
    const int64_t size = from[from.size() - 1 - i];
    if (size != 1 && size != to[to.size() - 1 - i]) return false;
  }
  return true;
}

Shape broadcast(const Node& node, const Shape& a, const Shape& b) {
  Shape result = a.size() >= b.size() ? a : b;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const int64_t x = a[a.size() - 1 - i], y = b[b.size() - 1 - i];
    if (x != y && x != 1 && y != 1)
      fail_node(node, formatted("{} and {} do not broadcast", to_string(a), to_string(b)));
    result[result.size() - 1 - i] = x == 1 ? y : x;
  }
  return result;
}

bool is_reduction(const std::string& op) {
  return op == "sum" || op == "mean" || op == "amax" || op == "amin" || op == "argmax" || op == "any";
}

bool is_collective(const std::string& op) {
  return op == "all_reduce" || op == "all_gather" || op == "reduce_scatter" || op == "all_to_all";
}

std::vector<int> reduced_dims(const Node& node, int rank) {
  std::set<int> dims;
  for (int64_t dim : node.integers("dims")) {
    const int64_t wrapped = dim < 0 ? dim + rank : dim;
    if (wrapped < 0 || wrapped >= rank) {
      fail_node(node, formatted("dimension {} of {}", dim, rank));
    }
    if (!dims.insert(static_cast<int>(wrapped)).second) {
      fail_node(node, formatted("dimension {} is named twice", dim));
    }
  }
  if (dims.empty()) {
    for (int i = 0; i < rank; ++i) dims.insert(i);
  }
  return {dims.begin(), dims.end()};
}

}  // namespace ark::compiler

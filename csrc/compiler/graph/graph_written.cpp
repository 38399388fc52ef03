// Checks that nothing is read before it is written, by tracking in program order the intervals of each buffer that
// nodes have written so far.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "compiler/graph/footprint.hpp"
#include "compiler/graph/graph_check.hpp"

namespace ark::compiler {

namespace {

constexpr int64_t kMostPieces = 1 << 16;  // of a value that is tracked run by run

// Bytes written so far, as disjoint intervals.
class WrittenBytes {
 public:
  void add(int64_t begin, int64_t end) {
    auto next = intervals_.upper_bound(begin);
    if (next != intervals_.begin() && std::prev(next)->second >= begin) begin = (--next)->first;
    while (next != intervals_.end() && next->first <= end) {
      end = std::max(end, next->second);
      next = intervals_.erase(next);
    }
    intervals_[begin] = end;
  }
  bool covers(int64_t begin, int64_t end) const {
    auto next = intervals_.upper_bound(begin);
    return next != intervals_.begin() && std::prev(next)->second >= end;
  }

 private:
  std::map<int64_t, int64_t> intervals_;
};

}  // namespace

void check_written_before_read(const Graph& graph) {
  std::vector<WrittenBytes> written(graph.buffers().size());
  for (const Node& node : graph.nodes()) {
    for (int input : node.inputs) {
      const Value& value = graph.values()[input];
      if (value.is_literal() || graph.buffers()[value.buffer].kind == Buffer::Kind::input) continue;
      const Footprint bytes = footprint(value);
      bool covered = true;
      if (bytes.pieces() <= kMostPieces) {
        for (const auto& [begin, end] : runs(bytes)) covered = covered && written[value.buffer].covers(begin, end);
      } else {  // check only the ends: tracking many scattered runs costs more than it is worth
        covered = written[value.buffer].covers(bytes.first, bytes.first + bytes.run) &&
                  written[value.buffer].covers(bytes.end() - bytes.run, bytes.end());
      }
      if (!covered) {
        fail_node(node, "reads value " + std::to_string(input) + " of shape " + to_string(value.shape) + " on buffer " +
                            std::to_string(value.buffer) + " before all of it is written");
      }
    }
    for (int output : node.outputs) {
      const Value& value = graph.values()[output];
      const Footprint bytes = footprint(value);
      if (bytes.pieces() <= kMostPieces) {
        for (const auto& [begin, end] : runs(bytes)) written[value.buffer].add(begin, end);
      } else {
        written[value.buffer].add(bytes.first, bytes.end());
      }
    }
  }
}

}  // namespace ark::compiler

// Checks that nothing is read before it is written, by tracking in program order the intervals of each buffer that
// nodes have written so far.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/graph/graph_check.hpp"
#include "util/format.hpp"

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

// Calls visit(begin, end) for each run of the box.
template <class Visit>
void each_run(const Box& box, const Visit& visit) {
  each_piece(box, [&](int64_t offset, int64_t rows, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row) visit(offset + row * stride, offset + row * stride + box.width);
  });
}

// Tracking many scattered runs costs more than it is worth, and a box that is not exact has bytes that the value lacks.
bool is_followed(const Box& box) {
  return box.exact && box.bytes() / box.width <= kMostPieces;
}

}  // namespace

void check_written_before_read(const Graph& graph) {
  std::vector<WrittenBytes> written(graph.buffers().size());
  for (const Node& node : graph.nodes()) {
    for (int input : node.inputs) {
      const Value& value = graph.values()[input];
      if (value.is_literal() || graph.buffers()[value.buffer].kind == Buffer::Kind::input) continue;
      const WrittenBytes& so_far = written[value.buffer];
      const Box box = box_of(value);
      const int64_t run = box.exact ? box.width : size_of(value.type);
      bool covered = true;
      if (is_followed(box)) {
        each_run(box, [&](int64_t begin, int64_t end) { covered = covered && so_far.covers(begin, end); });
      } else {  // check only the ends
        covered = so_far.covers(box.offset, box.offset + run) && so_far.covers(box.end() - run, box.end());
      }
      if (!covered) {
        fail_node(node, formatted("reads value {} of shape {} on buffer {} before all of it is written", input,
                                  to_string(value.shape), value.buffer));
      }
    }
    for (int output : node.outputs) {
      const Value& value = graph.values()[output];
      const Box box = box_of(value);
      if (is_followed(box)) {
        each_run(box, [&](int64_t begin, int64_t end) { written[value.buffer].add(begin, end); });
      } else {
        written[value.buffer].add(box.offset, box.end());
      }
    }
  }
}

}  // namespace ark::compiler

// Starts at the largest loop nest and follows the values that members pass to each other. A dimension that no such
// value determines is matched to a free one of the same length, preferably one where shared operands have equal
// strides.
#include "compiler/fuse/fuse_space.hpp"

#include <algorithm>

#include "compiler/graph/box.hpp"
#include "compiler/graph/graph_check.hpp"

namespace ark::compiler {

namespace {

class SpaceFinder {
 public:
  SpaceFinder(const Graph& graph, RowSpace& space) : graph_(graph), space_(space) {}

  bool find() {
    auto& members = space_.members;
    link();
    int64_t most = 0;
    for (size_t i = 0; i < members.size(); ++i) {
      int64_t elements = 1;
      for (int64_t size : members[i].shape) elements *= size;
      if (elements > most) {
        most = elements;
        space_.start = static_cast<int>(i);
      }
    }
    mapped_.assign(members.size(), false);
    if (!map(space_.start)) return false;
    for (size_t left = members.size() - 1; left > 0; --left) {
      const int next = next_linked();
      if (next < 0 || !map(next)) return false;
    }
    return true;
  }

 private:
  const Value& out_of(size_t member) const {
    return graph_.values()[graph_.nodes()[space_.members[member].node].outputs[0]];
  }

  // Finds which earlier member's result each operand is: the last one written before it that it overlaps. If several
  // members wrote parts of the operand, the dimension that separates the parts is cut in every loop nest of that
  // length. Finishing the stage merges the cut dimensions again where possible.
  void link() {
    auto& members = space_.members;
    std::vector<Box> written;
    for (size_t i = 0; i < members.size(); ++i) {
      const Node& node = graph_.nodes()[members[i].node];
      for (size_t k = 0; k < node.inputs.size(); ++k) {
        const Value& value = graph_.values()[node.inputs[k]];
        if (members[i].writer[k] != RowNode::kLoad) continue;
        const Box bytes = box_of(value);
        std::vector<int> writers;
        for (size_t w = i; w-- > 0;) {
          if (out_of(w).buffer != value.buffer || !overlap(bytes, written[w])) continue;
          writers.insert(writers.begin(), static_cast<int>(w));
        }
        if (writers.empty()) continue;
        if (writers.size() > 1 && find_parts(value, k, writers, members[i])) continue;
        members[i].writer[k] = writers.back();
        links_.push_back({writers.back(), static_cast<int>(i), k, -1});
      }
      written.push_back(box_of(out_of(i)));
    }
    for (size_t i = 0; i < members.size(); ++i) {
      for (const auto& parts : members[i].parts) {
        for (int writer : parts.writers) {
          links_.push_back({writer, static_cast<int>(i), parts.operand, static_cast<int>(parts.dim)});
        }
      }
    }
  }

  // Whether the writers' results are equal parts of `value` along one dimension, each written once.
  bool find_parts(const Value& value, size_t operand, std::vector<int> writers, RowNode& reader) {
    const auto count = static_cast<int64_t>(writers.size());
    std::sort(writers.begin(), writers.end(), [&](int a, int b) { return out_of(a).offset < out_of(b).offset; });
    for (size_t d = 0; d < value.shape.size(); ++d) {
      if (value.shape[d] % count != 0) continue;
      const int64_t length = value.shape[d] / count;
      Value part = value;
      part.shape[d] = length;
      bool all = true;
      for (int writer : writers) {
        const Value& out = out_of(writer);
        const RowNode& nest = space_.members[writer];
        all = all && out.offset == part.offset && out.type == part.type && out.shape == part.shape &&
              out.strides == part.strides && !is_reduction(graph_.nodes()[nest.node].op);
        part.offset += length * value.strides[d];
      }
      if (!all) continue;
      const size_t rank = static_cast<size_t>(reader.source.back()) + 1;
      const auto own = static_cast<int>(rank - value.shape.size() + d);
      if (std::count(reader.source.begin(), reader.source.end(), own) == 1) cut_all(value.shape[d], count);
      const auto dim =
          static_cast<size_t>(std::find(reader.source.begin(), reader.source.end(), own) - reader.source.begin());
      if (reader.shape[dim] != count || dim + 1 >= reader.source.size() || reader.source[dim + 1] != own) return false;
      reader.parts.push_back({operand, writers, dim});
      reader.writer[operand] = RowNode::kParts;
      return true;
    }
    return false;
  }

  void cut_all(int64_t length, int64_t count) {
    for (RowNode& member : space_.members) {
      for (size_t d = member.shape.size(); d-- > 0;) {
        if (member.shape[d] != length) continue;
        cut(member, d, count);
        for (auto& parts : member.parts) parts.dim += parts.dim > d ? 1 : 0;
      }
    }
  }

  int next_linked() const {
    for (const Link& link : links_) {
      if (mapped_[link.from] && !mapped_[link.to]) return link.to;
      if (mapped_[link.to] && !mapped_[link.from]) return link.from;
    }
    return -1;
  }

  // Maps the dimensions of `member` that `strides` distinguishes to those of an already mapped node.
  static bool constrain(RowNode& member, const Shape& strides, const RowNode& other, const Shape& other_strides) {
    for (size_t d = 0; d < strides.size(); ++d) {
      if (member.shape[d] == 1 || strides[d] == 0) continue;
      int found = -1;
      for (size_t f = 0; f < other_strides.size() && found < 0; ++f) {
        if (other.shape[f] == member.shape[d] && other_strides[f] == strides[d]) found = other.map[f];
      }
      if (found < 0 || (member.map[d] >= 0 && member.map[d] != found)) return false;
      member.map[d] = found;
    }
    return true;
  }

  bool map(int index) {
    RowNode& member = space_.members[index];
    for (const Link& link : links_) {
      Shape read = space_.members[link.to].strides[link.operand];
      if (link.part >= 0) read[link.part] = 0;
      const Shape& out = space_.members[link.from].out;
      if (link.to == index && mapped_[link.from] && !constrain(member, read, space_.members[link.from], out)) {
        return false;
      }
      if (link.from == index && mapped_[link.to] && !constrain(member, out, space_.members[link.to], read)) {
        return false;
      }
    }
    std::vector<bool> taken(space_.sizes.size(), false);
    for (int dim : member.map) {
      if (dim < 0) continue;
      if (taken[dim]) return false;
      taken[dim] = true;
    }
    int previous = -1;
    for (size_t d = 0; d < member.shape.size(); ++d) {
      if (member.shape[d] > 1 && member.map[d] < 0) {
        const int best = best_dimension(member, d, taken, previous);
        if (best >= 0) {
          taken[best] = true;
          member.map[d] = best;
        } else {
          member.map[d] = static_cast<int>(space_.sizes.size());
          space_.sizes.push_back(member.shape[d]);
          taken.push_back(true);
        }
      }
      if (member.map[d] >= 0) previous = member.map[d];
    }
    mapped_[index] = true;
    return true;
  }

  int best_dimension(const RowNode& member, size_t d, const std::vector<bool>& taken, int previous) const {
    int best = -1, best_score = -1;
    for (size_t e = 0; e < taken.size(); ++e) {
      if (taken[e] || space_.sizes[e] != member.shape[d]) continue;
      const int score = 2 * shared_operands(member, d, static_cast<int>(e)) + (static_cast<int>(e) > previous ? 1 : 0);
      if (score > best_score) {
        best_score = score;
        best = static_cast<int>(e);
      }
    }
    return best;
  }

  int shared_operands(const RowNode& member, size_t d, int e) const {
    int shared = 0;
    for (size_t i = 0; i < space_.members.size(); ++i) {
      const RowNode& other = space_.members[i];
      if (!mapped_[i]) continue;
      const auto f = static_cast<size_t>(std::find(other.map.begin(), other.map.end(), e) - other.map.begin());
      if (f == other.map.size()) continue;
      for (size_t k = 0; k < member.strides.size(); ++k) {
        if (member.writer[k] != RowNode::kLoad || member.strides[k][d] == 0) continue;
        for (size_t l = 0; l < other.strides.size(); ++l) {
          if (other.writer[l] == RowNode::kLoad && buffer(other, l) == buffer(member, k) &&
              other.strides[l][f] == member.strides[k][d]) {
            ++shared;
          }
        }
      }
    }
    return shared;
  }

  int buffer(const RowNode& member, size_t operand) const {
    return graph_.values()[graph_.nodes()[member.node].inputs[operand]].buffer;
  }

  struct Link {
    int from, to;
    size_t operand;
    int part;  // the reader's dimension that counts parts, or -1
  };
  const Graph& graph_;
  RowSpace& space_;
  std::vector<Link> links_;
  std::vector<bool> mapped_;
};

}  // namespace

bool find_space(const Graph& graph, const Dependencies& dependencies, const std::vector<int>& nodes, RowSpace& space) {
  for (int node : nodes) space.members.push_back(loop_nest(graph, dependencies, node));
  return SpaceFinder(graph, space).find();
}

}  // namespace ark::compiler

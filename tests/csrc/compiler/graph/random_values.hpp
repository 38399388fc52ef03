// Values for random graphs: results made so far, views of them of all kinds (permuted, sliced, strided, expanded,
// unsqueezed), and inputs with their content.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "graph_builder.hpp"

namespace ark::compiler {

class RandomValues {
 public:
  Graph& graph() { return builder_.graph; }
  GraphBuilder& builder() { return builder_; }

  // Fills inputs with small numbers, whose sums are exact. Inputs named as indices stay within their tables.
  template <typename Memory>
  void fill(Memory& memory) {
    for (size_t b = 0; b < graph().buffers().size(); ++b) {
      if (graph().buffers()[b].kind != Buffer::Kind::input) continue;
      for (size_t byte = 0; byte < memory.cells[b].size(); ++byte) {
        memory.cells[b][byte] = static_cast<double>(static_cast<int>(random_() % 9)) - 4;
        memory.written[b][byte] = 1;
      }
      for (const Indices& one : indices_) {
        if (one.buffer != static_cast<int>(b)) continue;
        const int64_t least = one.wrap ? -one.limit : 0;
        for (double& cell : memory.cells[b])
          cell = static_cast<double>(least + static_cast<int64_t>(random_() % (one.limit - least)));
      }
      for (const Value& value : graph().values()) {
        if (value.buffer != static_cast<int>(b) || value.type != ScalarType::boolean) continue;
        for (double& cell : memory.cells[b]) cell = cell > 0 ? 1 : 0;
      }
    }
  }

 protected:
  explicit RandomValues(uint32_t seed) : random_(seed) {}

  int pick(int least, int most) {
    return least + static_cast<int>(random_() % static_cast<uint32_t>(most - least + 1));
  }
  bool chance(int percent) { return pick(1, 100) <= percent; }
  ScalarType pick_type() {
    const int x = pick(1, 10);
    return x <= 7 ? ScalarType::f32 : x == 8 ? ScalarType::bf16 : x == 9 ? ScalarType::i64 : ScalarType::boolean;
  }
  int64_t length() {
    static const int64_t lengths[] = {1, 2, 2, 3, 4, 5, 7, 17, 33, 70};
    return lengths[pick(0, 9)];
  }
  Shape shape() {
    Shape result;
    const int rank = pick(0, 4);
    for (int i = 0; i < rank; ++i) result.push_back(length());
    int64_t elements = 1;
    for (int64_t& size : result) {
      if (elements * size > 300) size = 1;
      elements *= size;
    }
    return result;
  }

  void add(int value) { values_.push_back(value); }
  const Value& at(int value) const { return builder_.at(value); }
  int any() {
    // Prefers recent values, which makes chains.
    if (chance(60))
      return values_[values_.size() - 1 - pick(0, std::min<int>(3, static_cast<int>(values_.size()) - 1))];
    return values_[pick(0, static_cast<int>(values_.size()) - 1)];
  }
  bool is_float(int value) const { return is_floating(at(value).type); }
  int floating() {
    for (int i = 0; i < 8; ++i) {
      const int value = any();
      if (is_float(value)) return value;
    }
    return builder_.pointwise("cast", {any()});
  }

  // Adds a random view.
  int view(int value) {
    const Shape from = at(value).shape;
    const auto rank = static_cast<int>(from.size());
    switch (pick(0, 4)) {
      case 0:
        if (rank < 2) return value;
        return builder_.transpose(value);
      case 1: return rank < 5 ? builder_.unsqueeze(value, pick(0, rank)) : value;
      case 2: {
        if (rank == 0) return value;
        const int dim = pick(0, rank - 1);
        const auto size = static_cast<int>(from[dim]);
        const int begin = pick(0, size - 1);
        return builder_.slice(value, dim, begin, pick(begin + 1, size), pick(1, 2));
      }
      case 3: {
        if (rank > 3 || at(value).elements() > 300) return value;
        Shape to = from;
        to.insert(to.begin(), pick(1, 3));
        return builder_.expand(value, to);
      }
      default: {
        if (rank < 3) return value;
        std::vector<int> order;
        for (int i = 0; i < rank; ++i) order.push_back((i + 1) % rank);
        return builder_.permute(value, order);
      }
    }
  }

  // Returns a value that broadcasts with `value`.
  int partner(int value) {
    const Shape to = at(value).shape;
    for (int i = 0; i < 6; ++i) {
      const int other = chance(25) ? view(any()) : any();
      if (broadcasts_to(at(other).shape, to)) return other;
    }
    if (chance(50) || to.empty()) return builder_.literal(pick(-3, 3), at(value).type);
    Shape part(to.begin() + pick(0, static_cast<int>(to.size()) - 1), to.end());
    for (int64_t& size : part) size = chance(30) ? 1 : size;
    return builder_.input(part, at(value).type);
  }

  int index_input(int64_t count, int64_t limit, bool wrap) {
    const int index = builder_.input({count}, ScalarType::i64);
    indices_.push_back({at(index).buffer, limit, wrap});
    return index;
  }

  GraphBuilder builder_;
  std::vector<int> values_;

 private:
  std::mt19937 random_;
  struct Indices {
    int buffer;
    int64_t limit;
    bool wrap;
  };
  std::vector<Indices> indices_;
};

}  // namespace ark::compiler

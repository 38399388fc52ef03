// Random graphs: pointwise operators, reductions, products, attention, gathers, writes in place and into slices, with
// odd shapes.
#pragma once

#include <string>
#include <vector>

#include "random_values.hpp"

namespace ark::compiler {

class RandomGraph : public RandomValues {
 public:
  explicit RandomGraph(uint32_t seed) : RandomValues(seed) {
    const int inputs = pick(1, 3);
    for (int i = 0; i < inputs; ++i) add(builder_.input(shape(), pick_type(), chance(30)));
    const int nodes = pick(2, 14);
    for (int i = 0; i < nodes; ++i) step();
    const int results = pick(1, 2);
    for (int i = 0; i < results; ++i) builder_.copy_out(any());
  }

 private:
  void step() {
    const int kind = pick(1, 100);
    if (kind <= 20) return unary();
    if (kind <= 50) return binary();
    if (kind <= 65) return reduction();
    if (kind <= 72) return add(view(any()));
    if (kind <= 77) return slices();
    if (kind <= 83) return in_place();
    if (kind <= 86) return positions();
    if (kind <= 91) return product();
    if (kind <= 94) return lookup();
    if (kind <= 97) return cache();
    attend();
  }

  void unary() {
    static const char* const floats[] = {"neg",  "abs",   "exp",  "tanh", "sigmoid",
                                         "relu", "floor", "sign", "cast", "copy"};
    const int value = any();
    if (!is_float(value)) return add(builder_.pointwise(chance(50) ? "cast" : "copy", {value}, pick_type()));
    const std::string op = floats[pick(0, 9)];
    add(builder_.pointwise(op, {value}, chance(20) ? ScalarType::bf16 : ScalarType::f32));
  }

  void binary() {
    const int a = any(), b = partner(a);
    const bool floats = is_float(a) || is_float(b);
    if (chance(20)) {  // a chain of small operators that a large one reads
      const Shape& shape = at(a).shape;
      if (!shape.empty() && is_float(a)) {
        const int small = builder_.pointwise("neg", {builder_.slice(a, static_cast<int>(shape.size()) - 1, 0, 1)});
        add(builder_.pointwise("mul", {small, a}));
        if (chance(50)) add(small);
        return;
      }
    }
    if (chance(15)) {
      const int condition = builder_.pointwise(chance(50) ? "lt" : "ne", {a, b});
      const int c = partner(condition);
      return add(builder_.pointwise("where", {condition, c, partner(condition)}));
    }
    static const char* const ops[] = {"add", "sub", "mul", "maximum", "minimum", "ge", "logical_and"};
    add(builder_.pointwise(ops[pick(0, 6)], {a, b}, floats ? ScalarType::f32 : ScalarType::i64));
  }

  void reduction() {
    const int value = any();
    const auto rank = static_cast<int>(at(value).shape.size());
    std::vector<int64_t> dims;
    for (int i = 0; i < rank; ++i) {
      if (chance(i + 1 == rank ? 70 : 30)) dims.push_back(i);
    }
    static const char* const ops[] = {"sum", "mean", "amax", "amin", "argmax", "any"};
    const std::string op = ops[pick(0, 5)];
    if (!is_float(value) && op == "mean") return;
    const int reduced = builder_.reduce(op, value, dims, chance(70));
    add(reduced);
    // As in norms and softmax.
    if (chance(60) && broadcasts_to(at(reduced).shape, at(value).shape)) {
      add(builder_.pointwise(chance(50) ? "sub" : "mul", {value, reduced}));
    }
  }

  // Writes two parts of one buffer, like cat.
  void slices() {
    const int value = any();
    const Shape from = at(value).shape;
    if (from.empty() || at(value).elements() > 300) return;
    const int dim = pick(0, static_cast<int>(from.size()) - 1);
    Shape to = from;
    to[dim] *= 2;
    const int whole = builder_.temporary(to, at(value).type);
    const int first = builder_.slice(whole, dim, 0, from[dim]), second = builder_.slice(whole, dim, from[dim], to[dim]);
    builder_.into(first, "copy", {value});
    builder_.into(second, is_float(value) ? "neg" : "copy", {value});
    add(whole);
    if (chance(30)) add(first);
    if (chance(60)) add(builder_.pointwise("mul", {whole, partner(whole)}));
  }

  void in_place() {
    for (int i = 0; i < 12; ++i) {
      const int value = i < 8 ? values_[pick(0, static_cast<int>(values_.size()) - 1)] : any();
      const Buffer& buffer = graph().buffer_of(value);
      if (buffer.kind == Buffer::Kind::input && !buffer.mutated) continue;
      if (at(value).type == ScalarType::boolean) continue;
      const int other = partner(value);
      const Node probe{"add", {value, other}, {value}, {}, ""};
      try {
        check_node(graph(), probe);
      } catch (const std::exception&) {
        continue;
      }
      // Readers before the change must see the old value, readers after it the new one.
      const int before = chance(50) ? builder_.pointwise("copy", {value}, at(value).type) : -1;
      builder_.into(value, "add", {value, other});
      if (before >= 0) add(before);
      if (before >= 0 && chance(50)) add(builder_.pointwise("sub", {before, value}, at(value).type));
      if (chance(30)) add(value);
      return;
    }
  }

  void positions() {
    const int64_t count = length();
    const int made = builder_.temporary({count}, ScalarType::i64);
    builder_.into(made, "iota", {}, {{"start", int64_t{pick(0, 3)}}, {"step", int64_t{pick(1, 3)}}});
    add(made);
    if (chance(30)) {
      const int filled = builder_.temporary({count, 2});
      add(builder_.into(filled, "copy", {builder_.literal(1.5)}));
    }
  }

  void product() {
    int a = floating();
    if (at(a).shape.size() < 2 || chance(30)) a = builder_.input({pick(1, 2), pick(1, 20), pick(1, 9)});
    if (at(a).shape.size() < 4 && chance(20)) {
      Shape more = at(a).shape;
      more.insert(more.begin(), 2);
      a = builder_.expand(a, more);
    }
    const Shape shape = at(a).shape;
    const int64_t n = length(), k = shape.back();
    const bool batched = chance(40) && shape.size() > 2;
    Shape of_b = batched ? Shape(shape.begin(), shape.end() - 2) : Shape{};
    of_b.insert(of_b.end(), {n, k});
    const int b = builder_.transpose(builder_.input(of_b));
    const int bias = chance(30) ? builder_.input({n}) : -1;
    add(builder_.matmul(a, b, bias));
  }

  void lookup() {
    const int table = any();
    const Shape from = at(table).shape;
    if (from.empty()) return;
    const int64_t dim = pick(0, static_cast<int>(from.size()) - 1), count = length();
    const bool wrap = pick(0, 1) == 1;
    std::vector<int> operands = {table, index_input(count, from[dim], wrap)};
    Shape to = from;
    to[dim] = count;
    if (dim + 1 < static_cast<int64_t>(from.size()) && chance(30)) {  // indexes pairs of elements
      operands.push_back(index_input(count, from[dim + 1], wrap));
      to.erase(to.begin() + dim + 1);
    }
    const int out = builder_.temporary(to, at(table).type);
    add(builder_.into(out, "gather", operands, {{"dim", dim}, {"wrap", wrap}}));
  }

  void cache() {
    const int source = any();
    const Shape from = at(source).shape;
    if (from.empty()) return;
    const int64_t dim = pick(0, static_cast<int>(from.size()) - 1);
    Shape whole = from;
    whole[dim] += 3;
    const int base = builder_.input(whole, at(source).type, true);
    const bool wrap = pick(0, 1) == 1;
    const int index = index_input(from[dim], whole[dim], wrap);
    builder_.into(base, "scatter", {base, index, source}, {{"dim", dim}, {"wrap", wrap}});
    add(base);
  }

  void attend() {
    const int64_t batch = pick(1, 2), heads = pick(1, 2), group = pick(1, 2), queries = pick(1, 3), keys = pick(1, 5);
    const int q = builder_.input({batch, heads * group, queries, 4});
    const int k = builder_.input({batch, heads, keys, 4}), v = builder_.input({batch, heads, keys, 3});
    const int out = builder_.temporary({batch, heads * group, queries, 3});
    std::vector<int> operands = {q, k, v};
    if (chance(50)) operands.push_back(builder_.input({queries, keys}));
    const bool causal = chance(30) && keys >= queries;
    add(builder_.into(out, "attention", operands, {{"scale", 0.5}, {"causal", causal}, {"nan_rows", group == 2}}));
  }
};

}  // namespace ark::compiler

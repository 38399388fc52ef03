// The reference semantics of graphs and stages, in double and without rounding: node by node in program order, and
// stage by stage, tile by tile. It tracks bytes that were never written, and checks every read and write of a tile
// against the accesses that its stage declares.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/graph_check.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// A number for every byte at which an element may start.
struct Memory {
  std::vector<std::vector<double>> cells;
  std::vector<std::vector<uint8_t>> written;
  // If set, called for every access: buffer, byte, whether it is a write.
  std::function<void(int, int64_t, bool)> watch;

  explicit Memory(const Graph& graph) {
    for (const Buffer& buffer : graph.buffers()) {
      cells.emplace_back(static_cast<size_t>(buffer.bytes), std::nan(""));
      written.emplace_back(static_cast<size_t>(buffer.bytes), 0);
    }
  }
  double read(int buffer, int64_t byte) const {
    if (watch) watch(buffer, byte, false);
    if (written.at(buffer).at(byte) == 0) {
      throw std::logic_error("buffer " + std::to_string(buffer) + " is read at byte " + std::to_string(byte) +
                             " before it is written");
    }
    return cells[buffer][byte];
  }
  void write(int buffer, int64_t byte, double value) {
    if (watch) watch(buffer, byte, true);
    cells.at(buffer).at(byte) = value;
    written[buffer][byte] = 1;
  }
};

inline double round_to(double value, ScalarType type) {
  if (is_floating(type)) return value;
  if (type == ScalarType::boolean) return value != 0 ? 1 : 0;
  if (type == ScalarType::i32) return static_cast<int32_t>(static_cast<int64_t>(value));
  return static_cast<double>(static_cast<int64_t>(value));
}

// With `integers`, computes in int64.
inline double apply(const std::string& op, const std::vector<double>& x, bool integers) {
  const auto truth = [](bool value) { return value ? 1.0 : 0.0; };
  const auto whole = [&](int i) { return static_cast<int64_t>(x[i]); };
  const auto floor_of = [&] { return std::floor(x[0] / x[1]); };
  if (op == "neg") return -x[0];
  if (op == "abs") return std::fabs(x[0]);
  if (op == "exp") return std::exp(x[0]);
  if (op == "log") return std::log(x[0]);
  if (op == "log1p") return std::log1p(x[0]);
  if (op == "expm1") return std::expm1(x[0]);
  if (op == "sqrt") return std::sqrt(x[0]);
  if (op == "rsqrt") return 1 / std::sqrt(x[0]);
  if (op == "reciprocal") return 1 / x[0];
  if (op == "sin") return std::sin(x[0]);
  if (op == "cos") return std::cos(x[0]);
  if (op == "tanh") return std::tanh(x[0]);
  if (op == "erf") return std::erf(x[0]);
  if (op == "exp2") return std::exp2(x[0]);
  if (op == "log2") return std::log2(x[0]);
  if (op == "log10") return std::log10(x[0]);
  if (op == "erfc") return std::erfc(x[0]);
  if (op == "tan") return std::tan(x[0]);
  if (op == "asin") return std::asin(x[0]);
  if (op == "acos") return std::acos(x[0]);
  if (op == "atan") return std::atan(x[0]);
  if (op == "sinh") return std::sinh(x[0]);
  if (op == "cosh") return std::cosh(x[0]);
  if (op == "asinh") return std::asinh(x[0]);
  if (op == "acosh") return std::acosh(x[0]);
  if (op == "atanh") return std::atanh(x[0]);
  if (op == "sigmoid") return 1 / (1 + std::exp(-x[0]));
  if (op == "relu") return x[0] < 0 ? 0 : x[0];
  if (op == "floor") return std::floor(x[0]);
  if (op == "ceil") return std::ceil(x[0]);
  if (op == "round") return std::nearbyint(x[0]);
  if (op == "trunc") return std::trunc(x[0]);
  if (op == "round_e4m3") {
    const double quantum = std::max(std::exp2(std::floor(std::log2(std::fabs(x[0]))) - 3), 0x1p-9);
    return std::fabs(x[0]) <= 464 ? std::nearbyint(x[0] / quantum) * quantum : std::nan("");
  }
  if (op == "sign") return x[0] > 0 ? 1 : x[0] < 0 ? -1 : x[0];
  if (op == "logical_not") return truth(x[0] == 0);
  if (op == "bitwise_not") return static_cast<double>(~whole(0));
  if (op == "isnan") return truth(std::isnan(x[0]));
  if (op == "isinf") return truth(std::isinf(x[0]));
  if (op == "add") return x[0] + x[1];
  if (op == "sub") return x[0] - x[1];
  if (op == "mul") return x[0] * x[1];
  if (op == "div") return x[0] / x[1];
  if (op == "floor_divide") return integers && x[1] == 0 ? 0 : floor_of();
  if (op == "remainder") return integers && x[1] == 0 ? 0 : x[0] - floor_of() * x[1];
  if (op == "fmod") return integers && x[1] == 0 ? 0 : std::fmod(x[0], x[1]);
  if (op == "atan2") return std::atan2(x[0], x[1]);
  if (op == "pow") return std::pow(x[0], x[1]);
  if (op == "maximum") return std::isnan(x[0]) || std::isnan(x[1]) ? std::nan("") : std::max(x[0], x[1]);
  if (op == "minimum") return std::isnan(x[0]) || std::isnan(x[1]) ? std::nan("") : std::min(x[0], x[1]);
  if (op == "eq") return truth(x[0] == x[1]);
  if (op == "ne") return truth(x[0] != x[1]);
  if (op == "lt") return truth(x[0] < x[1]);
  if (op == "le") return truth(x[0] <= x[1]);
  if (op == "gt") return truth(x[0] > x[1]);
  if (op == "ge") return truth(x[0] >= x[1]);
  if (op == "logical_and") return truth(x[0] != 0 && x[1] != 0);
  if (op == "logical_or") return truth(x[0] != 0 || x[1] != 0);
  if (op == "logical_xor") return truth((x[0] != 0) != (x[1] != 0));
  if (op == "bitwise_and") return static_cast<double>(whole(0) & whole(1));
  if (op == "bitwise_or") return static_cast<double>(whole(0) | whole(1));
  if (op == "bitwise_xor") return static_cast<double>(whole(0) ^ whole(1));
  if (op == "where") return x[0] != 0 ? x[1] : x[2];
  if (op == "cast" || op == "copy") return x[0];
  throw std::logic_error("the interpreter does not know " + op);
}

inline double apply_typed(const std::string& op, const std::vector<double>& x, const std::vector<ScalarType>& from,
                          ScalarType to) {
  bool integers = !is_floating(to);
  for (size_t i = op == "where" ? 1 : 0; i < from.size(); ++i) integers = integers && !is_floating(from[i]);
  if (op == "bitwise_not" && to == ScalarType::boolean) return apply("logical_not", x, true);  // as PyTorch does
  return round_to(apply(op, x, integers), to);
}

// One reduction, element by element.
struct Reducer {
  std::string op;
  double value = 0, best = 0;
  int64_t count = 0;

  explicit Reducer(std::string name) : op(std::move(name)) {}
  void add(double x) {
    if (op == "sum" || op == "mean") value += x;
    if (op == "any") value = value != 0 || x != 0 ? 1 : 0;
    const bool higher = op == "amin" ? x < best : x > best;
    const bool better = count == 0 || (!std::isnan(best) && (std::isnan(x) || higher));
    if (better && op == "argmax") value = static_cast<double>(count);
    if (better && (op == "amax" || op == "amin")) value = x;
    if (better) best = x;
    ++count;
  }
  double result(ScalarType type) const {
    return round_to(op == "mean" ? value / static_cast<double>(count) : value, type);
  }
};

// Calls visit(index) for every index of the shape. The last dimension varies fastest.
inline void each_index(const Shape& shape, const std::function<void(const Shape&)>& visit) {
  Shape index(shape.size(), 0);
  for (int64_t size : shape) {
    if (size <= 0) return;
  }
  for (;;) {
    visit(index);
    size_t d = shape.size();
    while (d > 0 && ++index[d - 1] == shape[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

// Returns the byte of the element of `value` at an index of a shape that it broadcasts to.
inline int64_t byte_of(const Value& value, const Shape& index) {
  int64_t at = value.offset;
  const size_t lead = index.size() - value.shape.size();
  for (size_t i = 0; i < value.shape.size(); ++i) {
    if (value.shape[i] > 1) at += index[lead + i] * value.strides[i];
  }
  return at * size_of(value.type);
}

inline double read_value(const Memory& memory, const Value& value, const Shape& index) {
  if (value.is_literal()) return round_to(value.literal, value.type);
  return memory.read(value.buffer, byte_of(value, index));
}
inline void write_value(Memory& memory, const Value& value, const Shape& index, double x) {
  memory.write(value.buffer, byte_of(value, index), round_to(x, value.type));
}

}  // namespace ark::compiler

#include "interpreter_nodes.hpp"
#include "interpreter_stages.hpp"

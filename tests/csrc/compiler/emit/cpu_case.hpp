// Test support for emitters: hand-written stages, which the CPU target runs, with the tensors that they work on.
//
// A case holds many independent stages, because compiling takes seconds for any number of functions. Inputs are random
// numbers rounded to their type. References are computed in double from the same rounded numbers.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "compiler/passes/pipeline.hpp"
#include "compiler/runtime/cpu_loop.hpp"
#include "compiler/schedule/plan.hpp"
#include "cpu/ops.hpp"
#include "jit/host_compiler.hpp"
#include "support/night.hpp"
#include "util/error.hpp"

namespace ark::compiler::test {

// Compiling with a sanitizer takes several times as long, so fewer cases run.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kSanitizersShare = 4;
#else
inline constexpr int kSanitizersShare = 1;
#endif

inline jit::Settings cpu_settings(const std::string& cache = {}) {
  jit::Settings settings;
  settings.version = "test";
  settings.kernels_dir = "ark_torch/kernels";  // tests run in the repository root
  settings.cache_dir = cache;
#if defined(__SANITIZE_THREAD__)
  settings.cxx_options = {"-O1", "-g1", "-fsanitize=thread"};
#elif defined(__SANITIZE_ADDRESS__)
  settings.cxx_options = {"-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize=vptr"};
#else
  settings.cxx_options = {"-O1"};
  // A compiler with precompiled standard headers (tests/support/precompiled.py).
  if (const char* cxx = std::getenv("ARK_TEST_CXX"); cxx != nullptr) settings.cxx = cxx;
#endif
  return settings;
}

// All these numbers of workers must give the same bits.
inline std::vector<int> worker_counts() {
  return ark::test::cases(4) == 4 ? std::vector<int>{1, 2, 3, 4} : std::vector<int>{1, 3};
}

inline jit::HostCompiler& cpu_compiler() {
  static auto* compiler = new jit::HostCompiler(cpu_settings());
  return *compiler;
}

// Decodes e4m3 by definition: 4 bits of exponent with a bias of 7, and 3 of significand.
inline double number_of_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, significand = code & 7;
  if (exponent == 15 && significand == 7) return std::nan("");
  const double magnitude = exponent == 0 ? std::ldexp(significand, -9) : std::ldexp(8 + significand, exponent - 10);
  return code >= 128 ? -magnitude : magnitude;
}

// Reads and writes one element of any type, with the scalar functions of the device library.
inline double read_element(const void* at, ScalarType type) {
  switch (type) {
    case ScalarType::f32: return cpu::load_one(static_cast<const float*>(at));
    case ScalarType::bf16: return cpu::load_one(static_cast<const cpu::bf16*>(at));
    case ScalarType::f16: return cpu::load_one(static_cast<const cpu::f16*>(at));
    case ScalarType::i64: return static_cast<double>(cpu::load_one(static_cast<const int64_t*>(at)));
    case ScalarType::i32: return static_cast<double>(cpu::load_one(static_cast<const int32_t*>(at)));
    case ScalarType::boolean: return cpu::load_one(static_cast<const bool*>(at)) ? 1 : 0;
    case ScalarType::i8: return *static_cast<const int8_t*>(at);
    case ScalarType::u8: return *static_cast<const uint8_t*>(at);
    case ScalarType::e4m3: return number_of_e4m3(*static_cast<const uint8_t*>(at));
  }
  return 0;
}
inline void write_element(void* at, ScalarType type, double x) {
  switch (type) {
    case ScalarType::f32: cpu::store_one(static_cast<float*>(at), static_cast<float>(x)); return;
    case ScalarType::bf16: cpu::store_one(static_cast<cpu::bf16*>(at), static_cast<float>(x)); return;
    case ScalarType::f16: cpu::store_one(static_cast<cpu::f16*>(at), static_cast<float>(x)); return;
    case ScalarType::i64: cpu::store_one(static_cast<int64_t*>(at), static_cast<int64_t>(x)); return;
    case ScalarType::i32: cpu::store_one(static_cast<int32_t*>(at), static_cast<int64_t>(x)); return;
    case ScalarType::boolean: cpu::store_one(static_cast<bool*>(at), x != 0); return;
    case ScalarType::i8: *static_cast<int8_t*>(at) = static_cast<int8_t>(x); return;
    case ScalarType::u8:
    case ScalarType::e4m3: *static_cast<uint8_t*>(at) = static_cast<uint8_t>(x); return;  // stores the code itself
  }
}

// The rounding unit of a type.
inline double epsilon_of(ScalarType type) {
  return type == ScalarType::bf16 ? 0x1p-8 : type == ScalarType::f16 ? 0x1p-11 : type == ScalarType::f32 ? 0x1p-24 : 0;
}

class CpuCase {
 public:
  explicit CpuCase(uint64_t seed = 1) : random_(seed) {}

  using Fill = std::function<double(std::mt19937_64&)>;
  static Fill normal(double scale = 1) {
    return [scale](std::mt19937_64& random) { return std::normal_distribution<double>(0, scale)(random); };
  }
  static Fill integers(int64_t low, int64_t high) {
    return [=](std::mt19937_64& random) {
      return static_cast<double>(std::uniform_int_distribution<int64_t>(low, high)(random));
    };
  }

  static Shape dense(const Shape& shape) {
    Shape strides(shape.size());
    int64_t step = 1;
    for (size_t d = shape.size(); d-- > 0; step *= shape[d]) strides[d] = step;
    return strides;
  }
  // Empty strides mean dense. The buffer has `offset` elements before the first.
  int input(ScalarType type, const Shape& shape, const Fill& fill, Shape strides = {}, int64_t offset = 0,
            bool mutated = false, bool parameter = false) {
    Buffer buffer;
    buffer.kind = Buffer::Kind::input;
    buffer.argument = static_cast<int>(inputs_.size());
    buffer.mutated = mutated;
    buffer.parameter = parameter;
    const int value = add(buffer, type, shape, strides, offset);
    std::vector<char> bytes(static_cast<size_t>(graph.buffers().back().bytes) + kGuard, kPoison);
    for (int64_t i = 0; i < graph.buffers().back().bytes / size_of(type); ++i)
      write_element(bytes.data() + i * size_of(type), type, fill(random_));
    inputs_.push_back(std::move(bytes));
    return value;
  }
  int output(ScalarType type, const Shape& shape, Shape strides = {}, int64_t offset = 0) {
    Buffer buffer;
    buffer.kind = Buffer::Kind::output;
    buffer.argument = static_cast<int>(outputs_.size());
    const int value = add(buffer, type, shape, strides, offset);
    outputs_.emplace_back(static_cast<size_t>(graph.buffers().back().bytes) + kGuard, kPoison);
    return value;
  }
  int temporary(ScalarType type, const Shape& shape) { return add(Buffer{}, type, shape, {}, 0); }
  int view(int value, const Shape& shape, const Shape& strides, int64_t offset = 0) {
    Value one = graph.values()[static_cast<size_t>(value)];
    one.shape = shape;
    one.strides = strides;
    one.offset += offset;
    return graph.add_value(one);
  }
  int literal(ScalarType type, double x) {
    Value one;
    one.type = type;
    one.literal = x;
    return graph.add_value(one);
  }

  // Accesses: {value, axis, write}.
  Stage& stage(decltype(Stage::body) body, std::vector<Access> accesses, int64_t extent, int64_t grain = 1) {
    Stage one;
    one.body = std::move(body);
    one.accesses = std::move(accesses);
    one.extent = extent;
    one.grain = grain;
    one.flops = 1e9;  // large enough to be cut into tiles
    one.bytes = 1e6;
    one.kind = "test";
    one.name = "stage" + std::to_string(stages.size());
    one.origin = "case";
    stages.push_back(std::move(one));
    return stages.back();
  }

  Plan plan(int workers) const {
    Target target;
    target.workers = workers;
    return plan_stages(graph, stages, target);
  }
  // Compiles for that many workers and runs `steps` steps. Outputs are poisoned before each.
  void run(int workers, int steps = 1) {
    CpuLoop loop(plan(workers), cpu_compiler());
    for (int i = 0; i < steps; ++i) run(loop);
  }
  void run(CpuLoop& loop) {
    for (auto& one : outputs_) std::fill(one.begin(), one.end(), kPoison);
    std::vector<const void*> in;
    std::vector<void*> out;
    for (auto& one : inputs_) in.push_back(one.data());
    for (auto& one : outputs_) out.push_back(one.data());
    loop.run(in.data(), out.data());
    for (const auto* all : {&inputs_, &outputs_})
      for (const auto& one : *all)
        for (size_t i = one.size() - kGuard; i < one.size(); ++i) ASSERT_EQ(one[i], kPoison) << "written past the end";
  }

  double get(int value, const std::vector<int64_t>& index) {
    const Value& one = graph.values()[static_cast<size_t>(value)];
    if (one.is_literal()) return one.literal;
    int64_t at = one.offset;
    for (size_t d = 0; d < index.size(); ++d) at += index[d] * one.strides[d];
    return read_element(storage(value).data() + at * size_of(one.type), one.type);
  }
  void set(int value, const std::vector<int64_t>& index, double x) {
    const Value& one = graph.values()[static_cast<size_t>(value)];
    int64_t at = one.offset;
    for (size_t d = 0; d < index.size(); ++d) at += index[d] * one.strides[d];
    write_element(storage(value).data() + at * size_of(one.type), one.type, x);
  }
  std::vector<char>& storage(int value) {
    const Buffer& buffer = graph.buffer_of(value);
    return buffer.kind == Buffer::Kind::input ? inputs_[static_cast<size_t>(buffer.argument)]
                                              : outputs_[static_cast<size_t>(buffer.argument)];
  }
  const std::vector<std::vector<char>>& outputs() const { return outputs_; }
  std::mt19937_64& random() { return random_; }
  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }

  Graph graph;
  std::vector<Stage> stages;

 private:
  static constexpr size_t kGuard = 64;
  static constexpr char kPoison = 0x5a;

  int add(Buffer buffer, ScalarType type, const Shape& shape, Shape strides, int64_t offset) {
    Value value;
    value.type = type;
    value.shape = shape;
    value.strides = strides.empty() ? dense(shape) : std::move(strides);
    value.offset = offset;
    int64_t last = offset;
    for (size_t d = 0; d < shape.size(); ++d) last += (shape[d] - 1) * value.strides[d];
    buffer.bytes = (last + 1) * size_of(type);
    value.buffer = graph.add_buffer(buffer);
    return graph.add_value(value);
  }

  std::mt19937_64 random_;
  std::vector<std::vector<char>> inputs_, outputs_;
};

// Calls body(index) for every index of the shape, the last dimension fastest.
inline void for_each_index(const Shape& shape, const std::function<void(const std::vector<int64_t>&)>& body) {
  std::vector<int64_t> index(shape.size(), 0);
  for (;;) {
    body(index);
    size_t d = shape.size();
    while (d > 0 && ++index[d - 1] == shape[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

}  // namespace ark::compiler::test

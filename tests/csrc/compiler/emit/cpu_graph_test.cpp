// Runs random graphs through the CPU target, from nodes to threads, and compares them with the interpreter of nodes.
//
// The interpreter computes in double. Inputs are small integers, so most results are exact. If float32 rounding decides
// a comparison or a floor, results can differ, so a graph may differ in few elements but not in many.
#include <gtest/gtest.h>

#include <cstdlib>

#include "compiler/emit/cpu_case.hpp"
#include "compiler/graph/random_graph.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/verify/interpreter.hpp"

namespace ark::compiler::test {
namespace {

ScalarType type_of_buffer(const Graph& graph, int buffer) {
  for (const Value& value : graph.values())
    if (value.buffer == buffer) return value.type;
  return ScalarType::f32;
}

struct Bytes {
  std::vector<std::vector<char>> inputs, outputs;
};

Bytes bytes_of(const Graph& graph, const Memory& memory) {
  Bytes bytes;
  bytes.inputs.resize(static_cast<size_t>(graph.inputs()));
  bytes.outputs.resize(static_cast<size_t>(graph.outputs()));
  for (size_t b = 0; b < graph.buffers().size(); ++b) {
    const Buffer& buffer = graph.buffers()[b];
    if (buffer.kind == Buffer::Kind::temporary) continue;
    auto& to = buffer.kind == Buffer::Kind::input ? bytes.inputs[static_cast<size_t>(buffer.argument)]
                                                  : bytes.outputs[static_cast<size_t>(buffer.argument)];
    to.assign(static_cast<size_t>(buffer.bytes), 0x5a);
    const ScalarType type = type_of_buffer(graph, static_cast<int>(b));
    if (buffer.kind == Buffer::Kind::input)
      for (int64_t at = 0; at < buffer.bytes; at += size_of(type))
        write_element(to.data() + at, type, memory.cells[b][static_cast<size_t>(at)]);
  }
  return bytes;
}

std::string run_random(uint32_t seed, int workers, jit::HostCompiler& compiler) {
  RandomGraph random(seed);
  Graph graph = random.graph();
  Memory memory(graph);
  random.fill(memory);
  Bytes bytes = bytes_of(graph, memory);
  run_nodes(memory, graph);
  Target target;
  target.workers = workers;
  std::vector<Stage> stages = make_stages(graph);
  CpuLoop loop(plan_stages(graph, std::move(stages), target), compiler);
  std::vector<const void*> in;
  std::vector<void*> out;
  for (auto& one : bytes.inputs) in.push_back(one.data());
  for (auto& one : bytes.outputs) out.push_back(one.data());
  loop.run(in.data(), out.data());

  for (size_t b = 0; b < graph.buffers().size(); ++b) {
    const Buffer& buffer = graph.buffers()[b];
    if (buffer.kind == Buffer::Kind::temporary) continue;
    const auto& got = buffer.kind == Buffer::Kind::input ? bytes.inputs[static_cast<size_t>(buffer.argument)]
                                                         : bytes.outputs[static_cast<size_t>(buffer.argument)];
    const ScalarType type = type_of_buffer(graph, static_cast<int>(b));
    int64_t wrong = 0;
    std::string first;
    for (int64_t at = 0; at < buffer.bytes; at += size_of(type)) {
      if (memory.written[b][static_cast<size_t>(at)] == 0) continue;
      const double want = memory.cells[b][static_cast<size_t>(at)], have = read_element(got.data() + at, type);
      const double allowed = 1e-5 + 0.02 * std::abs(want);  // intermediate results may be bfloat16
      if ((std::isnan(want) && std::isnan(have)) || want == have || std::abs(want - have) <= allowed) continue;
      if (std::abs(want) > 1e5 && !(std::abs(have) <= 1e5)) continue;  // narrow types overflow
      if (wrong++ == 0)
        first = "buffer " + std::to_string(b) + " byte " + std::to_string(at) + ": " + std::to_string(have) + ", not " +
                std::to_string(want);
    }
    if (wrong > 0) return std::to_string(wrong) + " elements differ, " + first + "\n" + loop.source();
  }
  return {};
}

TEST(CpuGraphTest, RandomGraphs) {
  const char* count = std::getenv("ARK_TEST_RANDOM");
  const char* from = std::getenv("ARK_TEST_SEED");
  const uint32_t first = from != nullptr ? static_cast<uint32_t>(std::atoi(from)) : 1;
  const uint32_t graphs =
      count != nullptr ? static_cast<uint32_t>(std::atoi(count)) : static_cast<uint32_t>(ark::test::cases(12));
  for (uint32_t seed = first; seed < first + graphs; ++seed) {
    std::string difference;
    ASSERT_NO_THROW(difference = run_random(seed, static_cast<int>(1 + seed % 3), cpu_compiler())) << "seed " << seed;
    EXPECT_EQ(difference, "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace ark::compiler::test

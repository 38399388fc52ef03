// Test support for passes that form stages: runs a graph node by node and stage by stage, and compares the results.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "compiler/graph/graph_builder.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/schedule/targets.hpp"
#include "compiler/verify/interpreter.hpp"

namespace ark::compiler {

inline std::string describe(const Graph& graph, const std::vector<Stage>& stages) {
  std::string text;
  for (const Node& node : graph.nodes()) {
    text += node.origin + " " + node.op;
    for (int value : node.inputs) {
      const Value& of = graph.values()[value];
      text += of.is_literal() ? " literal"
                              : " b" + std::to_string(of.buffer) + to_string(of.shape) + "x" + to_string(of.strides) +
                                    "+" + std::to_string(of.offset);
    }
    const Value& out = graph.values()[node.outputs[0]];
    text += " -> b" + std::to_string(out.buffer) + to_string(out.shape) + "x" + to_string(out.strides) + "+" +
            std::to_string(out.offset) + "\n";
  }
  for (const Stage& stage : stages) {
    text += stage.kind + " " + stage.name + " of " + stage.origin + " extent " + std::to_string(stage.extent) + "\n";
  }
  return text;
}

// The stages of a plan for a GPU with that many workers. 1 means the CPU.
inline std::vector<Stage> stages_for(Graph& graph, int workers) {
  Compilation now;
  now.plan.target = workers == 1 ? target_named("cpu") : gpu_target("sm_90a", workers);
  now.plan.graph = std::move(graph);
  for (const Pass& pass : pipeline())
    if (pass.phase == Pass::Phase::stages && pass.takes(now.plan)) pass.run(now);
  graph = std::move(now.plan.graph);
  return std::move(now.plan.stages);
}

// Runs both ways on the same inputs. Every buffer that the caller sees must agree.
inline void expect_same(Graph& graph, const std::function<void(Memory&)>& fill, uint32_t seed, int workers = 1) {
  std::vector<Stage> stages;  // this may add temporaries
  ASSERT_NO_THROW(stages = stages_for(graph, workers)) << describe(graph, {});
  Memory start(graph);
  fill(start);
  Memory by_node = start, by_stage = start;
  run_nodes(by_node, graph);
  std::mt19937 random(seed);
  ASSERT_NO_THROW(run_stages(by_stage, graph, stages, random)) << describe(graph, stages);
  for (size_t b = 0; b < graph.buffers().size(); ++b) {
    if (graph.buffers()[b].kind == Buffer::Kind::temporary) continue;
    for (size_t byte = 0; byte < by_node.cells[b].size(); ++byte) {
      ASSERT_EQ(by_node.written[b][byte], by_stage.written[b][byte]) << describe(graph, stages);
      const double x = by_node.cells[b][byte], y = by_stage.cells[b][byte];
      if (std::isnan(x) && std::isnan(y)) continue;
      if (x == y) continue;
      ASSERT_NEAR(x, y, 1e-9 * std::max(1.0, std::fabs(x))) << "buffer " << b << " byte " << byte << "\n"
                                                            << describe(graph, stages);
    }
  }
}

inline void fill_inputs(Memory& memory, const Graph& graph) {
  std::mt19937 random(7);
  for (size_t b = 0; b < graph.buffers().size(); ++b) {
    if (graph.buffers()[b].kind != Buffer::Kind::input) continue;
    for (size_t byte = 0; byte < memory.cells[b].size(); ++byte) {
      memory.cells[b][byte] = static_cast<double>(random() % 1000) / 500 - 1;
      memory.written[b][byte] = 1;
    }
  }
}

}  // namespace ark::compiler

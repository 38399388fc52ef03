// Decides which buffers travel as packets: what kernels can write and poll, what is small, and what crosses workers.
// See events.hpp.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/schedule/box_history.hpp"
#include "compiler/schedule/events.hpp"

namespace ark::compiler {

namespace {

// Packets double the bytes and every reader polls all of them: worthwhile for vectors, not for matrices.
constexpr int64_t most_packet_bytes = 32768;

// What kernels write and poll as packets under Target::packets_of_rows.
bool writes_packets(const Graph& graph, const Stage& stage, const Access& access) {
  return few_rows_of(stage) >= 0 && is_floating(graph.values()[access.value].type);
}
bool polls_packets(const Graph& graph, const Stage& stage, const Access& access, ScalarType written) {
  const Value& value = graph.values()[access.value];
  if (value.type != written) return false;
  if (attention_of(stage) != nullptr) {
    // Attention itself does not poll, but the programs before it do.
    for (const Access& read : (stage.tail.empty() ? stage : stage.tail.back()).accesses)
      if (graph.values()[read.value].buffer == value.buffer) return false;
  }
  if (std::holds_alternative<RowProgram>(stage.body)) return true;
  if (const auto* scatter = std::get_if<ScatterStage>(&stage.body)) {
    const Value& source = graph.values()[scatter->source];
    return source.buffer == value.buffer && graph.values()[scatter->index].buffer != value.buffer && !scatter->along &&
           !scatter->accumulate && source.shape[static_cast<size_t>(scatter->dim)] == 1;
  }
  if (few_rows_of(stage) != access.value) return false;
  // One thread polls each element, where the depth of `b` is contiguous.
  const auto products = matmuls_of(stage);
  return std::all_of(products.begin(), products.end(), [&](const MatmulStage& one) {
    const Value& b = graph.values()[one.b];
    return b.buffer != value.buffer && one.codes.bits == 0 && b.strides[b.strides.size() - 2] == 1;
  });
}

}  // namespace

std::vector<char> plain_buffers(const Graph& graph, const std::vector<Stage>& stages, const Target& target) {
  const std::vector<Buffer>& buffers = graph.buffers();
  // One stage must write the whole buffer and not read it.
  std::vector<int> writer(buffers.size(), -1);
  std::vector<char> plain(buffers.size(), 0);
  for (int index = 0; index < static_cast<int>(stages.size()); ++index) {
    for (const Access& access : stages[index].accesses) {
      const int buffer = graph.values()[access.value].buffer;
      if (std::holds_alternative<CollectiveStage>(stages[index].body)) plain[buffer] = 1;
      if (access.write && std::exchange(writer[buffer], index) != -1) plain[buffer] = 1;
      if (!access.write && writer[buffer] == index) plain[buffer] = 1;
    }
    for (const Access& access : stages[index].accesses) {  // not read before it is written either
      const int buffer = graph.values()[access.value].buffer;
      if (!access.write && (writer[buffer] == -1 || writer[buffer] == index)) plain[buffer] = 1;
    }
  }
  std::vector<ScalarType> written(buffers.size(), ScalarType::f32);
  for (const bool write : {true, false}) {
    for (const Stage& stage : stages) {
      for (const Access& access : stage.accesses) {
        if (!target.packets_of_rows || access.write != write) continue;
        const Value& value = graph.values()[access.value];
        if (write) written[value.buffer] = value.type;
        if (write ? !writes_packets(graph, stage, access) : !polls_packets(graph, stage, access, written[value.buffer]))
          plain[value.buffer] = 1;
      }
    }
  }
  for (size_t buffer = 0; buffer < buffers.size(); ++buffer) {
    if (buffers[buffer].kind != Buffer::Kind::temporary || buffers[buffer].bytes > most_packet_bytes) plain[buffer] = 1;
  }
  return plain;
}

std::vector<bool> choose_packets(const Plan& plan, const std::vector<bool>& own) {
  std::vector<bool> chosen(plan.graph.buffers().size(), false);
  if (!plan.target.packets || plan.multi_step) return chosen;
  std::vector<char> plain = plain_buffers(plan.graph, plan.stages, plan.target);
  for (size_t buffer = 0; buffer < own.size(); ++buffer)
    if (own[buffer]) plain[buffer] = 1;
  const std::vector<Push> pushed = pushed_buffers(plan.graph, plan.stages);
  for (size_t buffer = 0; buffer < pushed.size(); ++buffer) chosen[buffer] = pushed[buffer].ranks > 0;
  // Some tile must read what another worker wrote.
  BoxHistory history(plan.graph, plan.stages);
  const auto tasks = static_cast<int>(plan.tasks.size());
  for (int first = 0, last = 0; first < tasks; first = last) {
    const int stage = plan.tasks[first].stage;
    std::vector<int> indices;
    for (; last < tasks && plan.tasks[last].stage == stage; ++last) indices.push_back(last);
    for (const Access& access : plan.stages[stage].accesses) {
      const int buffer = plan.graph.values()[access.value].buffer;
      if (access.write || plain[buffer]) continue;
      for (const int index : indices) {
        const Task& task = plan.tasks[index];
        if (chosen[buffer]) break;
        history.conflicts(buffer, box_of(plan.graph, plan.stages[stage], access, task.begin, task.end), false,
                          [&](const BoxHistory::Record&, int other) {
                            if (plan.tasks[other].worker != task.worker) chosen[buffer] = true;
                          });
      }
    }
    history.add(stage, indices, plan.tasks);
  }
  return chosen;
}

}  // namespace ark::compiler

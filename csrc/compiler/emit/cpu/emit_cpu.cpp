// Writes the functions and tables of a plan's C++ source. See emit_cpu.hpp.
#include "compiler/emit/cpu/emit_cpu.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "compiler/emit/common/emit_functions.hpp"
#include "compiler/emit/common/emit_tables.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

class CpuEmitter {
 public:
  explicit CpuEmitter(const Plan& plan) : plan_(checked(plan)), functions_(plan, Code::cpu) {}

  std::string source() {
    std::string out = made_from(plan_);
    for (const char* header : {"attention", "gather", "loop", "matmul", "reduce"})
      append(out, "#include \"cpu/{}.hpp\"\n", header);
    append(out, "{}\nnamespace {{\n\nusing namespace ark::cpu;\n", rare_includes());
    for (const std::string& text : functions_.texts()) append(out, "\n{}", text);
    tables(out);
    return out;
  }

 private:
  static const Plan& checked(const Plan& plan) {
    ErrorContext context;
    context.remedy = "This is a defect of the planner: please report it.";
    for (const Placement& placement : plan.placements)
      if (placement.packets) throw Error(ErrorKind::invalid_argument, "the CPU target has no packets", context);
    if (plan.queues.empty()) throw Error(ErrorKind::invalid_argument, "a plan without queues", context);
    return plan;
  }

  // Includes kernels that few plans use only where needed, to save compile time.
  std::string rare_includes() const {
    const auto any = [&](auto&& is) { return std::any_of(plan_.stages.begin(), plan_.stages.end(), is); };
    std::string text;
    if (any([](const Stage& one) { return std::holds_alternative<BagStage>(one.body); }))
      text += "#include \"cpu/bag.hpp\"\n";
    if (any([](const Stage& one) {
          return std::ranges::any_of(matmuls_of(one),
                                     [](const MatmulStage& product) { return product.codes.bits != 0; });
        }))
      text += "#include \"cpu/dequant.hpp\"\n";
    if (any(multiplies_float8)) text += "#include \"cpu/scaled.hpp\"\n";
    if (any([](const Stage& one) { return std::holds_alternative<ExpertsStage>(one.body); }))
      text += "#include \"cpu/experts.hpp\"\n";
    if (any([](const Stage& one) {
          return std::holds_alternative<SelectStage>(one.body) || std::holds_alternative<ScanStage>(one.body);
        }))
      text += "#include \"cpu/select.hpp\"\n";
    return text;
  }

  std::string operand(int value, int64_t extra) const {
    static constexpr const char* bases[] = {"input", "output", "arena", "own"};
    const Place place = place_of(plan_, value, extra);
    return formatted("{{Operand::{}, {}, {}}}", bases[place.base], place.argument, place.offset);
  }

  void tables(std::string& out) const {
    out += "\nconstexpr Operand kOperands[] = {\n";
    std::vector<int> first;
    int count = 0;
    for (size_t i = 0; i < plan_.stages.size(); ++i) {
      first.push_back(count);
      count += static_cast<int>(functions_.operands(i).size());
      out += "    ";
      for (const int value : functions_.operands(i)) append(out, "{}, ", operand(value, 0));
      append(out, " // {}: stage {}, {}\n", first.back(), i, in_comment(plan_.stages[i].name));
    }
    const EventTables events(plan_);
    out += "    {}};\n\n// Events and how often each is bumped in a step.\nconstexpr WaitFor kWaits[] = {\n    ";
    for (size_t i = 0; i < events.waits.size(); ++i)
      append(out, "{{{}, {}}},{}", events.waits[i].event, events.waits[i].threshold, i % 12 == 11 ? "\n    " : " ");
    out += "{}};\nconstexpr int32_t kSignals[] = {\n    ";
    for (size_t i = 0; i < events.signals.size(); ++i)
      append(out, "{},{}", events.signals[i], i % 24 == 23 ? "\n    " : " ");
    out += "-1};\n";
    for (size_t q = 0; q < plan_.queues.size(); ++q) {
      const Queue& queue = plan_.queues[q];
      std::map<int, int> position;
      append(out,
             "\n// Function, tile, task and stage; first and number of operands, waits, waits for the step\n"
             "// before and signals.\nconstexpr TaskEntry kTasks{}[] = {{\n",
             q);
      for (const int index : queue.tasks) {
        const Task& task = plan_.tasks.at(static_cast<size_t>(index));
        const size_t t = static_cast<size_t>(index), s = static_cast<size_t>(task.stage);
        position.try_emplace(index, static_cast<int>(position.size()));
        append(out, "    {{{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}}},\n",
               functions_.names()[functions_.function_of(s)], task.begin, task.end, index, task.stage, first[s],
               functions_.operands(s).size(), events.first_wait[t], task.waits.size(), events.first_carried[t],
               task.carried.size(), events.first_signal[t], task.signals.size());
      }
      append(out, "    {{}}}};\nconstexpr LoadEntry kLoads{}[] = {{\n", q);
      for (const Load& load : merged_loads(queue.loads)) {
        // The load's offset is relative to the buffer.
        const Value& value = plan_.graph.values()[static_cast<size_t>(load.value)];
        append(out, "    {{{}, {}, {}, {}, {}}},\n",
               operand(load.value, load.offset - value.offset * size_of(value.type)), position.at(load.task), load.rows,
               load.bytes, load.stride);
      }
      out += "    {}};\n";
    }
    out += "\nconstexpr QueueEntry kQueues[] = {\n";
    for (size_t q = 0; q < plan_.queues.size(); ++q)
      append(out, "    {{kTasks{0}, {1}, kLoads{0}, {2}}},\n", q, plan_.queues[q].tasks.size(),
             merged_loads(plan_.queues[q].loads).size());
    append(out,
           "}};\nconstexpr Tables kTables{{kQueues, kOperands, kWaits, kSignals, {}, {}}};\n\n}}  // namespace\n\n",
           plan_.target.pages * plan_.target.page_bytes, plan_.tasks.size());
    constexpr const char* exported = "extern \"C\" __attribute__((visibility(\"default\")))";
    append(out, "{} const PlanInfo {}{{kAbi, {}, {}, {}, {}}};\n", exported, kInfoSymbol, plan_.queues.size(),
           plan_.events.size(), plan_.tasks.size(), functions_.scratch_bytes());
    append(out, "{} void {}(const Launch* launch, int worker) {{\n  run_worker(*launch, kTables, worker);\n}}\n",
           exported, kRunSymbol);
  }

  const Plan& plan_;
  const StageFunctions functions_;
};

}  // namespace

std::string emit_cpu(const Plan& plan) {
  return CpuEmitter(plan).source();
}

}  // namespace ark::compiler

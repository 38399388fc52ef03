// Writes the functions and tables of a plan's C++ source. See emit_cpu.hpp.
#include "compiler/emit/cpu/emit_cpu.hpp"

#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "compiler/emit/common/emit_functions.hpp"
#include "compiler/emit/common/emit_tables.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

class CpuEmitter {
 public:
  explicit CpuEmitter(const Plan& plan) : plan_(checked(plan)), functions_(plan, Code::cpu) {}

  std::string source() {
    std::ostringstream out;
    out << "// Made by ark_torch from a plan of " << plan_.stages.size() << " stages, " << plan_.tasks.size()
        << " tasks and " << plan_.events.size() << " events for " << plan_.queues.size()
        << " workers.\n"
           "#include \"cpu/attention.hpp\"\n#include \"cpu/gather.hpp\"\n#include \"cpu/loop.hpp\"\n"
           "#include \"cpu/matmul.hpp\"\n#include \"cpu/reduce.hpp\"\n"
        << rare_includes() << "\nnamespace {\n\nusing namespace ark::cpu;\n";
    for (const std::string& text : functions_.texts()) out << "\n" << text;
    tables(out);
    return out.str();
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
    return std::string("{Operand::") + bases[place.base] + ", " + std::to_string(place.argument) + ", " +
           std::to_string(place.offset) + "}";
  }

  void tables(std::ostream& out) {
    out << "\nconstexpr Operand kOperands[] = {\n";
    std::vector<int> first;
    int count = 0;
    for (size_t i = 0; i < plan_.stages.size(); ++i) {
      first.push_back(count);
      count += static_cast<int>(functions_.operands(i).size());
      out << "    ";
      for (const int value : functions_.operands(i)) out << operand(value, 0) << ", ";
      out << " // " << first.back() << ": stage " << i << ", " << in_comment(plan_.stages[i].name) << "\n";
    }
    const EventTables events(plan_);
    out << "    {}};\n\n// Events and how often each is bumped in a step.\nconstexpr WaitFor kWaits[] = {\n"
        << events.waits << "{}};\nconstexpr int32_t kSignals[] = {\n"
        << events.signals << "-1};\n";
    for (size_t q = 0; q < plan_.queues.size(); ++q) {
      const Queue& queue = plan_.queues[q];
      std::map<int, int> position;
      out << "\n// Function, tile, task and stage; first and number of operands, waits, waits for the step\n// before "
             "and signals.\n"
          << "constexpr TaskEntry kTasks" << q << "[] = {\n";
      for (const int index : queue.tasks) {
        const Task& task = plan_.tasks.at(static_cast<size_t>(index));
        const size_t t = static_cast<size_t>(index), s = static_cast<size_t>(task.stage);
        position.try_emplace(index, static_cast<int>(position.size()));
        out << "    {" << functions_.names()[functions_.function_of(s)] << ", " << task.begin << ", " << task.end
            << ", " << index << ", " << task.stage << ", " << first[s] << ", " << functions_.operands(s).size() << ", "
            << events.first_wait[t] << ", " << task.waits.size() << ", " << events.first_carried[t] << ", "
            << task.carried.size() << ", " << events.first_signal[t] << ", " << task.signals.size() << "},\n";
      }
      out << "    {}};\nconstexpr LoadEntry kLoads" << q << "[] = {\n";
      for (const Load& load : merged_loads(queue.loads)) {
        // The load's offset is relative to the buffer.
        const Value& value = plan_.graph.values()[static_cast<size_t>(load.value)];
        out << "    {" << operand(load.value, load.offset - value.offset * size_of(value.type)) << ", "
            << position.at(load.task) << ", " << load.rows << ", " << load.bytes << ", " << load.stride << "},\n";
      }
      out << "    {}};\n";
    }
    out << "\nconstexpr QueueEntry kQueues[] = {\n";
    for (size_t q = 0; q < plan_.queues.size(); ++q)
      out << "    {kTasks" << q << ", " << plan_.queues[q].tasks.size() << ", kLoads" << q << ", "
          << merged_loads(plan_.queues[q].loads).size() << "},\n";
    out << "};\nconstexpr Tables kTables{kQueues, kOperands, kWaits, kSignals, "
        << plan_.target.pages * plan_.target.page_bytes << ", " << plan_.tasks.size() << "};\n\n}  // namespace\n\n"
        << "extern \"C\" __attribute__((visibility(\"default\"))) const PlanInfo " << kInfoSymbol << "{kAbi, "
        << plan_.queues.size() << ", " << plan_.events.size() << ", " << plan_.tasks.size() << ", "
        << functions_.scratch_bytes() << "};\n"
        << "extern \"C\" __attribute__((visibility(\"default\"))) void " << kRunSymbol
        << "(const Launch* launch, int worker) {\n  run_worker(*launch, kTables, worker);\n}\n";
  }

  const Plan& plan_;
  const StageFunctions functions_;
};

}  // namespace

std::string emit_cpu(const Plan& plan) {
  return CpuEmitter(plan).source();
}

}  // namespace ark::compiler

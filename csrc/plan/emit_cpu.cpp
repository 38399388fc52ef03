// Functions and tables of the source behind emit_cpu.hpp.
#include "plan/emit_cpu.hpp"

#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "error.hpp"
#include "plan/emit_cpu_function.hpp"

namespace ark::plan {

namespace {

// One line of a comment: what others wrote (names, origins) must not end it.
std::string in_comment(const std::string& text) {
  std::string out;
  for (const char c : text) out += static_cast<unsigned char>(c) < 0x20 || c == '\\' ? ' ' : c;
  return out;
}

class CpuEmitter {
 public:
  explicit CpuEmitter(const Plan& plan) : plan_(plan) {}

  std::string source() {
    check();
    for (size_t i = 0; i < plan_.stages.size(); ++i) stage(plan_.stages[i]);
    std::ostringstream out;
    out << "// Made by ark_torch from a plan of " << plan_.stages.size() << " stages, " << plan_.tasks.size()
        << " tasks and " << plan_.events.size() << " events for " << plan_.queues.size()
        << " workers.\n"
           "#include \"cpu/attention.hpp\"\n#include \"cpu/gather.hpp\"\n#include \"cpu/loop.hpp\"\n"
           "#include \"cpu/matmul.hpp\"\n#include \"cpu/reduce.hpp\"\n"
        << rare_includes() << "\nnamespace {\n\nusing namespace ark::cpu;\n";
    for (const std::string& text : functions_) out << "\n" << text;
    tables(out);
    return out.str();
  }

 private:
  void check() const {
    ErrorContext context;
    context.remedy = "This is a defect of the planner: please report it.";
    for (const Placement& placement : plan_.placements)
      if (placement.packets || placement.parity)
        throw Error(ErrorKind::invalid_argument, "the CPU target has neither packets nor copies that take turns",
                    context);
    if (plan_.queues.empty()) throw Error(ErrorKind::invalid_argument, "a plan without queues", context);
  }

  void stage(const Stage& stage) {
    FunctionWriter writer(plan_.graph, stage, Code::cpu);
    std::visit(
        [&](const auto& body) {
          using Body = std::decay_t<decltype(body)>;
          if constexpr (std::is_same_v<Body, RowProgram>) emit_rows(writer, body);
          if constexpr (std::is_same_v<Body, MatmulStage>) emit_matmul(writer, body);
          if constexpr (std::is_same_v<Body, AttentionStage>) emit_attention(writer, body);
          if constexpr (std::is_same_v<Body, GatherStage>) emit_gather(writer, body);
          if constexpr (std::is_same_v<Body, ScatterStage>) emit_scatter(writer, body);
          if constexpr (std::is_same_v<Body, SelectStage>) emit_select(writer, body);
          if constexpr (std::is_same_v<Body, ScanStage>) emit_scan(writer, body);
          if constexpr (std::is_same_v<Body, BagStage>) emit_bag(writer, body);
          if constexpr (std::is_same_v<Body, ExpertsStage>) emit_experts(writer, body);
          if constexpr (std::is_same_v<Body, CheckStage>) emit_check(writer, body);
          if constexpr (std::is_same_v<Body, CollectiveStage>) emit_collective(writer, body);
          if constexpr (std::is_same_v<Body, StopStage>) emit_stop(writer, body);
        },
        stage.body);
    scratch_bytes_ = std::max(scratch_bytes_, writer.scratch_bytes());
    if (writer.operands().size() > kMostOperands) {
      throw Error(ErrorKind::invalid_argument, stage.name + " (" + stage.origin + ") has " +
                                                   std::to_string(writer.operands().size()) +
                                                   " operands, more than a task can have");
    }
    const std::string body = writer.body();
    auto [known, fresh] = known_.try_emplace(body, functions_.size());
    if (fresh) {
      functions_.push_back({});
      names_.push_back(std::string(kinds(stage)) + "_" + std::to_string(known->second));
    }
    function_of_.push_back(known->second);
    operands_.push_back(writer.operands());
    used_by_[known->second].push_back(in_comment(stage.name + ": " + stage.origin));
    const std::string& name = names_[known->second];
    std::string text;
    const auto& users = used_by_[known->second];
    for (size_t i = 0; i < users.size() && i < 4; ++i) text += "// " + users[i] + "\n";
    if (users.size() > 4) text += "// and " + std::to_string(users.size() - 4) + " more\n";
    text += "void " + name + "([[maybe_unused]] const Context& context, char* const* p, ";
    text += "[[maybe_unused]] int64_t begin, [[maybe_unused]] int64_t end) {\n" + body + "}\n";
    functions_[known->second] = text;
  }

  // Headers of kernels that few plans have: what is not needed is not compiled.
  std::string rare_includes() const {
    const auto any = [&](auto&& is) { return std::any_of(plan_.stages.begin(), plan_.stages.end(), is); };
    std::string text;
    if (any([](const Stage& one) { return std::holds_alternative<BagStage>(one.body); }))
      text += "#include \"cpu/bag.hpp\"\n";
    if (any([](const Stage& one) { return std::holds_alternative<ExpertsStage>(one.body); }))
      text += "#include \"cpu/experts.hpp\"\n";
    if (any([](const Stage& one) {
          return std::holds_alternative<SelectStage>(one.body) || std::holds_alternative<ScanStage>(one.body);
        }))
      text += "#include \"cpu/select.hpp\"\n";
    return text;
  }

  static const char* kinds(const Stage& stage) {
    static constexpr const char* names[] = {"rows", "matmul", "attention", "gather", "scatter",    "select",
                                            "scan", "bag",    "experts",   "check",  "collective", "stop"};
    return names[stage.body.index()];
  }

  std::string operand(int value_index, int64_t extra) const {
    const Value& value = plan_.graph.values()[static_cast<size_t>(value_index)];
    const Buffer& buffer = plan_.graph.buffers()[static_cast<size_t>(value.buffer)];
    const int64_t offset = value.offset * size_of(value.type) + extra;
    switch (buffer.kind) {
      case Buffer::Kind::input:
        return "{Operand::input, " + std::to_string(buffer.argument) + ", " + std::to_string(offset) + "}";
      case Buffer::Kind::output:
        return "{Operand::output, " + std::to_string(buffer.argument) + ", " + std::to_string(offset) + "}";
      case Buffer::Kind::temporary: break;
    }
    const Placement& place = plan_.placements.at(static_cast<size_t>(value.buffer));
    return std::string("{Operand::") + (place.own ? "own" : "arena") + ", 0, " + std::to_string(place.offset + offset) +
           "}";
  }

  // Pages are of no interest to a prefetch: neighbours become one entry.
  static std::vector<Load> merged(const std::vector<Load>& loads) {
    std::vector<Load> all;
    for (const Load& load : loads) {
      Load* last = all.empty() ? nullptr : &all.back();
      const bool same = last != nullptr && last->task == load.task && last->value == load.value;
      if (same && last->rows == 1 && load.rows == 1 && load.offset == last->offset + last->bytes)
        last->bytes += load.bytes;
      else if (same && load.rows > 1 && last->stride == load.stride && last->bytes == load.bytes &&
               load.offset == last->offset + last->rows * last->stride)
        last->rows += load.rows;
      else
        all.push_back(load);
    }
    return all;
  }

  void tables(std::ostream& out) {
    out << "\nconstexpr Operand kOperands[] = {\n";
    std::vector<int> first;
    int count = 0;
    for (size_t i = 0; i < plan_.stages.size(); ++i) {
      first.push_back(count);
      count += static_cast<int>(operands_[i].size());
      out << "    ";
      for (const int value : operands_[i]) out << operand(value, 0) << ", ";
      out << " // " << first.back() << ": stage " << i << ", " << in_comment(plan_.stages[i].name) << "\n";
    }
    out << "    {}};\n\n// Events and how often each is bumped in a step.\nconstexpr WaitFor kWaits[] = {\n    ";
    std::vector<int> first_wait, first_carried, first_signal;
    int waits = 0, signals = 0;
    for (const bool carried : {false, true}) {
      for (const Task& task : plan_.tasks) {
        (carried ? first_carried : first_wait).push_back(waits);
        for (const int event : carried ? task.carried : task.waits) {
          out << "{" << event << ", " << plan_.events.at(static_cast<size_t>(event)).threshold << "}, ";
          if (++waits % 12 == 0) out << "\n    ";
        }
      }
    }
    out << "{}};\nconstexpr int32_t kSignals[] = {\n    ";
    for (const Task& task : plan_.tasks) {
      first_signal.push_back(signals);
      for (const int event : task.signals) {
        out << event << ", ";
        if (++signals % 24 == 0) out << "\n    ";
      }
    }
    out << "-1};\n";
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
        out << "    {" << names_[function_of_[s]] << ", " << task.begin << ", " << task.end << ", " << index << ", "
            << task.stage << ", " << first[s] << ", " << operands_[s].size() << ", " << first_wait[t] << ", "
            << task.waits.size() << ", " << first_carried[t] << ", " << task.carried.size() << ", " << first_signal[t]
            << ", " << task.signals.size() << "},\n";
      }
      out << "    {}};\nconstexpr LoadEntry kLoads" << q << "[] = {\n";
      for (const Load& load : merged(queue.loads)) {
        // Its offset is of the value's buffer.
        const Value& value = plan_.graph.values()[static_cast<size_t>(load.value)];
        out << "    {" << operand(load.value, load.offset - value.offset * size_of(value.type)) << ", "
            << position.at(load.task) << ", " << load.rows << ", " << load.bytes << ", " << load.stride << "},\n";
      }
      out << "    {}};\n";
    }
    out << "\nconstexpr QueueEntry kQueues[] = {\n";
    for (size_t q = 0; q < plan_.queues.size(); ++q)
      out << "    {kTasks" << q << ", " << plan_.queues[q].tasks.size() << ", kLoads" << q << ", "
          << "std::size(kLoads" << q << ") - 1},\n";
    out << "};\nconstexpr Tables kTables{kQueues, kOperands, kWaits, kSignals, "
        << plan_.target.pages * plan_.target.page_bytes << ", " << plan_.tasks.size() << "};\n\n}  // namespace\n\n"
        << "extern \"C\" __attribute__((visibility(\"default\"))) const PlanInfo " << kInfoSymbol << "{kAbi, "
        << plan_.queues.size() << ", " << plan_.events.size() << ", " << plan_.tasks.size() << ", " << scratch_bytes_
        << "};\n"
        << "extern \"C\" __attribute__((visibility(\"default\"))) void " << kRunSymbol
        << "(const Launch* launch, int worker) {\n  run_worker(*launch, kTables, worker);\n}\n";
  }

  const Plan& plan_;
  std::map<std::string, size_t> known_;                 // body -> function
  std::vector<std::string> functions_, names_;          // by function
  std::map<size_t, std::vector<std::string>> used_by_;  // function -> stages
  std::vector<size_t> function_of_;                     // by stage
  std::vector<std::vector<int>> operands_;              // by stage: values
  int64_t scratch_bytes_ = 0;
};

}  // namespace

std::string emit_cpu(const Plan& plan) {
  return CpuEmitter(plan).source();
}

}  // namespace ark::plan

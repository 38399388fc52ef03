// Writes the tables of a plan's CUDA source and the kernel around them. See emit_cuda.hpp for what the source contains.
#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <map>
#include <sstream>
#include <variant>
#include <vector>

#include "compiler/emit/common/emit_functions.hpp"
#include "compiler/emit/common/emit_tables.hpp"
#include "compiler/passes/kv_append.hpp"
#include "compiler/passes/prologue_fusion.hpp"
#include "compiler/schedule/workspace.hpp"
#include "cuda/loop/group.cuh"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

// Pages prefetched beside a task that loads as much itself; beside others Target::in_flight are. More requests would
// delay the loads that tasks wait for (figures in docs/measurements.md).
constexpr int64_t kPagesBeside = 2;

const Plan& checked(const Plan& plan) {
  ErrorContext context;
  context.remedy = "This is a defect of the planner: please report it.";
  if (plan.queues.empty()) throw Error(ErrorKind::invalid_argument, "a plan without queues", context);
  return plan;
}

// In a multi-step plan: the event that all workers' last tasks signal, the number of these workers, and one of them.
struct Closing {
  int event = -1, workers = 0, leader = 0;
};

Closing closing_of(const Plan& plan) {
  Closing closing;
  for (size_t worker = plan.queues.size(); plan.multi_step && worker-- > 0;) {
    if (plan.queues[worker].tasks.empty()) continue;
    const Task& first = plan.tasks.at(static_cast<size_t>(plan.queues[worker].tasks.front()));
    closing.event = first.carried.at(0);
    closing.leader = static_cast<int>(worker);
    ++closing.workers;
  }
  return closing;
}

class CudaEmitter {
 public:
  explicit CudaEmitter(const Plan& plan) : plan_(checked(plan)), functions_(plan, Code::cuda) {}

  CudaSource source() {
    std::ostringstream out;
    out << "// Made by ark_torch from a plan of " << plan_.stages.size() << " stages, " << plan_.tasks.size()
        << " tasks and " << plan_.events.size() << " events for " << plan_.queues.size() << " workers.\n"
        << (functions_.by_groups() ? "#define ARK_LOOP_TRAPS\n" : "")
        << (shared_bytes() == loop::kSmallWorkspaceBytes ? "#define ARK_LOOP_SMALL_WORKSPACE\n" : "")
        << "#include \"cuda/loop/loop.cuh\"\n#include \"cuda/loop/ops.cuh\"\n#include \"cuda/loop/reduce.cuh\"\n"
        << rare_includes() << "\nnamespace {\n\nusing namespace ark::loop;\n";
    for (const std::string& text : functions_.texts()) out << "\n" << text;
    out << "\n";
    tables(out);
    frame(out);
    return {out.str(), functions_.scratch_bytes(), pointers(), shared_bytes()};
  }

 private:
  int shared_bytes() const { return functions_.by_groups() ? loop::kGroupWorkspaceBytes : workspace_bytes(plan_); }

  int pointers() const { return std::max(1, plan_.graph.inputs() + plan_.graph.outputs()); }

  bool has_packets() const {
    return std::any_of(plan_.placements.begin(), plan_.placements.end(),
                       [](const Placement& one) { return one.packets; });
  }

  bool has_pushes() const {
    return std::any_of(plan_.placements.begin(), plan_.placements.end(),
                       [](const Placement& one) { return one.pushed.ranks > 0; });
  }

  // Includes kernels that not all plans use only where needed, to save compile time.
  std::string rare_includes() const {
    std::string text;
    const auto include = [&](const char* header, auto&& is) {
      if (std::any_of(plan_.stages.begin(), plan_.stages.end(), is))
        text += std::string("#include \"cuda/loop/") + header + ".cuh\"\n";
    };
    if (has_packets()) text += "#include \"cuda/loop/packets.cuh\"\n";
    if (has_pushes()) text += "#include \"cuda/loop/pushed.cuh\"\n";
    include("matmul", [](const Stage& one) { return std::holds_alternative<MatmulStage>(one.body); });
    include("dequant", [](const Stage& one) {
      return std::ranges::any_of(matmuls_of(one), [](const MatmulStage& product) { return product.codes.bits != 0; });
    });
    include("products", [](const Stage& one) { return std::holds_alternative<ProductsStage>(one.body); });
    include("attention", [](const Stage& one) { return attention_of(one) != nullptr; });
    include("gather", [](const Stage& one) {
      return std::holds_alternative<GatherStage>(one.body) || std::holds_alternative<ScatterStage>(one.body) ||
             std::holds_alternative<CheckStage>(one.body);
    });
    include("select", [](const Stage& one) { return std::holds_alternative<SelectStage>(one.body); });
    include("scan", [](const Stage& one) { return std::holds_alternative<ScanStage>(one.body); });
    include("bag", [](const Stage& one) { return std::holds_alternative<BagStage>(one.body); });
    include("collective", [](const Stage& one) { return std::holds_alternative<CollectiveStage>(one.body); });
    include("experts", [](const Stage& one) { return std::holds_alternative<ExpertsStage>(one.body); });
    return text;
  }

  std::string operand(int value, int64_t extra = 0, bool aligned = false) const {
    const Place place = place_of(plan_, value, extra);
    const char* base = "pointer";
    int index = 0;
    switch (place.base) {
      case Place::arena: base = "arena"; break;
      case Place::packets: base = "packets"; break;
      case Place::own: base = "own"; break;
      default: index = place.argument + (place.base == Place::output ? plan_.graph.inputs() : 0);
    }
    return std::string("{Operand::") + base + ", " + (aligned ? "1, " : "0, ") + std::to_string(index) + ", " +
           std::to_string(place.offset) + "}";
  }

  void tables(std::ostream& out) {
    std::vector<int> first;
    int count = 0;
    out << "__device__ const Operand kOperands[] = {\n";
    const std::vector<StageFunctions::Unit>& units = functions_.units();
    for (size_t i = 0; i < units.size(); ++i) {
      const Stage& stage = plan_.stages[static_cast<size_t>(units[i].stage)];
      first.push_back(count);
      count += static_cast<int>(functions_.operands(i).size());
      out << "    ";
      const std::vector<int>& values = functions_.operands(i);
      for (size_t n = 0; n < values.size(); ++n) out << operand(values[n], 0, functions_.aligned(i, n)) << ", ";
      if (const auto* collective = std::get_if<CollectiveStage>(&stage.body)) {
        out << "{Operand::packets, 0, 0, " << collective->place << "}, {Operand::packets, 0, 0, " << collective->number
            << "}, ";
        count += 2;
      }
      out << " // " << first.back() << ": stage " << units[i].stage << ", " << in_comment(stage.name) << "\n";
    }
    first.push_back(count);
    out << "    {}};\n\n";
    const EventTables events(plan_);
    out << "// Events and how often each is bumped in a step.\n__device__ const WaitFor kWaits[] = {\n"
        << events.waits << "{}};\n__device__ const int kSignals[] = {\n"
        << events.signals << "-1};\n\n"
        << "// Tile, function, task and stage; first and number of operands, of waits, of signals, of "
           "loads.\n__device__ const TaskEntry kTasks[] = {\n";
    std::ostringstream queues, loads;
    size_t task_count = 0, load_count = 0;
    for (size_t worker = 0; worker < plan_.queues.size(); ++worker) {
      const Queue queue = in_one_go(plan_, {plan_.queues[worker].tasks, plan_.prefetches.at(worker)});
      queues << "    {" << task_count << ", " << queue.tasks.size() << "},\n";
      const std::vector<int> asked = write_loads(queue, loads);
      for (size_t position = 0; position < queue.tasks.size(); ++position) {
        const int index = queue.tasks[position];
        const Task& task = plan_.tasks.at(static_cast<size_t>(index));
        const auto t = static_cast<size_t>(index), waiting = static_cast<size_t>(task.head >= 0 ? task.head : index);
        const size_t unit = functions_.unit_of(task);
        out << "    {" << task.begin << ", " << task.end << ", " << functions_.function_of(unit) << ", " << index
            << ", " << task.stage << ", " << first[unit] << ", " << first[unit + 1] - first[unit] << ", "
            << events.first_wait[waiting] << ", " << events.wait_count[waiting] << ", " << events.first_signal[t]
            << ", " << events.signal_count[t] << ", " << load_count << ", " << asked[position] << "},\n";
        load_count += static_cast<size_t>(asked[position]);
      }
      task_count += queue.tasks.size();
    }
    out << "    {}};\n__device__ const LoadEntry kLoads[] = {\n"
        << loads.str() << "    {}};\n__device__ const QueueEntry kQueues[] = {\n"
        << queues.str() << "};\n\n";
  }

  // By position in the queue: the number of prefetches to issue when that task starts.
  std::vector<int> write_loads(const Queue& queue, std::ostream& out) const {
    std::vector<int> asked;
    const int64_t page = plan_.target.page_bytes;
    for (const std::vector<Load>& some : loads_ahead(queue, plan_.target.in_flight * page, kPagesBeside * page)) {
      asked.push_back(static_cast<int>(some.size()));
      for (const Load& load : some) {
        // The load's offset is relative to the buffer.
        const Value& value = plan_.graph.values()[static_cast<size_t>(load.value)];
        out << "    {" << operand(load.value, load.offset - value.offset * size_of(value.type)) << ", " << load.rows
            << ", " << load.bytes << ", " << load.stride << ", " << static_cast<int>(cache_of(load)) << "},\n";
      }
    }
    return asked;
  }

  // The second-level cache policy of a prefetch. Data that is evicted first once read is prefetched normally, unless
  // the whole plan uses evict_first.
  CachePolicy cache_of(const Load& load) const {
    const Task& task = plan_.tasks[static_cast<size_t>(load.task)];
    for (const Access& access : plan_.stages[static_cast<size_t>(task.stage)].accesses) {
      if (access.value != load.value || access.write) continue;
      const bool stays = access.cache == CachePolicy::evict_last;
      const bool first = access.cache == CachePolicy::evict_first && plan_.target.caching == CacheChoice::all_first;
      return stays || first ? access.cache : CachePolicy::normal;
    }
    return CachePolicy::normal;
  }
  bool hints_loads() const {
    return std::any_of(plan_.queues.begin(), plan_.queues.end(), [&](const Queue& queue) {
      return std::any_of(queue.loads.begin(), queue.loads.end(),
                         [&](const Load& load) { return cache_of(load) != CachePolicy::normal; });
    });
  }

  void frame(std::ostream& out) {
    const Closing closing = closing_of(plan_);
    out << "struct Plan {\n  static constexpr int kClosing = " << closing.event << ", kClosers = " << closing.workers
        << ", kLeader = " << closing.leader << ";\n"
        << "  static constexpr int kFunctions = " << functions_.names().size() << ";\n"
        << "  static constexpr bool kPackets = " << (has_packets() ? "true" : "false")
        << ", kPushes = " << (has_pushes() ? "true" : "false") << ";\n"
        << "  static constexpr bool kHintedLoads = " << (hints_loads() ? "true" : "false") << ";\n"
        << "  static ARK_LOOP const Operand* operands() { return kOperands; }\n"
        << "  static ARK_LOOP const WaitFor* waits() { return kWaits; }\n"
        << "  static ARK_LOOP const int* signals() { return kSignals; }\n"
        << "  static ARK_LOOP const TaskEntry* tasks() { return kTasks; }\n"
        << "  static ARK_LOOP const LoadEntry* loads() { return kLoads; }\n"
        << "  static ARK_LOOP const QueueEntry* queues() { return kQueues; }\n"
        << "  static ARK_LOOP void run(int function, Context context, Operands p) {\n    switch (function) {\n";
    for (size_t i = 0; i < functions_.names().size(); ++i) {
      const std::string &name = functions_.names()[i], &misaligned = functions_.misaligned()[i];
      out << "      case " << i << ": " << name << (misaligned.empty() ? "" : "<true>") << "(context, p); break;\n";
      if (!misaligned.empty()) out << "      case kFunctions + " << i << ": " << misaligned << "(context, p); break;\n";
    }
    out << "    }\n  }\n};\n\n}  // namespace\n\nextern \"C\" __global__ void __launch_bounds__(kThreads, 1) "
        << kLoopKernel << "(\n    const __grid_constant__ ark::loop::Launch<" << pointers()
        << "> launch) {\n  run_loop<Plan>(launch);\n}\n";
  }

  const Plan& plan_;
  const StageFunctions functions_;
};

}  // namespace

CudaSource emit_cuda(const Plan& plan) {
  return CudaEmitter(plan).source();
}

}  // namespace ark::compiler

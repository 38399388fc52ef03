// Writes the tables of a plan's CUDA source and the kernel around them. See emit_cuda.hpp for what the source contains.
#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <type_traits>
#include <variant>
#include <vector>

#include "compiler/emit/common/emit_functions.hpp"
#include "compiler/emit/common/emit_tables.hpp"
#include "compiler/passes/kv_append.hpp"
#include "compiler/passes/prologue_fusion.hpp"
#include "compiler/schedule/workspace.hpp"
#include "cuda/loop/launch.cuh"
#include "cuda/loop/lookahead.cuh"
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
    std::string out = made_from(plan_);
    if (functions_.by_groups()) out += "#define ARK_LOOP_TRAPS\n";
    if (shared_bytes() == loop::kSmallWorkspaceBytes) out += "#define ARK_LOOP_SMALL_WORKSPACE\n";
    for (const char* header : {"loop", "ops", "reduce"}) append(out, "#include \"cuda/loop/{}.cuh\"\n", header);
    append(out, "{}\nnamespace {{\n\nusing namespace ark::loop;\n", rare_includes());
    for (const std::string& text : functions_.texts()) append(out, "\n{}", text);
    out += "\n";
    tables(out);
    frame(out);
    return {std::move(out), functions_.scratch_bytes(), pointers(), shared_bytes(), aligned_pointers()};
  }

 private:
  int shared_bytes() const { return functions_.by_groups() ? loop::kGroupWorkspaceBytes : workspace_bytes(plan_); }

  int pointers() const { return std::max(1, plan_.graph.inputs() + plan_.graph.outputs()); }

  bool has_variant(size_t unit) const { return !functions_.misaligned()[functions_.function_of(unit)].empty(); }

  // Those of operands that a function expects to be aligned and has no variant for.
  std::vector<size_t> aligned_pointers() const {
    std::set<size_t> found;
    for (size_t i = 0; i < functions_.units().size(); ++i) {
      const std::vector<int>& values = functions_.operands(i);
      for (size_t n = 0; n < values.size(); ++n) {
        if (!functions_.aligned(i, n) || has_variant(i)) continue;
        const loop::Operand one = operand(values[n]);
        if (one.base == loop::Operand::pointer) found.insert(one.index);
      }
    }
    return {found.begin(), found.end()};
  }

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
        append(text, "#include \"cuda/loop/{}.cuh\"\n", header);
    };
    if (has_packets()) text += "#include \"cuda/loop/packets.cuh\"\n";
    if (has_pushes()) text += "#include \"cuda/loop/pushed.cuh\"\n";
    include("matmul", [](const Stage& one) { return std::holds_alternative<MatmulStage>(one.body); });
    include("dual", [](const Stage& one) {
      const auto* const product = std::get_if<MatmulStage>(&one.body);
      return product != nullptr && product->second.b >= 0;
    });
    include("dequant", [](const Stage& one) {
      return std::ranges::any_of(matmuls_of(one), [](const MatmulStage& product) { return product.codes.bits != 0; });
    });
    include("scaled", multiplies_float8);
    include("dequant_tiles", [](const Stage& one) {
      return std::ranges::any_of(matmuls_of(one), [](const MatmulStage& product) {
        return product.codes.bits != 0 && product.tile_columns > 0;
      });
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
    include("between", [](const Stage& one) {
      const auto* const body = std::get_if<CollectiveStage>(&one.body);
      return body != nullptr && body->nodes > 1;
    });
    include("experts", [](const Stage& one) { return std::holds_alternative<ExpertsStage>(one.body); });
    return text;
  }

  loop::Operand operand(int value, int64_t extra = 0, bool aligned = false) const {
    const Place place = place_of(plan_, value, extra);
    loop::Operand::Base base = loop::Operand::pointer;
    int index = 0;
    switch (place.base) {
      case Place::arena: base = loop::Operand::arena; break;
      case Place::packets: base = loop::Operand::packets; break;
      case Place::own: base = loop::Operand::own; break;
      default: index = place.argument + (place.base == Place::output ? plan_.graph.inputs() : 0);
    }
    return {base, aligned, static_cast<uint32_t>(index), place.offset};
  }

  // Begins a table, whose entries add() appends, and ends it with one that is never used.
  static void begin_table(std::string& out, const char* name) {
    append(out, "__device__ __align__(16) const char {}[] =\n", name);
  }
  template <class Entry>
  static void end_table(std::string& out) {
    add(out, Entry{});
    out += ";\n";
  }
  template <class Entry>
  static void add(std::string& out, const Entry& entry) {
    static_assert(std::has_unique_object_representations_v<Entry>);
    add_bytes(out, &entry, sizeof entry);
  }
  // As a string literal: nested initializers of ten thousand tasks take a compiler half a minute.
  static void add_bytes(std::string& out, const void* entry, size_t size) {
    const auto* const bytes = static_cast<const unsigned char*>(entry);
    out += "    \"";
    for (size_t i = 0; i < size; ++i) {
      out += '\\';
      if (bytes[i] >= 64) out += static_cast<char>('0' + bytes[i] / 64);
      if (bytes[i] >= 8) out += static_cast<char>('0' + bytes[i] / 8 % 8);
      out += static_cast<char>('0' + bytes[i] % 8);
    }
    out += '"';
  }

  void tables(std::string& out) const {
    std::vector<int> first;
    int count = 0;
    out += "// Tables are the bytes of their entries (cuda/loop/launch.cuh). Operands, by function:\n";
    begin_table(out, "kOperands");
    const std::vector<StageFunctions::Unit>& units = functions_.units();
    for (size_t i = 0; i < units.size(); ++i) {
      const Stage& stage = plan_.stages[static_cast<size_t>(units[i].stage)];
      first.push_back(count);
      std::vector<loop::Operand> all;
      const std::vector<int>& values = functions_.operands(i);
      for (size_t n = 0; n < values.size(); ++n)
        all.push_back(operand(values[n], 0, functions_.aligned(i, n) && has_variant(i)));
      if (const auto* collective = std::get_if<CollectiveStage>(&stage.body)) {
        all.push_back({loop::Operand::packets, 0, 0, collective->place});
        all.push_back({loop::Operand::packets, 0, 0, collective->number});
        if (collective->nodes > 1) all.push_back({loop::Operand::packets, 0, 0, collective->lane});
      }
      count += static_cast<int>(all.size());
      add_bytes(out, all.data(), all.size() * sizeof(loop::Operand));
      append(out, "  // {}: stage {}, {}\n", first.back(), units[i].stage, in_comment(stage.name));
    }
    first.push_back(count);
    const EventTables events(plan_);
    end_table<loop::Operand>(out);
    out += "\n// Events and how often each is bumped in a step.\n";
    begin_table(out, "kWaits");
    for (const EventTables::Wait& wait : events.waits) {
      add(out, loop::WaitFor{wait.event, static_cast<uint32_t>(wait.threshold)});
      out += '\n';
    }
    end_table<loop::WaitFor>(out);
    begin_table(out, "kSignals");
    for (const int signal : events.signals) {
      add(out, signal);
      out += '\n';
    }
    end_table<int>(out);
    out += "\n// By worker; with the first and the number of operands, waits, signals and loads.\n";
    begin_table(out, "kTasks");
    std::string queues, loads;
    begin_table(loads, "kLoads");
    size_t task_count = 0, load_count = 0, beyond = 0;
    for (size_t worker = 0; worker < plan_.queues.size(); ++worker) {
      const Queue queue = in_one_go(plan_, {plan_.queues[worker].tasks, plan_.prefetches.at(worker)});
      append(queues, "    {{{}, {}}},\n", task_count, queue.tasks.size());
      const std::vector<int> asked = write_loads(queue, loads);
      for (size_t position = 0; position < queue.tasks.size(); ++position) {
        const int index = queue.tasks[position];
        const Task& task = plan_.tasks.at(static_cast<size_t>(index));
        const auto t = static_cast<size_t>(index), waiting = static_cast<size_t>(task.head >= 0 ? task.head : index);
        const size_t unit = functions_.unit_of(task);
        const loop::TaskEntry entry{task.begin,
                                    task.end,
                                    static_cast<int>(functions_.function_of(unit)),
                                    index,
                                    task.stage,
                                    first[unit],
                                    first[unit + 1] - first[unit],
                                    events.first_wait[waiting],
                                    events.wait_count[waiting],
                                    events.first_signal[t],
                                    events.signal_count[t],
                                    static_cast<int>(load_count),
                                    asked[position]};
        add(out, entry);
        out += '\n';
        beyond += loop::fits_slot(entry) ? 0 : 1;
        load_count += static_cast<size_t>(asked[position]);
      }
      task_count += queue.tasks.size();
    }
    end_table<loop::TaskEntry>(out);
    append(out, "// Tasks with more entries than their slots have room for: {}.\n", beyond);
    end_table<loop::LoadEntry>(loads);
    append(out, "{}__device__ const QueueEntry kQueues[] = {{\n{}}};\n\n", loads, queues);
  }

  // By position in the queue: the number of prefetches to issue when that task starts.
  std::vector<int> write_loads(const Queue& queue, std::string& out) const {
    std::vector<int> asked;
    const int64_t page = plan_.target.page_bytes;
    for (const std::vector<Load>& some : loads_ahead(queue, plan_.target.in_flight * page, kPagesBeside * page)) {
      asked.push_back(static_cast<int>(some.size()));
      for (const Load& load : some) {
        // The load's offset is relative to the buffer.
        const Value& value = plan_.graph.values()[static_cast<size_t>(load.value)];
        add(out, loop::LoadEntry{operand(load.value, load.offset - value.offset * size_of(value.type)), load.rows,
                                 load.bytes, load.stride, static_cast<int64_t>(cache_of(load))});
        out += '\n';
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

  void frame(std::string& out) const {
    const Closing closing = closing_of(plan_);
    append(out,
           "struct Plan {{\n"
           "  static constexpr int kClosing = {}, kClosers = {}, kLeader = {};\n"
           "  static constexpr int kFunctions = {};\n"
           "  static constexpr bool kPackets = {}, kPushes = {};\n"
           "  static constexpr bool kHintedLoads = {};\n",
           closing.event, closing.workers, closing.leader, functions_.names().size(), has_packets(), has_pushes(),
           hints_loads());
    out +=
        "  static ARK_LOOP const Operand* operands() { return reinterpret_cast<const Operand*>(kOperands); }\n"
        "  static ARK_LOOP const WaitFor* waits() { return reinterpret_cast<const WaitFor*>(kWaits); }\n"
        "  static ARK_LOOP const int* signals() { return reinterpret_cast<const int*>(kSignals); }\n"
        "  static ARK_LOOP const TaskEntry* tasks() { return reinterpret_cast<const TaskEntry*>(kTasks); }\n"
        "  static ARK_LOOP const LoadEntry* loads() { return reinterpret_cast<const LoadEntry*>(kLoads); }\n"
        "  static ARK_LOOP const QueueEntry* queues() { return kQueues; }\n"
        "  static ARK_LOOP void run(int function, Context context, Operands p) {\n    switch (function) {\n";
    for (size_t i = 0; i < functions_.names().size(); ++i) {
      const std::string &name = functions_.names()[i], &misaligned = functions_.misaligned()[i];
      append(out, "      case {}: {}{}(context, p); break;\n", i, name, misaligned.empty() ? "" : "<true>");
      if (!misaligned.empty()) append(out, "      case kFunctions + {}: {}(context, p); break;\n", i, misaligned);
    }
    append(out,
           "    }}\n  }}\n}};\n\n}}  // namespace\n\nextern \"C\" __global__ void __launch_bounds__(kThreads, 1) {}(\n"
           "    const __grid_constant__ ark::loop::Launch<{}> launch) {{\n  run_loop<Plan>(launch);\n}}\n",
           kLoopKernel, pointers());
  }

  const Plan& plan_;
  const StageFunctions functions_;
};

}  // namespace

CudaSource emit_cuda(const Plan& plan) {
  return CudaEmitter(plan).source();
}

}  // namespace ark::compiler

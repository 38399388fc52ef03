// Writes one function per distinct stage body, together with the stages fused into its tasks. See emit_functions.hpp.
#include "compiler/emit/common/emit_functions.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <variant>

#include "compiler/emit/common/emit_tables.hpp"
#include "compiler/passes/kv_append.hpp"
#include "compiler/passes/prologue_fusion.hpp"
#include "cuda/loop/group.cuh"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

const char* name_of_kind(const Stage& stage) {
  static constexpr const char* names[] = {"rows",    "matmul",  "products",   "attention", "combine",
                                          "gather",  "scatter", "select",     "scan",      "bag",
                                          "experts", "check",   "collective", "stop"};
  static_assert(std::size(names) == std::variant_size_v<decltype(Stage::body)>);
  return attention_of(stage) != nullptr ? "attention" : names[stage.body.index()];
}

}  // namespace

std::string in_comment(const std::string& text) {
  std::string out;
  for (const char c : text) out += static_cast<unsigned char>(c) < 0x20 || c == '\\' ? ' ' : c;
  return out;
}

StageFunctions::StageFunctions(const Plan& plan, Code code) : plan_(plan), code_(code) {
  const size_t stages = plan.stages.size();
  for (size_t stage = 0; stage < stages; ++stage) units_.push_back({-1, static_cast<int>(stage)});
  std::vector<char> is_head(plan.tasks.size(), 0), runs(stages, 0), idle(stages, 0);
  for (const Task& task : plan.tasks)
    if (task.head >= 0) is_head[static_cast<size_t>(task.head)] = 1;
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    const Task& one = plan.tasks[task];
    const auto stage = static_cast<size_t>(one.stage);
    (one.head >= 0 || is_head[task] != 0 ? idle : runs)[stage] = 1;
    if (one.head >= 0 && unit_of(one) == units_.size())
      units_.push_back({plan.tasks[static_cast<size_t>(one.head)].stage, one.stage});
  }
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const bool needed = unit >= stages || runs[unit] != 0 || idle[unit] == 0;
    if (needed) {
      add(units_[unit]);
    } else {
      function_of_.push_back(0);
      operands_.emplace_back();
      aligned_.emplace_back();
    }
  }
}

size_t StageFunctions::unit_of(const Task& task) const {
  if (task.head < 0) return static_cast<size_t>(task.stage);
  const int head = plan_.tasks[static_cast<size_t>(task.head)].stage;
  size_t unit = plan_.stages.size();
  while (unit < units_.size() && (units_[unit].head != head || units_[unit].stage != task.stage)) ++unit;
  return unit;
}

// Writes the first half, which computes all of its stage, and the barrier after it.
void StageFunctions::write_head(FunctionWriter& writer, const Unit& unit) {
  const Stage& head = plan_.stages[static_cast<size_t>(unit.head)];
  const Stage& rest = plan_.stages[static_cast<size_t>(unit.stage)];
  for (const int buffer : kept_in(plan_, unit.stage, loop::kKeptBytes)) writer.keep(buffer);
  // Programs of rows leave the workspace alone.
  if (code_ == Code::cuda && std::holds_alternative<RowProgram>(head.body) &&
      may_stage_scales(writer, matmuls_of(rest))) {
    writer.open("");
    writer.turn_to(rest);
    stage_scales(writer, matmuls_of(rest));
    writer.close();
  }
  writer.open("");
  writer.turn_to(head);
  writer.line("[[maybe_unused]] constexpr int64_t begin = 0, end = {};", head.extent);
  write(writer, head);
  writer.close();
  writer.line("sync();");
  writer.turn_to(rest);
}

// Writes an attention with the programs that make its queries and the new position (kv_append.hpp). The programs run
// inside the attention, once it has issued its own loads, and leave their results in shared memory. They run
// concurrently: the queries' on threads from the block's start, the others on threads from its end.
void StageFunctions::write_appended(FunctionWriter& writer, const Stage& stage) {
  std::vector<const Stage*> programs{&stage};
  for (size_t i = 0; i + 1 < stage.tail.size(); ++i) programs.push_back(&stage.tail[i]);
  const bool all = keeps_all_heads(writer.graph(), stage);
  for (const int buffer : made_buffers(writer.graph(), stage)) writer.keep(buffer, all ? 1 : stage.extent);
  emit(writer, *attention_of(stage), [&] {
    constexpr int kThreadsOfRow = 64;
    for (size_t i = 0; i < programs.size(); ++i) {
      writer.open("");
      writer.turn_to(*programs[i]);
      writer.begin_with(i == 0 ? 0 : loop::kThreads - static_cast<int>(programs.size() - i) * kThreadsOfRow,
                        all ? 1 : stage.extent);
      emit(writer, std::get<RowProgram>(programs[i]->body));
      writer.close();
    }
  });
}

void StageFunctions::write(FunctionWriter& writer, const Stage& stage) {
  if (!stage.tail.empty() && attention_of(stage) != nullptr) return write_appended(writer, stage);
  std::visit([&](const auto& body) { emit(writer, body); }, stage.body);
  for (const Stage& next : stage.tail) {
    if (code_ == Code::cpu) writer.refuse("a task that does more than one stage");
    writer.line("sync();");
    writer.open("");
    writer.turn_to(next);
    write(writer, next);
    writer.close();
  }
}

// Whether all operands that should be aligned are, if their buffers are.
bool StageFunctions::starts_aligned(const FunctionWriter& writer) const {
  for (size_t i = 0; i < writer.operands().size(); ++i)
    if (writer.aligned()[i] && place_of(plan_, writer.operands()[i], 0).offset % kPieceAlignment != 0) return false;
  return true;
}

void StageFunctions::add(const Unit& unit) {
  const Stage& stage = plan_.stages[static_cast<size_t>(unit.stage)];
  FunctionWriter writer(plan_.graph, plan_.stages[static_cast<size_t>(unit.head < 0 ? unit.stage : unit.head)], code_);
  for (size_t buffer = 0; buffer < plan_.placements.size(); ++buffer)
    if (plan_.placements[buffer].packets) writer.poll(static_cast<int>(buffer), plan_.placements[buffer].pushed);
  if (unit.head >= 0) write_head(writer, unit);
  write(writer, stage);
  scratch_bytes_ = std::max(scratch_bytes_, writer.scratch_bytes());
  if (writer.operands().size() > kMostOperands) {
    throw Error(ErrorKind::invalid_argument, formatted("{} ({}) has {} operands, more than a task can have", stage.name,
                                                       stage.origin, writer.operands().size()));
  }
  const std::string body = writer.body();
  auto [known, fresh] = known_.try_emplace(body, texts_.size());
  if (fresh) {
    texts_.push_back({});
    std::string name = formatted("{}_{}", name_of_kind(stage), known->second);
    if (unit.head >= 0) name = formatted("{}_{}", name_of_kind(plan_.stages[static_cast<size_t>(unit.head)]), name);
    names_.push_back(name);
    misaligned_.push_back("");
  }
  if (!starts_aligned(writer)) misaligned_[known->second] = names_[known->second] + "_misaligned";
  function_of_.push_back(known->second);
  operands_.push_back(writer.operands());
  aligned_.push_back(writer.aligned());
  std::vector<std::string>& users = used_by_[known->second];
  const std::string before = unit.head < 0 ? "" : plan_.stages[static_cast<size_t>(unit.head)].name + ", ";
  users.push_back(in_comment(before + stage.name + ": " + stage.origin));
  std::string text;
  for (size_t i = 0; i < users.size() && i < 4; ++i) append(text, "// {}\n", users[i]);
  if (users.size() > 4) append(text, "// and {} more\n", users.size() - 4);
  const bool cuda = code_ == Code::cuda, groups = writer.by_groups() && plan_.target.name == "sm_90a";
  by_groups_ = by_groups_ || groups;
  const std::string &name = names_[known->second], &misaligned = misaligned_[known->second];
  const char* const of_task = "[[maybe_unused]] Context context, Operands p";
  const bool by_alignment = std::ranges::count(writer.aligned(), true) > 0;
  // Only in an inlined function does ptxas keep the warp groups' multiplications (wgmma) asynchronous.
  if (!misaligned.empty()) text += "template <bool kAligned>\n";
  if (cuda)
    append(text,
           "{} void {}({}) {{\n"
           "  [[maybe_unused]] const int64_t begin = context.task().begin, end = context.task().end;\n{}{}}}\n",
           groups ? "ARK_LOOP" : "__device__ __noinline__", name, of_task,
           by_alignment && misaligned.empty() ? "  [[maybe_unused]] constexpr bool kAligned = true;\n" : "", body);
  else
    append(text,
           "void {}([[maybe_unused]] const Context& context, char* const* p, [[maybe_unused]] int64_t begin, "
           "[[maybe_unused]] int64_t end) {{\n{}}}\n",
           name, body);
  if (!misaligned.empty())  // for operands that are not aligned
    append(text, "__device__ __noinline__ void {}({}) {{\n  {}<false>(context, p);\n}}\n", misaligned, of_task, name);
  texts_[known->second] = text;
}

}  // namespace ark::compiler

// Writes the plan as text after each pass, once the stages have been checked. See dump_passes.hpp.
#include "compiler/inspect/dump_passes.hpp"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <utility>

#include "compiler/graph/scalar_type.hpp"
#include "compiler/passes/cache_policy.hpp"
#include "compiler/verify/validator.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

void write_access(std::ostream& out, const Graph& graph, const Access& access) {
  const Value& value = graph.values()[static_cast<size_t>(access.value)];
  const char* kinds[] = {"input", "output", "temporary"};
  const Buffer& buffer = graph.buffers()[static_cast<size_t>(value.buffer)];
  out << "    " << (access.write ? "writes " : "reads ") << "value " << access.value << ": " << name_of(value.type)
      << "[";
  for (size_t dim = 0; dim < value.shape.size(); ++dim)
    out << (dim > 0 ? ", " : "") << value.shape[dim] << (static_cast<int>(dim) == access.axis ? " cut" : "");
  out << "] of " << kinds[static_cast<int>(buffer.kind)] << " " << value.buffer
      << (buffer.parameter ? ", parameter" : "") << (access.sparse ? ", sparse" : "");
  if (access.cache != CachePolicy::normal) out << ", " << name_of(access.cache);
  out << "\n";
}

void write_stage(std::ostream& out, const Graph& graph, const Stage& stage, const std::string& number) {
  out << "stage " << number << ": " << stage.kind << " " << stage.name << ", extent " << stage.extent << ", grain "
      << stage.grain << (stage.replicable ? ", replicable" : "") << " (" << stage.origin << ")\n";
  for (const Access& access : stage.accesses) write_access(out, graph, access);
  for (size_t i = 0; i < stage.tail.size(); ++i)
    write_stage(out, graph, stage.tail[i], number + ", tail " + std::to_string(i));
}

void write_schedule(std::ostream& out, const Plan& plan) {
  size_t loads = 0, asked = 0, replicas = 0, heads = 0;
  for (const Queue& queue : plan.queues) loads += queue.loads.size();
  for (const std::vector<Load>& some : plan.prefetches) asked += some.size();
  for (const Task& task : plan.tasks) {
    replicas += task.replica ? 1 : 0;
    heads += task.head >= 0 ? 1 : 0;
  }
  out << plan.tasks.size() << " tasks (" << replicas << " replicas, " << heads << " with a first half) on "
      << plan.queues.size() << " workers, " << plan.events.size() << " events, " << loads << " loads, " << asked
      << " prefetches, arena " << plan.arena_bytes << " bytes, own " << plan.own_bytes << " bytes, estimated "
      << plan.estimated_us << " us\n";
}

// Replaces characters that a file name cannot have.
std::string in_file_name(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return std::isalnum(c) == 0 && c != '-'; }, '_');
  return text;
}

void dump(const std::string& folder, const std::string& name, const Pass& pass, int number, const Plan& plan) {
  char order[8];
  std::snprintf(order, sizeof order, "%02d", number);
  std::error_code code;
  std::filesystem::create_directories(folder, code);
  const std::string path = folder + "/" + in_file_name(name) + "." + order + "_" + pass.name + ".txt";
  std::ofstream out(path);
  out << "after " << pass.name << " (" << pass.leaves << "), for " << plan.target.name << "\n";
  for (size_t i = 0; i < plan.stages.size(); ++i) write_stage(out, plan.graph, plan.stages[i], std::to_string(i));
  if (!plan.queues.empty()) write_schedule(out, plan);
  out.close();
  if (!out)
    throw Error(ErrorKind::system, "ARK_DUMP_PASSES: cannot write " + path,
                ErrorContext{-1, -1, "compile", 0, "Name a folder that this process may write to."});
}

}  // namespace

PassObserver pass_dumper(std::string folder, std::string name) {
  return [folder = std::move(folder), name = std::move(name)](const Pass& pass, int number, const Compilation& now) {
    try {
      check_stages(now.plan);
    } catch (const Error& error) {
      throw Error(error.kind(), std::string("after pass ") + pass.name + ": " + error.message(),
                  ErrorContext{-1, -1, "compile", 0, "This is a defect of that pass: please report it."});
    }
    dump(folder, name, pass, number, now.plan);
  };
}

}  // namespace ark::compiler

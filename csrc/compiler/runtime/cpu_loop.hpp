// A plan on the CPU: emitted, compiled, loaded, and run by worker threads step after step.
//
// The thread that calls run() is worker 0. A multi-step plan may run many steps in one launch (resident mode). The
// memory of a step (arena, own arenas, scratch, events) is a set that is created on first use and reused by later
// calls; concurrent callers have a set each. After a failed step its set is reset.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "compiler/runtime/saved_kernel.hpp"
#include "compiler/runtime/step_stamps.hpp"
#include "compiler/schedule/plan.hpp"
#include "jit/host_compiler.hpp"

namespace ark::compiler {

class CpuLoop {
 public:
  // Throws Error(invalid_argument) if the CPU target cannot run the plan, Error(system) with the compiler's messages.
  CpuLoop(Plan plan, jit::HostCompiler& compiler);
  // The same without a compiler, from what another process compiled. Throws Error(compile_failed) unless the plan is
  // the saved one.
  CpuLoop(Plan plan, const SavedKernel& saved);
  ~CpuLoop();

  // Runs one step. `inputs` and `outputs` are indexed by argument, as the graph's buffers number them. Throws Error:
  // out_of_range (an index), timeout (a wait that exceeded the limit). Thread-safe. Fills in `stamps` if given.
  void run(const void* const* inputs, void* const* outputs, StepStamps* stamps = nullptr);

  // Runs up to `most` steps of a multi-step plan, or until a task says stop. Returns the number of steps done. This
  // thread polls `interrupted`, if given; true ends the launch within a step, with Error(aborted).
  struct Steps {
    uint64_t most = 1;
    uint64_t stamped = 64;  // at most this many steps are stamped
    bool (*interrupted)(void* asker) = nullptr;
    void* asker = nullptr;
  };
  uint64_t run_steps(const void* const* inputs, void* const* outputs, const Steps& steps, StepStamps* stamps = nullptr);

  // Limit for all waits of a step together; zero: none.
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  // Runs a collective, on the thread that calls run(). Returns false if it failed; the host then has the reason.
  using Collective = bool (*)(void* host, int32_t node, const void* input, void* output);
  void set_collective(Collective collective, void* host);

  const Plan& plan() const { return plan_; }
  const std::string& source() const { return source_; }
  const std::string& key() const { return key_; }  // in the kernel cache
  bool from_cache() const { return from_cache_; }
  SavedKernel saved() const { return {source_, library_->bytes()}; }

 private:
  struct Memory;
  void load(const jit::HostCompiler::Result& compiled);
  [[noreturn]] void raise(const cpu::Report& report) const;

  const Plan plan_;
  const std::string source_;
  std::string key_;
  bool from_cache_ = false;
  std::unique_ptr<jit::LoadedLibrary> library_;
  void (*run_)(const cpu::Launch*, int) = nullptr;
  cpu::PlanInfo info_{};
  std::chrono::milliseconds timeout_ = std::chrono::minutes(10);
  Collective collective_ = nullptr;
  void* collective_host_ = nullptr;
  std::mutex mutex_;  // guards `idle_`
  std::vector<std::unique_ptr<Memory>> idle_;
};

}  // namespace ark::compiler

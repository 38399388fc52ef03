// A plan on the CPU: emitted, compiled, loaded, and run by worker threads, step after step.
//
// A multi-step plan may run many steps in one launch (resident mode). The thread that calls run() is worker 0. Memory
// of a step (arena, own arenas, scratch, events) is a set that is made on first use and taken again by the next call;
// callers at the same time have a set each. A step that fails leaves nothing behind: its set begins anew.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "compiler/runtime/step_stamps.hpp"
#include "compiler/schedule/plan.hpp"
#include "jit/host_compiler.hpp"

namespace ark::compiler {

class CpuLoop {
 public:
  // Throws Error(invalid_argument) for what the CPU target cannot run, Error(system) for what the compiler says.
  CpuLoop(Plan plan, jit::HostCompiler& compiler);
  ~CpuLoop();

  // One step: inputs and outputs by argument, as the graph's buffers number them. Throws Error: out_of_range (an
  // index), timeout (a wait that took longer than the limit). Any thread may call.
  // `stamps`, where given, is filled in.
  void run(const void* const* inputs, void* const* outputs, StepStamps* stamps = nullptr);

  // A multi-step plan's steps, at most so many, until a task says stop: how many were done. `interrupted`, where given,
  // is asked now and then on this thread; true ends the launch with Error(aborted), in the middle of a step.
  struct Steps {
    uint64_t most = 1;
    uint64_t stamped = 64;  // so many of them, where stamps are asked for
    bool (*interrupted)(void* asker) = nullptr;
    void* asker = nullptr;
  };
  uint64_t run_steps(const void* const* inputs, void* const* outputs, const Steps& steps, StepStamps* stamps = nullptr);

  // For all waits of a step together; zero: none.
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  // What runs collectives, on the thread that calls run(). False: it failed, and the host knows why.
  using Collective = bool (*)(void* host, int32_t node, const void* input, void* output);
  void set_collective(Collective collective, void* host);

  const Plan& plan() const { return plan_; }
  const std::string& source() const { return source_; }
  const std::string& key() const { return key_; }  // of the kernel cache
  bool from_cache() const { return from_cache_; }

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

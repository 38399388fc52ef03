// A plan on a GPU: emitted, compiled by NVRTC, loaded, and launched on the caller's stream as one kernel per step (a
// multi-step plan: many steps per launch, for a host that waits, see ark_torch.resident).
//
// Calls are asynchronous and may be captured in a CUDA graph, which may outlive the loop. Each stream and capture has
// its own memory set (step_memory.hpp). A plan with collectives has a single set: its launches are operations of the
// group, so they follow each other in the order that all ranks issue, and the count of steps is the packets' epoch.
// Events and the count of steps only grow, on the device, and are never reset between steps. A failed launch leaves its
// set as it was; the set is reset before its next launch.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/passes/lower_collectives.hpp"
#include "compiler/runtime/saved_kernel.hpp"
#include "compiler/runtime/step_memory.hpp"
#include "compiler/runtime/step_stamps.hpp"
#include "compiler/schedule/plan.hpp"
#include "jit/kernel.hpp"

namespace ark::loop {
struct Ranks;
struct Report;
}  // namespace ark::loop

namespace ark::compiler {

class CudaLoop {
 public:
  // Throws Error(invalid_argument) if the CUDA target cannot run the plan, or, with figures, if the kernel needs more
  // registers or shared memory than the device has; Error(system) with messages of the compiler or the driver.
  // `saved`: loads this instead of compiling; throws Error(compile_failed) unless the plan is the saved one.
  CudaLoop(Plan plan, int device, const SavedKernel* saved = nullptr);
  ~CudaLoop();

  // Runs one step. `inputs` and `outputs` are device memory, indexed by argument as the graph's buffers number them.
  // Throws errors found by an earlier step (out_of_range: an index; timeout: a wait), and Error(system) from the
  // driver. Thread-safe. If `stamps` is given and the stream is not capturing, waits for the step and fills it in.
  // `ranks`: the peers of a plan with collectives.
  void run(const void* const* inputs, void* const* outputs, CUstream stream, StepStamps* stamps = nullptr,
           const loop::Ranks* ranks = nullptr);

  // Launches up to `most` steps of a multi-step plan (or until a task says stop). Not allowed under capture. Before the
  // next launch, wait_steps() must be called with the result, on a stream ordered after this one.
  struct Launched {
    loop::Report* report = nullptr;
    uint32_t most = 0;                  // steps
    std::chrono::nanoseconds limit{0};  // per wait
  };
  Launched launch_steps(const void* const* inputs, CUstream stream, uint32_t most, const loop::Ranks* ranks = nullptr);
  // Returns the number of steps done. Polls `interrupted`; true ends the launch after a step, with Error(aborted).
  // Throws Error(timeout) if the launch does not end (launch_wait.hpp).
  uint64_t wait_steps(const Launched& launched, CUstream stream, const std::function<bool()>& interrupted);

  const Exchanges& exchanges() const { return exchanges_; }
  // Restarts a plan with collectives at step 1, in the memory of a new group. Waits for the device.
  void renew();
  // Where the last step that gave up waiting for a peer was left; empty: none.
  std::string left() const;

  // Limit for each wait of a step; zero: none.
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  const Plan& plan() const { return plan_; }
  const std::string& source() const { return source_.text; }
  const jit::Kernel& kernel() const { return *kernel_; }
  int shared_bytes() const;  // per block
  // Throws the error that an earlier step found. Called before any driver call: after a failed device assertion the
  // driver returns the same error from every call.
  void raise_if_failed();
  // The inputs (and, behind them, outputs) that must be at multiples of kPieceAlignment.
  const std::vector<size_t>& aligned() const { return source_.aligned; }
  SavedKernel saved() const;

 private:
  void launch(StepMemory& memory, const void* const* inputs, void* const* outputs, CUstream stream, bool stamped,
              const loop::Ranks* ranks, uint32_t most);
  std::chrono::nanoseconds limit_of(const loop::Ranks* ranks) const;  // per wait; zero: none
  void take_stamps(StepMemory& memory, CUstream stream, uint64_t begin_ns, StepStamps& stamps) const;

  const Plan plan_;
  const CudaSource source_;
  const Exchanges exchanges_;
  const int device_;
  const jit::Kernel* kernel_ = nullptr;
  std::chrono::milliseconds timeout_ = std::chrono::minutes(1);
  StepMemories memories_;
};

}  // namespace ark::compiler

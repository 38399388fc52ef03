// A plan on a GPU: emitted, compiled by NVRTC, loaded, and launched on the caller's stream as one kernel a step.
//
// Calls are asynchronous and may be captured in a CUDA graph, which may outlive the loop. Streams and captures have
// memory of their own (step_memory.hpp).
//
// A plan with collectives has one set of it: its launches follow each other, in the order that all ranks issue, since
// they are operations of the group; the count of steps is the packets' epoch.
//
// A multi-step plan runs many steps a launch, for a host that waits for it (ark_torch.resident).
//
// Nothing is zeroed between steps: events and the count of steps only grow, on the device. A launch that failed leaves
// its set as it was; before the next one it begins anew.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/passes/lower_collectives.hpp"
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
  // Throws Error(invalid_argument) for what the CUDA target cannot run, or with figures for a kernel that needs more
  // registers or shared memory than the device has; Error(system) for what the compiler or the driver says.
  CudaLoop(Plan plan, int device);
  ~CudaLoop();

  // One step: inputs and outputs by argument, as the graph's buffers number them; device memory. Throws what a step
  // before has found (out_of_range: an index; timeout: a wait), and Error(system) of the driver. Any
  // thread may call. `stamps`, where given, is filled in, and the call returns when the step is done; not under
  // capture. `ranks`: whom a plan with collectives exchanges packets with.
  void run(const void* const* inputs, void* const* outputs, CUstream stream, StepStamps* stamps = nullptr,
           const loop::Ranks* ranks = nullptr);

  // A multi-step plan's steps, at most so many (or until a task says stop), in one launch; not under capture. To be
  // waited for with what it returns, on a stream that comes after, before the next launch.
  struct Launched {
    loop::Report* report = nullptr;
    uint32_t most = 0;                  // steps
    std::chrono::nanoseconds limit{0};  // of a wait
  };
  Launched launch_steps(const void* const* inputs, CUstream stream, uint32_t most, const loop::Ranks* ranks = nullptr);
  // How many were done. `interrupted` is asked now and then: true ends the launch after a step, with Error(aborted).
  // Error(timeout): the launch does not end (launch_wait.hpp).
  uint64_t wait_steps(const Launched& launched, CUstream stream, const std::function<bool()>& interrupted);

  const Exchanges& exchanges() const { return exchanges_; }
  // A plan with collectives begins at step 1 again, in memory of a new group. Waits for the device.
  void renew();
  // Where the last step was left that waited for a peer; empty: none was.
  std::string left() const;

  // For each wait of a step; zero: none.
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  const Plan& plan() const { return plan_; }
  const std::string& source() const { return source_.text; }
  const jit::Kernel& kernel() const { return *kernel_; }
  int shared_bytes() const;  // of a block

 private:
  void launch(StepMemory& memory, const void* const* inputs, void* const* outputs, CUstream stream, bool stamped,
              const loop::Ranks* ranks, uint32_t most);
  std::chrono::nanoseconds limit_of(const loop::Ranks* ranks) const;  // of a wait; zero: none
  void raise_if_failed();
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

// A plan as one CUDA source for NVRTC: the stages' functions, which call the device library (kernels/cuda/loop), and
// the queues as data.
#pragma once

#include <string>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

inline constexpr char kLoopKernel[] = "loop_kernel";

// To be compiled without spills (Source::may_spill of jit/source.hpp): a function whose numbers do not fit the
// registers that 512 threads leave each other is a fault in a kernel, and its region goes elsewhere, with its name.
struct CudaSource {
  std::string text;
  int64_t scratch_bytes = 0;  // of each worker
  int pointers = 0;           // that a launch hands over: inputs, then outputs
  int shared_bytes = 0;       // of a block, as the launch asks for them
};

// Throws Error(invalid_argument) for what the CUDA target cannot run.
CudaSource emit_cuda(const Plan& plan);

}  // namespace ark::compiler

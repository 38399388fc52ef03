// A plan as one CUDA source for NVRTC: the stages' functions, which call the device library (kernels/cuda/loop), and
// the queues as data.
#pragma once

#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

inline constexpr char kLoopKernel[] = "loop_kernel";

// The source must compile without spills (Source::may_spill of jit/source.hpp): a function that does not fit the
// registers available to each of 512 threads is a kernel's defect, and its region falls back, with the function named.
struct CudaSource {
  std::string text;
  int64_t scratch_bytes = 0;    // per worker
  int pointers = 0;             // passed by a launch: inputs, then outputs
  int shared_bytes = 0;         // per block, requested at launch
  std::vector<size_t> aligned;  // the pointers that must be multiples of kPieceAlignment
};

// Throws Error(invalid_argument) if the CUDA target cannot run the plan.
CudaSource emit_cuda(const Plan& plan);

}  // namespace ark::compiler

// A plan as one CUDA source for NVRTC: the stages' functions, which call the device library (kernels/cuda/loop), and
// the queues as data.
#pragma once

#include <string>

#include "plan/plan.hpp"

namespace ark::plan {

inline constexpr char kLoopKernel[] = "loop_kernel";

// Bytes of a thread's registers that the function of a task, or the loop itself, may store in memory and load again: a
// few numbers that are needed again behind a call or a barrier, never what a loop works on. For sm_90a all models of
// tests/compile/test_cuda_sources.py need none; of tests/gpu, 32 bytes at most (attention with long heads, products of
// many rows in batches). For sm_80 functions need 24 and the loop 16. More is a fault in a kernel, which shall not go
// unnoticed. What is inlined counts as the loop's: CudaSource::most_spilled has as much for each.
inline constexpr int kMostSpilled = 64;

struct CudaSource {
  std::string text;
  int64_t scratch_bytes = 0;  // of each worker
  int pointers = 0;           // that a launch hands over: inputs, then outputs
  int shared_bytes = 0;       // of a block, as the launch asks for them
  int most_spilled = kMostSpilled;
};

// Throws Error(invalid_argument) for what the CUDA target cannot run.
CudaSource emit_cuda(const Plan& plan);

}  // namespace ark::plan

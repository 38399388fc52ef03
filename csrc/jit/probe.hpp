// One run of a known kernel on a device: does compiling, loading, launching and reading back work, end to end?
//
// For the doctor and the tests with GPUs. It uses memory and a stream of its own and waits for both; in relaxed capture
// mode, so that it may be called while a graph is captured, of which it becomes no part.
#pragma once

#include <cstddef>
#include <string>

namespace ark::jit {

// Entries "fill" and "sum" (ark_torch/kernels/cuda/probe.cuh).
std::string probe_stub();

struct ProbeResult {
  std::string device;  // its name
  std::string arch;
  double load_seconds = 0;  // compile or cache, and load; 0.0 when loaded before
  double fill_gb_per_s = 0;
  double sum_gb_per_s = 0;
  int registers = 0;  // of sum
};

// Throws Error(system) when anything fails, or the sum is wrong. `bytes` is rounded up to 16.
ProbeResult probe_device(int device, size_t bytes);

}  // namespace ark::jit

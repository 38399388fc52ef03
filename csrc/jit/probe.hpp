// Runs a known kernel on a device to check that compiling, loading, launching and reading back work end to end.
//
// Used by the doctor and the GPU tests. It waits for its own memory and stream. Relaxed capture mode allows calls while
// a graph is captured; the probe does not become part of the graph.
#pragma once

#include <cstddef>
#include <string>

namespace ark::jit {

// Entries "fill" and "sum" (ark_torch/kernels/cuda/probe.cuh).
std::string probe_stub();

struct ProbeResult {
  std::string device;  // its name
  std::string arch;
  double load_seconds = 0;  // compile or cache lookup, and load; 0.0 if already loaded
  double fill_gb_per_s = 0;
  double sum_gb_per_s = 0;
  int registers = 0;  // of sum
};

// Throws Error(system) if anything fails or the sum is wrong. `bytes` is rounded up to 16.
ProbeResult probe_device(int device, size_t bytes);

}  // namespace ark::jit

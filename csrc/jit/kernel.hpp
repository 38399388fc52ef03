// From a stub to a launched kernel.
//
// A kernel is a readable header in ark_torch/kernels/cuda; a stub of a few lines instantiates it under a plain name:
//   #include "cuda/probe.cuh"
//   extern "C" __global__ void fill(const __grid_constant__ ark::ProbeFill p) { ark::probe_fill<4>(p); }
// One stub is one compilation and may hold several entries. It takes exactly one parameter, a struct that host and
// device know alike; launch() compares its size with the kernel's own.
//
// Loading is eager (a kernel that spins on a flag deadlocks when another still has to be loaded), happens once for each
// device and process, and on a thread of its own in relaxed capture mode: whoever asks may be capturing a graph, which
// neither breaks nor records it. Kernels live as long as the process. All functions may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda/cuda_types.hpp"
#include "jit/settings.hpp"
#include "jit/source.hpp"

namespace ark::jit {

struct Kernel {
  CUfunction function = nullptr;
  std::string entry;
  int device = -1;
  int registers = 0;           // a thread
  int static_shared = 0;       // bytes a block
  int local = 0;               // bytes a thread: spills and arrays
  int max_threads = 0;         // a block
  int max_dynamic_shared = 0;  // bytes a block; already allowed, launch() needs no further call
  size_t param_bytes = 0;      // size of the parameter struct
  bool can_overlap = false;    // the device knows programmatic dependent launch
  bool from_cache = false;     // on disk, or prebuilt; else compiled in this process
};

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// What a device is to the compiler.
struct Target {
  int major = 0, minor = 0;
  std::string arch;  // "sm_90a"
};

// 9.0 -> sm_90a, 10.0 -> sm_100a, 12.0 -> sm_120, else sm_XY; below 8.0: Error naming the device.
Target target_of(int major, int minor, const std::string& device_name);

class KernelLibrary {
 public:
  // The library of a device, made with settings() at first use.
  static KernelLibrary& of(int device);

  // Compiled or from the cache, loaded, kept. The reference stays valid. Errors are not remembered. `fuse` and
  // `may_spill`: as in Source; the same with every call for a stub.
  const Kernel& get(const std::string& stub, const char* entry, bool fuse = false, bool may_spill = true);

  const Target& target() const;
  int device() const;
  int multiprocessors() const;
  int64_t cache_bytes() const;  // of the second level

  KernelLibrary(int device, Settings settings);
  ~KernelLibrary();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// How many blocks of this shape are resident at once on the whole device: the bound for grids that spin.
int resident_blocks(const Kernel& kernel, int threads, size_t dynamic_shared_bytes);

enum class LaunchMode {
  plain,
  cooperative,  // all blocks are resident at once, or the launch is an error; of the priority of a usual stream,
                // whatever its stream's, so that of two such kernels neither comes between the blocks of the other
  overlapped,   // may start while the kernel before it on the stream ends; it waits for that itself (begin_kernel() in
                // cuda/packet.cuh). Programmatic dependent launch, from compute capability 9.0; plain before that.
};

// Asynchronous on `stream`, capturable. `params` is the kernel's one struct.
void launch(const Kernel& kernel, Dim3 grid, Dim3 block, size_t dynamic_shared_bytes, CUstream stream,
            const void* params, size_t bytes, LaunchMode mode);

template <class Params>
void launch(const Kernel& kernel, Dim3 grid, Dim3 block, size_t dynamic_shared_bytes, CUstream stream,
            const Params& params, LaunchMode mode = LaunchMode::plain) {
  launch(kernel, grid, block, dynamic_shared_bytes, stream, &params, sizeof(Params), mode);
}

}  // namespace ark::jit

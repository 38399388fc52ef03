// From a stub to a launched kernel. A kernel is a header in ark_torch/kernels/cuda; a stub instantiates it under a
// plain name:
//   #include "cuda/probe.cuh"
//   extern "C" __global__ void fill(const __grid_constant__ ark::ProbeFill p) { ark::probe_fill<4>(p); }
// A stub is one compilation and may hold several entries. A kernel takes one parameter, a struct that host and device
// share; launch() checks its size. Loading is eager, because a kernel that spins on a flag deadlocks if another one
// must still be loaded. It happens once per device and process, on its own thread in relaxed capture mode, since the
// caller may be capturing a graph. Kernels live as long as the process. All functions are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/cuda_types.hpp"
#include "jit/settings.hpp"
#include "jit/source.hpp"

namespace ark::jit {

struct Kernel {
  CUfunction function = nullptr;
  std::string entry;
  int device = -1;
  int registers = 0;           // per thread
  int static_shared = 0;       // bytes per block
  int local = 0;               // bytes per thread: spills and arrays
  int max_threads = 0;         // per block
  int max_dynamic_shared = 0;  // bytes per block; already allowed, launch() needs no further call
  size_t param_bytes = 0;      // size of the parameter struct
  bool can_overlap = false;    // the device supports programmatic dependent launch
  bool from_cache = false;     // from disk or prebuilt; otherwise compiled in this process
};

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// A device as the compiler sees it.
struct Target {
  int major = 0, minor = 0;
  std::string arch;  // "sm_90a"
};

// 9.0 -> sm_90a, 10.0 -> sm_100a, 12.0 -> sm_120, else sm_XY. Below 8.0: throws an Error that names the device.
Target target_of(int major, int minor, const std::string& device_name);

class KernelLibrary {
 public:
  // A device's library, created with settings() at first use.
  static KernelLibrary& of(int device);

  // Compiles the kernel or takes it from the cache, loads and keeps it. The reference stays valid. Errors are not
  // cached. `fuse` and `may_spill`: as in Source, and equal in every call for a stub. `saved`: the stub's cubin, which
  // is then loaded instead.
  const Kernel& get(const std::string& stub, const char* entry, bool fuse = false, bool may_spill = true,
                    const std::vector<uint8_t>* saved = nullptr);
  // What get() loaded for a stub; empty if it loaded none.
  std::vector<uint8_t> cubin(const std::string& stub) const;

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

// The number of blocks of this shape that are resident at once on the device: the limit for grids that spin.
int resident_blocks(const Kernel& kernel, int threads, size_t dynamic_shared_bytes);

enum class LaunchMode {
  plain,
  // All blocks are resident at once, or the launch fails. It always has a default stream's priority, so that of two
  // such kernels neither runs between the blocks of the other.
  cooperative,
  // May start while the previous kernel on the stream ends; it waits for that itself (begin_kernel() in
  // cuda/packet.cuh). Programmatic dependent launch, from compute capability 9.0 on; plain before that.
  overlapped,
};

// Asynchronous on `stream`, and capturable. `params` is the kernel's single struct.
void launch(const Kernel& kernel, Dim3 grid, Dim3 block, size_t dynamic_shared_bytes, CUstream stream,
            const void* params, size_t bytes, LaunchMode mode);

template <class Params>
void launch(const Kernel& kernel, Dim3 grid, Dim3 block, size_t dynamic_shared_bytes, CUstream stream,
            const Params& params, LaunchMode mode = LaunchMode::plain) {
  launch(kernel, grid, block, dynamic_shared_bytes, stream, &params, sizeof(Params), mode);
}

}  // namespace ark::jit

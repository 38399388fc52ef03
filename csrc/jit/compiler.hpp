// Combines prebuilt kernels, the cache and NVRTC: takes a stub and an architecture, returns a cubin.
//
// A warm start does not even open NVRTC (seconds from a cold disk): its version, a part of the key, is in the name of
// its builtins library. If another NVRTC compiles in the end, the key is computed again.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "jit/kernel_cache.hpp"
#include "jit/nvrtc.hpp"
#include "jit/prebuilt.hpp"
#include "jit/settings.hpp"
#include "jit/source.hpp"

namespace ark::jit {

class Compiler {
 public:
  // driver_version 0: there is no driver. Only opens the cache's folder.
  Compiler(Settings settings, int driver_version, LibraryOpener opener = LibraryOpener::system());

  // Returns the kernel from the wheel (which counts as the cache), from the cache, or compiled. Throws
  // Error(compile_failed) if it does not compile. Thread-safe.
  CachedKernel get(const Source& source);
  // Compiles without the cache, with log and resources.
  Compiled compile(const Source& source);

  std::string nvrtc_version();
  std::string nvrtc_path();

 private:
  const Nvrtc& nvrtc();
  const std::vector<Header>& headers();
  Source complete(const Source& source) const;
  std::string version_by_name() const;

  const Settings settings_;
  const int driver_version_;
  const LibraryOpener opener_;
  const PrebuiltKernels prebuilt_;
  KernelCache cache_;
  std::mutex mutex_;  // guards the creation of the two below
  std::optional<Nvrtc> nvrtc_;
  std::optional<std::vector<Header>> headers_;
};

}  // namespace ark::jit

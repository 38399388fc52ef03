// Prebuilt kernels, the cache and NVRTC as one: a stub and an architecture in, a cubin out.
//
// On the warm path NVRTC is not even opened (seconds from a cold disk): its version, part of the key, stands in the
// name of its builtins library. Should another NVRTC turn out to compile in the end, the key is made again.
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
  // driver_version 0: for no driver here. Nothing is opened or read yet, but the cache's folder.
  Compiler(Settings settings, int driver_version, LibraryOpener opener = LibraryOpener::system());

  // From the wheel (which counts as the cache), from the cache, or compiled. Throws Error(system). May be called by any
  // thread.
  CachedKernel get(const Source& source);
  // Past the cache, with log and resources.
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
  std::mutex mutex_;  // guards the two below while they are made
  std::optional<Nvrtc> nvrtc_;
  std::optional<std::vector<Header>> headers_;
};

}  // namespace ark::jit

// NVRTC, NVIDIA's compiler as a library, opened at run time: CUDA C++ to a cubin, without a GPU or a toolkit.
//
// PyTorch's CUDA wheels bring it, each generation in a folder of its own; find_nvrtc() knows them. Its builtins library
// is opened first, by its full path: NVRTC would look for it only on the loader's path, and fail with error 7.
// NVRTC is thread-safe; an object may be used by any number of threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "jit/settings.hpp"
#include "jit/source.hpp"
#include "util/dynamic_library.hpp"

namespace ark::jit {

struct NvrtcCandidate {
  std::string library;   // full path, or a bare name for the loader's own search
  std::string builtins;  // full path; empty: none beside it
  int major = 0;         // 12 or 13
};

// Where NVRTC may be, best first. A library of a newer generation than the driver comes last, since that driver loads
// none of its cubins; driver_version 0: no driver to please. Only files that exist, and bare names.
std::vector<NvrtcCandidate> nvrtc_candidates(const Settings& settings, int driver_version);

class Nvrtc {
 public:
  // Opens the first candidate that works. Throws Error(system) that lists what was tried.
  static Nvrtc find(const Settings& settings, int driver_version, const LibraryOpener& opener);

  const std::string& path() const { return path_; }
  std::string version() const { return std::to_string(major_) + "." + std::to_string(minor_); }

  // What it is called with. From 12.9 on, without the cache that it shares with the driver (CUDA_CACHE_PATH): a cubin
  // from there comes without ptxas's report, and a kernel that spills would be let through.
  std::vector<std::string> options_of(const Source& source, const std::vector<std::string>& include_dirs) const;

  // Throws Error(system) with the beginning of the log when it does not compile.
  Compiled compile(const Source& source, const std::vector<Header>& headers,
                   const std::vector<std::string>& include_dirs, const std::string& name) const;

 private:
  struct Api;
  std::shared_ptr<const Api> api_;
  std::string path_;
  int major_ = 0, minor_ = 0;
};

}  // namespace ark::jit

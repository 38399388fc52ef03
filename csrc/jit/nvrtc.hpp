// NVRTC, NVIDIA's compiler as a library, loaded at run time: compiles CUDA C++ to a cubin without a GPU or a toolkit.
//
// PyTorch's CUDA wheels include it, each major version in its own folder. Its builtins library is opened first by full
// path, because NVRTC only searches the loader's path for it and fails with error 7. Thread-safe.
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

// Possible NVRTC libraries, best first: existing files and bare names. Major versions newer than the driver come last,
// because that driver cannot load their cubins. driver_version 0: no driver to consider.
std::vector<NvrtcCandidate> nvrtc_candidates(const Settings& settings, int driver_version);

class Nvrtc {
 public:
  // Opens the first candidate that works. Throws Error(compile_failed) that lists what was tried.
  static Nvrtc find(const Settings& settings, int driver_version, const LibraryOpener& opener);

  const std::string& path() const { return path_; }
  std::string version() const { return std::to_string(major_) + "." + std::to_string(minor_); }

  // The options for NVRTC. From 12.9 on they disable the cache that it shares with the driver (CUDA_CACHE_PATH): its
  // cubins come without ptxas's report, so a kernel that spills would pass.
  std::vector<std::string> options_of(const Source& source, const std::vector<std::string>& include_dirs) const;

  // Throws Error(compile_failed) with the beginning of the log if compilation fails.
  Compiled compile(const Source& source, const std::vector<Header>& headers,
                   const std::vector<std::string>& include_dirs, const std::string& name) const;

 private:
  struct Api;
  std::shared_ptr<const Api> api_;
  std::string path_;
  int major_ = 0, minor_ = 0;
};

}  // namespace ark::jit

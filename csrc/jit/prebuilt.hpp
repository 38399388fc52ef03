// Kernels that the wheel brings, compiled by nvcc when it was built (ARK_AOT=1): neither NVRTC nor a first-use compile.
//
// The folder ark_torch/prebuilt holds the files of kernel_files.hpp and index.json, which names the compiler. A kernel
// is found by the same kind of key as in the cache, over the headers that lie there now: edited headers, other options
// or another architecture find nothing, and NVRTC compiles as always. The folder is as trusted as the library beside
// it, whoever owns it; each cubin's hash is still verified. Read-only here; store_prebuilt() is what the build calls.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "jit/source.hpp"
#include "util/unique_fd.hpp"

namespace ark::jit {

class PrebuiltKernels {
 public:
  // An empty name, or a folder without an index: there are none. driver_version 0: for no driver here; a driver of an
  // older generation than the compiler loads none of its cubins, so there are none for it.
  PrebuiltKernels(const std::string& folder, int driver_version);

  bool any() const { return static_cast<bool>(folder_fd_); }
  const std::string& compiler() const { return compiler_; }  // "nvcc 13.0"

  std::optional<std::vector<uint8_t>> find(const std::string& version, const Source& source,
                                           const std::vector<Header>& headers) const;

 private:
  UniqueFd folder_fd_;
  std::string compiler_;
};

// What nvcc must be told for a stub, but input, output and includes.
std::vector<std::string> prebuilt_options(const std::string& arch);

// Puts a kernel into the folder, which must be there; `log`: what ptxas said. Throws Error(system).
void store_prebuilt(const std::string& folder, const std::string& version, const std::string& compiler,
                    const std::string& stub, const std::string& arch, std::vector<uint8_t> cubin,
                    const std::string& log, const std::vector<Header>& headers);

}  // namespace ark::jit

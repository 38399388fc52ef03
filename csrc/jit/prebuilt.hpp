// Kernels in the wheel, compiled by nvcc at build time (ARK_AOT=1), which need neither NVRTC nor a first-use compile.
//
// The folder ark_torch/prebuilt holds the files of kernel_files.hpp and index.json, which names the compiler. The key
// works as in the cache, over the current headers: edited headers, other options or another architecture find nothing,
// and NVRTC compiles. The folder is as trusted as the library beside it, whoever owns it, but cubin hashes are still
// verified. Only the build writes to it, with store_prebuilt().
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "jit/source.hpp"
#include "util/unique_fd.hpp"

namespace ark::jit {

class PrebuiltKernels {
 public:
  // An empty name or a folder without an index: no kernels. A driver older than the compiler's major version cannot
  // load its cubins, so it gets none. driver_version 0: there is no driver.
  PrebuiltKernels(const std::string& folder, int driver_version);

  bool any() const { return static_cast<bool>(folder_fd_); }
  const std::string& compiler() const { return compiler_; }  // "nvcc 13.0"

  std::optional<std::vector<uint8_t>> find(const std::string& version, const Source& source,
                                           const std::vector<Header>& headers) const;

 private:
  UniqueFd folder_fd_;
  std::string compiler_;
};

// nvcc's options for a stub, without input, output and includes.
std::vector<std::string> prebuilt_options(const std::string& arch);

// Stores a kernel in the existing folder; `log`: ptxas's output. Throws Error(system).
void store_prebuilt(const std::string& folder, const std::string& version, const std::string& compiler,
                    const std::string& stub, const std::string& arch, std::vector<uint8_t> cubin,
                    const std::string& log, const std::vector<Header>& headers);

}  // namespace ark::jit

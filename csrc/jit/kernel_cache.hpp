// Compiled kernels on disk, shared by all processes of a user. The key covers everything that a result depends on, so
// nothing is ever invalidated.
//
// Each key has three files (kernel_files.hpp), written by the process that holds <key>.lock (flock, which a dead holder
// releases). A cubin is used only if its hash matches the meta file; otherwise it is compiled again. Only this user may
// write to the folder: links, foreign owners and writable modes are rejected. Then, or if the disk is full or read-only
// or the lock holder does not finish, kernels are compiled in memory and one line says so.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "jit/kernel_files.hpp"
#include "jit/source.hpp"
#include "util/unique_fd.hpp"

namespace ark::jit {

struct CachedKernel {
  enum class Origin : uint8_t {
    cache,     // found, hash verified
    compiled,  // compiled and stored
    memory,    // compiled, not stored
  };
  std::vector<uint8_t> cubin;
  Origin origin = Origin::memory;
};

class KernelCache {
 public:
  using Log = std::function<void(const std::string&)>;
  using Compile = std::function<Compiled()>;

  // An empty folder name: nothing is stored. Never throws for a bad folder.
  KernelCache(std::string folder, Log log, std::chrono::milliseconds lock_wait = std::chrono::seconds(60));

  // Returns the kernel from the folder or compiles it. `afresh`: always compile and replace what is stored. Only throws
  // what `compile` throws. Any number of threads and processes may call it.
  CachedKernel get(const std::string& key, const std::string& version, const std::string& compiler,
                   const Source& source, const Compile& compile, bool afresh = false);

  // A small text file beside the kernels. Returns the stored text if `whole` accepts it, else the result of `make`,
  // which one process runs while the others wait. Returns nothing if nothing can be stored. Only throws what `make`
  // throws.
  std::optional<std::string> text(const std::string& name, const std::function<bool(const std::string&)>& whole,
                                  const std::function<std::string()>& make);

  bool stores() const { return static_cast<bool>(folder_fd_); }

 private:
  UniqueFd lock(const std::string& key);
  void complain(const std::string& why);  // one line in the life of this object

  const std::string folder_;
  const Log log_;
  const std::chrono::milliseconds lock_wait_;
  UniqueFd folder_fd_;
  std::atomic<bool> complained_{false};
};

}  // namespace ark::jit

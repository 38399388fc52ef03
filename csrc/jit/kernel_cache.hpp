// Compiled kernels on disk, shared by all processes of a user.
//
// For each key three files lie side by side (kernel_files.hpp), written by the one process that holds <key>.lock
// (flock: a dead holder lets go of it). A cubin is used only when its hash is the one in the meta file: anything cut
// short or altered is compiled again. The key holds everything that the result depends on, so nothing is ever
// invalidated.
//
// The folder must be ours alone to write: 0700 when made here; a link, a foreign owner or a mode that lets others write
// is not used. Then, and with a read-only or full disk, or when the holder of the lock does not finish, kernels are
// compiled in memory and one line says so: a cache is no reason to fail.
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

  // An empty folder name: nothing is stored. Never throws for what is wrong with the folder.
  KernelCache(std::string folder, Log log, std::chrono::milliseconds lock_wait = std::chrono::seconds(60));

  // From the folder, or compiled; `afresh`: compiled in any case, and what the folder has is replaced. Throws only what
  // `compile` throws. Any number of threads and processes may call.
  CachedKernel get(const std::string& key, const std::string& version, const std::string& compiler,
                   const Source& source, const Compile& compile, bool afresh = false);

  // A small file of text beside the kernels: what the folder has, where `whole` says that it is as it was written, or
  // else what `make` says, which one process does while the others wait for it. Nothing where nothing can be kept.
  // Throws only what `make` throws.
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

// The host's C++ compiler: the source of a plan in, a loaded shared library out.
//
// The compiler is run with a vector of arguments (no shell) in a folder of its own under the system's folder for
// temporary files, which holds the source and copies of the kernel headers: what was hashed is what is compiled. It is
// killed, with all that it started, when it takes longer than the limit. Results are kept by KernelCache, under a key
// that holds source, headers, options, the compiler's version and what `-march=native` means here. Only bytes whose
// hash was checked are loaded, from memory (memfd), so that nobody can exchange the file in between.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "jit/kernel_cache.hpp"
#include "jit/settings.hpp"
#include "jit/source.hpp"

namespace ark::jit {

// A shared library in memory; closed with the object.
class LoadedLibrary {
 public:
  // Throws Error(system).
  explicit LoadedLibrary(const std::vector<uint8_t>& bytes);
  ~LoadedLibrary();
  LoadedLibrary(LoadedLibrary&& other) noexcept;
  LoadedLibrary& operator=(LoadedLibrary&&) = delete;
  // Throws Error(system) where there is none of that name.
  void* symbol(const char* name) const;

 private:
  UniqueFd fd_;
  void* handle_ = nullptr;
};

class HostCompiler {
 public:
  struct Result {
    std::vector<uint8_t> library;
    CachedKernel::Origin origin = CachedKernel::Origin::memory;
    std::string key;
    std::string compiler;  // "g++ (Debian 12.2.0-14) 12.2.0"
  };

  // Nothing is run yet. `lock_wait` must not be shorter than `limit`: the holder of the lock compiles.
  explicit HostCompiler(Settings settings, std::chrono::milliseconds limit = std::chrono::seconds(300));

  // From the cache, or compiled. Throws Error(system) with the compiler's first error. Any thread may call.
  // `afresh`: compiled even where the cache has it.
  Result library(const std::string& source, bool afresh = false);

  // What library() keeps the source's result under: it changes with all that the result depends on. Throws as it does.
  std::string key(const std::string& source);
  KernelCache& cache() { return cache_; }

  // Its path and version. Throws Error(system) where there is none that works.
  std::string compiler();
  static std::vector<std::string> default_options();

 private:
  struct Tool {
    std::vector<std::string> command;  // the program's path, and what CXX has behind it
    std::string version, machine;
    std::string text() const;
  };
  const Tool& tool();
  const std::vector<Header>& headers();
  Source source_of(const std::string& text);
  std::string key_of(const Source& source);
  Compiled compile(const Source& source, const Tool& tool);

  const Settings settings_;
  const std::chrono::milliseconds limit_;
  KernelCache cache_;
  std::mutex mutex_;  // guards the two below while they are made
  std::optional<Tool> tool_;
  std::optional<std::vector<Header>> headers_;
};

}  // namespace ark::jit

// Compiles the source of a plan with the host's C++ compiler and loads the shared library.
//
// The compiler runs without a shell in its own temporary folder, which holds the source and copies of the kernel
// headers, so what was hashed is compiled. Past the time limit it is killed with its children. KernelCache keeps
// results under a key of source, headers, options, compiler version and the meaning of `-march=native`. Only bytes with
// a verified hash are loaded, from memory (memfd), so no file can be exchanged in between.
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

// A shared library in memory, closed with the object.
class LoadedLibrary {
 public:
  // Throws Error(system) or Error(compile_failed).
  explicit LoadedLibrary(const std::vector<uint8_t>& bytes);
  ~LoadedLibrary();
  LoadedLibrary(LoadedLibrary&& other) noexcept;
  LoadedLibrary& operator=(LoadedLibrary&&) = delete;
  // Throws Error(compile_failed) if there is no such symbol.
  void* symbol(const char* name) const;
  // What was loaded. Throws Error(system).
  std::vector<uint8_t> bytes() const;

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

  // Runs nothing yet. The cache's lock wait exceeds `limit`, because the lock holder compiles.
  explicit HostCompiler(Settings settings, std::chrono::milliseconds limit = std::chrono::seconds(300));

  // Returns the library from the cache or compiles it. Throws Error(compile_failed) with the compiler's first error.
  // Thread-safe. `afresh`: compile even if it is cached.
  Result library(const std::string& source, bool afresh = false);

  // The cache key of library()'s result, which covers everything that the result depends on. Throws as library() does.
  std::string key(const std::string& source);
  KernelCache& cache() { return cache_; }

  // Path and version of the compiler. Throws Error(compile_failed) if none works.
  std::string compiler();
  static std::vector<std::string> default_options();

 private:
  struct Tool {
    std::vector<std::string> command;  // the program's path and CXX's further words
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
  std::mutex mutex_;  // guards the creation of the two below
  std::optional<Tool> tool_;
  std::optional<std::vector<Header>> headers_;
};

}  // namespace ark::jit

// The input of a compilation: a stub, the kernel headers that it may include, and options.
//
// Headers are read once into memory, and both hashed and compiled from there, so edits during a compilation do no harm.
// They include each other relative to the kernels' folder ("cuda/probe.cuh", never "../x").
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ark::jit {

struct Header {
  std::string name;  // "cuda/probe.cuh"
  std::string text;
};

// Every .hpp, .h and .cuh in the folder, sorted by name. Throws Error(system) if there is none.
std::vector<Header> read_headers(const std::string& folder);

enum class Language : uint8_t {
  cuda,  // by NVRTC: <key>.cu and <key>.cubin
  cpp,   // by the host's compiler: <key>.cpp and <key>.so
};

struct Source {
  std::string stub;
  std::string arch;  // "sm_90a"; for C++, what `-march=native` means
  std::vector<std::string> options;
  bool line_info = true;  // source lines of instructions for profilers; half of a cubin's bytes
  Language language = Language::cuda;
  bool fuse = false;      // fuse products and sums into multiply-adds, which round once
  bool may_spill = true;  // a function may keep registers in memory (spills.hpp)
};

// All options of the compilation, ark's own first.
std::vector<std::string> all_options(const Source& source);

// What ptxas reports about one kernel.
struct Resources {
  std::string kernel;
  int registers = 0;
  int stack_bytes = 0;
  int spill_store_bytes = 0;
  int spill_load_bytes = 0;
  int shared_bytes = 0;
  std::map<std::string, int> spilled = {};  // bytes stored and loaded, per function that was not inlined
  bool multiplies_in_order = false;         // groups of warps wait for each of their multiplications (C7510)
};

struct Compiled {
  std::vector<uint8_t> cubin;  // or shared library
  std::string log;
  std::vector<Resources> resources;  // empty if the log does not tell
};

// Reads the lines of --ptxas-options=-v and skips unknown lines.
std::vector<Resources> parse_resources(const std::string& log);

}  // namespace ark::jit

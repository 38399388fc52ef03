// What is compiled: a stub, the kernel headers that it may include, and how.
//
// The headers are read once into memory, hashed from there and handed to the compiler from there: what was hashed is
// what is compiled, also while somebody edits them. They include one another relative to the kernels' folder
// ("cuda/probe.cuh", never "../x").
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

// Every .hpp, .h and .cuh under the folder, in the order of their names. Throws Error(system) when there is none.
std::vector<Header> read_headers(const std::string& folder);

enum class Language : uint8_t {
  cuda,  // by NVRTC: <key>.cu and <key>.cubin
  cpp,   // by the host's compiler: <key>.cpp and <key>.so
};

struct Source {
  std::string stub;
  std::string arch;  // "sm_90a"; what `-march=native` stands for
  std::vector<std::string> options;
  bool line_info = true;  // which source line an instruction is of, for profilers; half of a cubin's bytes
  Language language = Language::cuda;
  bool fuse = false;      // products and sums into multiply-adds, which round once
  bool may_spill = true;  // a function may keep some of a thread's registers in memory (spills.hpp)
};

// Every option of the compilation, those that ark always has first.
std::vector<std::string> all_options(const Source& source);

// What ptxas says about one kernel.
struct Resources {
  std::string kernel;
  int registers = 0;
  int stack_bytes = 0;
  int spill_store_bytes = 0;
  int spill_load_bytes = 0;
  int shared_bytes = 0;
  std::map<std::string, int> spilled = {};  // bytes stored and loaded by each function that was not inlined, if any
  bool multiplies_in_order = false;         // groups of warps wait for each of their multiplications (C7510)
};

struct Compiled {
  std::vector<uint8_t> cubin;  // or shared library
  std::string log;
  std::vector<Resources> resources;  // empty when the log does not tell
};

// Reads the lines that --ptxas-options=-v makes; unknown lines are skipped.
std::vector<Resources> parse_resources(const std::string& log);

}  // namespace ark::jit

// A compiled plan that one process saves and another loads without a compiler: the text that was compiled, and the
// shared library (CPU) or the cubin (GPU). Whoever loads it makes the plan again, for the same target, and so knows
// what the binary expects; a text that differs means that another version of the planner saved it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "util/error.hpp"

namespace ark::compiler {

struct SavedKernel {
  std::string source;
  std::vector<uint8_t> binary;
};

// Throws Error(compile_failed) unless `source`, which this process emitted, is what was saved.
inline void check_saved(const SavedKernel& saved, const std::string& source) {
  if (saved.source == source && !saved.binary.empty()) return;
  ErrorContext context;
  context.remedy = "Save the program again with this version.";
  throw Error(ErrorKind::compile_failed, "a saved region was planned otherwise than this ark_torch plans it", context);
}

}  // namespace ark::compiler

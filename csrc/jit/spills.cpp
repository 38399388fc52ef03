// Checks ptxas's report for spilled registers and names the function in the error. The comment before a function in the
// stub tells which operators it computes, so the user can see which part of a model is affected.
#include "jit/spills.hpp"

#include <sstream>
#include <string>

#include "util/error.hpp"

namespace ark::jit {

namespace {

// Describes a function of the stub, given its mangled name: "rows_3 (rms_norm: layers.0.n1)".
std::string named(const std::string& stub, const std::string& mangled) {
  std::istringstream lines(stub);
  std::string comment;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("// ", 0) == 0) {
      comment += (comment.empty() ? "" : "; ") + line.substr(3);
      continue;
    }
    const size_t begin = line.find("void "), end = line.find('(', begin);
    if (begin != std::string::npos && end != std::string::npos) {
      const std::string name = line.substr(begin + 5, end - begin - 5);
      if (mangled == name || mangled.find(std::to_string(name.size()) + name) != std::string::npos)
        return comment.empty() ? name : name + " (" + comment + ")";
    }
    comment.clear();
  }
  return mangled;
}

[[noreturn]] void refuse(const Source& source, const std::string& function, int bytes) {
  ErrorContext context;
  context.remedy = "Leave this region to another backend.";
  throw Error(ErrorKind::invalid_argument,
              named(source.stub, function) + " needs more registers than a thread of " + source.arch +
                  " can have: it would keep " + std::to_string(bytes) + " bytes of them in memory",
              context);
}

}  // namespace

void refuse_spills(const Source& source, const std::vector<Resources>& resources) {
  if (source.may_spill) return;
  for (const Resources& one : resources) {
    for (const auto& [function, bytes] : one.spilled)
      if (bytes > 0) refuse(source, function, bytes);
    const int own = one.spill_store_bytes + one.spill_load_bytes;
    if (own > 0) refuse(source, one.kernel, own);
  }
}

}  // namespace ark::jit

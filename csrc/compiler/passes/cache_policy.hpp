// What caches do with each access of a plan: chosen from what the plan knows of a value's next use, and from what the
// machine's caches were measured to gain (CacheCosts).
//
// Where nothing was measured the choice is the one that kernels were measured fast with: matrices of products of few
// rows make way first, all else is plain. What no kernel has an instruction for stays normal: see cache_hints.hpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// What an access touches, as far as caches care.
enum class OperandKind : uint8_t {
  weight,      // a parameter
  state,       // an input that the plan writes: a cache of keys and values
  table,       // rows of it, known at run time
  stream,      // another input, or a result
  packets,     // small results between workers
  activation,  // other results between stages
};

// When each buffer is read again.
class NextUses {
 public:
  explicit NextUses(const Plan& plan);

  // Bytes that the step touches between this stage and the next that reads the buffer; of inputs that nobody reads
  // again in this step, until the next step does. -1: never.
  double bytes_until_read(size_t stage, const Access& access) const;
  // That the step touches, each stage's once.
  double step_bytes() const { return before_.back(); }

 private:
  const Plan& plan_;
  std::vector<double> before_;              // by stage, and of all: bytes of the stages before it
  std::vector<std::vector<size_t>> reads_;  // by buffer: stages that read it, in order
};

OperandKind kind_of(const Plan& plan, const Access& access);
// Sets `cache` of each access.
void choose_cache_policies(Plan& plan);

const char* name_of(CachePolicy policy);
const char* name_of(OperandKind kind);
// "auto", "none", "all-first", "all-last". Throws Error(invalid_argument) for another name.
CacheChoice cache_choice(const std::string& name);
const char* name_of(CacheChoice choice);

}  // namespace ark::compiler

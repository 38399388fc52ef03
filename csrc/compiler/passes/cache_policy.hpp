// Chooses the cache policy of each access, from when the plan uses the value next and from what was measured to pay on
// this machine (CacheCosts).
//
// Without measurements the choice is the one with which the kernels were tuned: matrices of products of few rows are
// evicted first, and so are rows of tables that do not fit into the cache together. All else is plain. Accesses for
// which no kernel has an instruction stay normal; see cache_hints.hpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Kinds of operands, as far as caches are concerned.
enum class OperandKind : uint8_t {
  weight,      // a parameter
  state,       // an input that the plan writes: a KV cache
  table,       // rows selected at run time
  stream,      // another input, or a result
  packets,     // small results passed between workers
  activation,  // other results between stages
};

// When each buffer is read next.
class NextUses {
 public:
  explicit NextUses(const Plan& plan);

  // Bytes that the step touches between this stage and the next one that reads the buffer. For an input that this step
  // does not read again, counts until the next step's read. -1: never.
  double bytes_until_read(size_t stage, const Access& access) const;
  // Bytes that the step touches, summed over its stages.
  double step_bytes() const { return before_.back(); }

 private:
  const Plan& plan_;
  std::vector<double> before_;              // by stage, plus a total: bytes touched by the stages before it
  std::vector<std::vector<size_t>> reads_;  // by buffer: the stages that read it, in order
};

OperandKind kind_of(const Plan& plan, const Access& access);
// Sets `cache` and `prefetch` of each access.
void choose_cache_policies(Plan& plan);

const char* name_of(CachePolicy policy);
const char* name_of(Prefetch prefetch);
const char* name_of(OperandKind kind);
// "auto", "none", "all-first", "all-last". Throws Error(invalid_argument) for another name.
CacheChoice cache_choice(const std::string& name);
const char* name_of(CacheChoice choice);

}  // namespace ark::compiler

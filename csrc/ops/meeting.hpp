// What the operators of this folder ask of a group before they begin: its backend, and a word between all ranks' hosts.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "process_group/process_group_ark.hpp"

namespace ark::ops {

// The group's backend, and with what name an error calls the operator.
ProcessGroupArk& backend_of(const std::string& group, const char* operation);

// Collective, on CPU tensors: the words of all ranks, by rank. As many on every rank. Zero: the group's own timeout.
std::vector<std::vector<int64_t>> tell_all(ProcessGroupArk& group, const std::vector<int64_t>& words,
                                           std::chrono::milliseconds timeout = {});

// What ranks compare before an operator begins. The first one of every list says which operator.
struct Field {
  const char* what;  // "dtype"
  int64_t value;
};

// Collective: all ranks call it with as many fields and words. Throws what `checked` throws, when the others have been
// told, and Error(mismatch) where another rank refused its arguments or has another value of a field; else gives all
// ranks' words, by rank. `known`: calls whose fields are alike are compared once, and then no words are told (the
// result is empty).
std::vector<std::vector<int64_t>> compare(ProcessGroupArk& group, const CallSite& site, size_t fields,
                                          const std::function<std::vector<Field>()>& checked,
                                          const std::vector<int64_t>& words, bool known);

}  // namespace ark::ops

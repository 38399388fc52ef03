// What operators need from a group: its backend, an all-to-all, and an exchange of words between all ranks' hosts.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "process_group/process_group_ark.hpp"

namespace ark::ops {

// Returns the group's backend. `operation`: the operator's name in errors.
ProcessGroupArk& backend_of(const std::string& group, const char* operation);

// torch.distributed.all_to_all_single(), and the wait for it. Sizes count elements of flat tensors, by rank.
void all_to_all_single(ProcessGroupArk& group, at::Tensor& out, at::Tensor in, std::vector<int64_t> received,
                       std::vector<int64_t> sent);

// Collective, on CPU tensors: returns all ranks' words, by rank. Every rank passes equally many. Zero: the group's
// timeout.
std::vector<std::vector<int64_t>> tell_all(ProcessGroupArk& group, const std::vector<int64_t>& words,
                                           std::chrono::milliseconds timeout = {});

// A value that ranks compare before an operator begins. The first field of every list identifies the operator.
struct Field {
  const char* what;  // "dtype"
  int64_t value;
};

// Collective: every rank passes equally many fields and words. If `checked` throws, tells the other ranks and rethrows.
// Throws Error(mismatch) if another rank refused its arguments or has a different field. Otherwise returns all ranks'
// words, by rank. `known`: calls with equal fields are compared only once, and the result is empty.
std::vector<std::vector<int64_t>> compare(ProcessGroupArk& group, const CallSite& site, size_t fields,
                                          const std::function<std::vector<Field>()>& checked,
                                          const std::vector<int64_t>& words, bool known);

}  // namespace ark::ops

// What the operators of this folder ask of a group before they begin: its backend, and a word between all ranks' hosts.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <string>
#include <vector>

#include "process_group/process_group_ark.hpp"

namespace ark::ops {

// The group's backend, and with what name an error calls the operator.
ProcessGroupArk& backend_of(const std::string& group, const char* operation);

// Collective, on CPU tensors: the words of all ranks, by rank. As many on every rank. Zero: the group's own timeout.
std::vector<std::vector<int64_t>> tell_all(ProcessGroupArk& group, const std::vector<int64_t>& words,
                                           std::chrono::milliseconds timeout = {});

}  // namespace ark::ops

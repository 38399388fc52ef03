// See the header.
#include "ops/meeting.hpp"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>

namespace ark::ops {

ProcessGroupArk& backend_of(const std::string& group, const char* operation) {
  const auto made = c10d::resolve_process_group(group);
  for (const auto type : {c10::kCPU, c10::kCUDA}) {
    try {
      if (auto* const ark = dynamic_cast<ProcessGroupArk*>(made->getBackend(type).get())) return *ark;
    } catch (const c10::Error&) {  // no backend for this device
    }
  }
  throw Error(
      ErrorKind::invalid_argument, "the group's backend is not 'ark'",
      ErrorContext{made->getRank(), -1, operation, 0, "Make it with init_process_group(\"ark\") or new_group."});
}

std::vector<std::vector<int64_t>> tell_all(ProcessGroupArk& group, const std::vector<int64_t>& words,
                                           std::chrono::milliseconds timeout) {
  const int size = group.getSize();
  const auto count = static_cast<int64_t>(words.size());
  at::Tensor mine = at::empty({count}, at::kLong), all = at::empty({size * count}, at::kLong);
  std::copy(words.begin(), words.end(), mine.mutable_data_ptr<int64_t>());
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  if (timeout.count() > 0) options.timeout = timeout;
  group._allgather_base(all, mine, options)->wait();
  std::vector<std::vector<int64_t>> told;
  for (int r = 0; r < size; ++r) {
    const int64_t* const from = all.const_data_ptr<int64_t>() + r * count;
    told.emplace_back(from, from + count);
  }
  return told;
}

}  // namespace ark::ops

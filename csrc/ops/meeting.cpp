// Exchanges the ranks' words by an all_gather on CPU tensors and compares them. A rank that refuses its arguments still
// takes part, with a special value, so that the others get an error at once instead of a timeout.
#include "ops/meeting.hpp"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <optional>

#include "process_group/work.hpp"

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

void all_to_all_single(ProcessGroupArk& group, at::Tensor& out, at::Tensor in, std::vector<int64_t> received,
                       std::vector<int64_t> sent) {
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  wait_for(group.alltoall_base(out, in, received, sent, options));
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
  wait_for(group._allgather_base(all, mine, options));
  std::vector<std::vector<int64_t>> told;
  for (int r = 0; r < size; ++r) {
    const int64_t* const from = all.const_data_ptr<int64_t>() + r * count;
    told.emplace_back(from, from + count);
  }
  return told;
}

std::vector<std::vector<int64_t>> compare(ProcessGroupArk& group, const CallSite& site, size_t fields,
                                          const std::function<std::vector<Field>()>& checked,
                                          const std::vector<int64_t>& words, bool known) {
  // A rank that refused a possibly known call cannot know whether the others meet, so it only waits briefly.
  constexpr std::chrono::milliseconds kShort{5000};
  std::vector<Field> mine;
  try {
    mine = checked();
  } catch (const Error&) {
    if (group.getSize() == 1) throw;
    try {
      tell_all(group, std::vector<int64_t>(fields + words.size(), -1), known ? kShort : std::chrono::milliseconds{});
    } catch (const std::exception&) {  // report the first error
    }
    throw;
  }
  std::vector<int64_t> all;
  for (const Field& field : mine) all.push_back(field.value);
  if (group.getSize() == 1) return {words};
  const std::vector<int64_t> key = all;
  if (known && group.agreed(key)) return {};
  all.insert(all.end(), words.begin(), words.end());
  const auto told = tell_all(group, all);
  std::vector<std::vector<int64_t>> theirs;
  for (int r = 0; r < group.getSize(); ++r) {
    if (told[r][0] < 0)
      throw Error(ErrorKind::mismatch, "rank " + std::to_string(r) + " refused its arguments",
                  ErrorContext{site.rank, r, site.operation, 0, "See that rank's error."});
    for (size_t f = 0; f < fields; ++f) {
      if (told[r][f] == told[0][f]) continue;
      throw Error(ErrorKind::mismatch,
                  "rank " + std::to_string(r) + " has another " + mine[f].what + " than rank 0 (" +
                      std::to_string(told[r][f]) + ", " + std::to_string(told[0][f]) + ")",
                  ErrorContext{site.rank, r, site.operation, 0, "Pass the same on every rank."});
    }
    theirs.emplace_back(told[r].begin() + static_cast<std::ptrdiff_t>(fields), told[r].end());
  }
  if (known) group.agree(key, true);
  return theirs;
}

}  // namespace ark::ops

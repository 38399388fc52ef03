// The measured table, the choice, and the exchange between ranks.
#include "collectives/cuda/cuda_dispatch.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>

namespace ark {

namespace {

// Flags of the last word.
constexpr uint64_t kPeerAccess = 3, kAnyOrder = 4, kNcclLeavesP2p = 8, kToMeasure = 16, kNcclOfModel = 32;

}  // namespace

CudaDispatch CudaDispatch::measured(int ranks) {
  // Measured on H200 (docs/measurements.md), except relay_from and more than four ranks. Large sums run alongside
  // computation, which rings of all multiprocessors slow down most. So they use bulk rings, then copy engines for the
  // largest sizes; two ranks' captured steps, which wait for no host, use copy engines sooner.
  CudaDispatch made;
  if (ranks <= 2) {
    made.one_shot_to = 512 << 10;
    made.part_bytes = 64 << 20;
    made.bulk_from = 32 << 20;
    made.ring_blocks = 32;
    made.copy_engine_from = 128 << 20;
    made.in_line_to = 64 << 20;
    made.all_gather_engine_from = 64 << 20;
    made.step_copy_engine_from = 24 << 20;
    made.step_reduce_scatter_from = made.step_move_from = 1 << 20;
  } else if (ranks <= 4) {
    made.one_shot_to = 160 << 10;
    made.bulk_from = 16 << 20;
    made.ring_blocks = 32;
    made.part_bytes = 8 << 20;
    made.copy_engine_from = 512 << 20;
    made.step_all_reduce_from = made.step_reduce_scatter_from = made.step_move_from = 1 << 20;
    made.step_all_reduce_blocks = 16;
  }
  return made;
}

CudaDispatch CudaDispatch::measured(int ranks, const std::map<std::string, uint64_t>& numbers) {
  CudaDispatch made = measured(ranks);
  for (const auto& [name, number] : numbers) {
    const auto* field = std::find_if(std::begin(kCudaDispatchFields), std::end(kCudaDispatchFields),
                                     [&name = name](const auto& one) { return name == one.name; });
    if (field == std::end(kCudaDispatchFields))
      throw Error(ErrorKind::invalid_argument, "dispatch table: cuda: unknown field '" + name + "'");
    made.*field->value = number;
  }
  // Who measured copy engines on a machine has not measured them in captured steps.
  if (numbers.count("copy_engine_from") != 0 && numbers.count("step_copy_engine_from") == 0)
    made.step_copy_engine_from = CudaDispatch::kNever;
  return made;
}

CudaDispatch CudaDispatch::through_host(int ranks, bool by_nccl) const {
  CudaDispatch dispatch = *this;
  for (const CudaDispatchField& field : kCudaDispatchFields)
    if (field.on_host) dispatch.*field.value = *field.on_host;
  if (dispatch.nccl_of_model)
    for (const NcclSizes& sizes : kNcclSizes) dispatch.*sizes.from = dispatch.*sizes.to = kNever;
  dispatch.nccl_of_model = false;
  if (!by_nccl) return dispatch;
  // Measured for all_reduces of two H200 (docs/collectives.md); other collectives move their bytes the same way. Host
  // memory is faster below and above this range; the upper bound is where the curves cross.
  constexpr uint64_t kFrom = 1 << 20, kTo = 6 << 20;
  // The sum of two values is the same in either order.
  const bool sums = any_order || ranks <= 2;
  for (const NcclSizes& sizes : kNcclSizes) {
    if ((sizes.sums && !sums) || dispatch.*sizes.from != kNever || dispatch.*sizes.to != kNever) continue;
    dispatch.*sizes.from = kFrom, dispatch.*sizes.to = kTo;
  }
  return dispatch;
}

std::string CudaDispatch::step_carried() const {
  std::string list;
  for (const auto& [name, from] : {std::pair(std::string("all_reduces"), step_all_reduce_from),
                                   {"reduce_scatters", step_reduce_scatter_from},
                                   {"moves", step_move_from},
                                   {"sends", step_send_from}}) {
    if (from == kNever || step_blocks == 0) continue;
    list += (list.empty() ? " carry " : ", ") + name + " from " + std::to_string(from >> 10) + " KB on";
    if (name == "all_reduces" && step_all_reduce_blocks < step_blocks)
      list += " (" + std::to_string(step_all_reduce_blocks) + " of them)";
  }
  if (!list.empty()) list = std::to_string(step_blocks) + " blocks" + list;
  if (step_copy_engine_from < copy_engine_from)
    list += (list.empty() ? "" : ", ") + std::string("copy engines carry all_reduces from ") +
            std::to_string(step_copy_engine_from >> 10) + " KB on";
  return list;
}

void CudaDispatch::leave_step_rings() {
  step_all_reduce_from = step_reduce_scatter_from = step_move_from = step_send_from = kNever;
}

void CudaDispatch::leave_bulk_rings() {
  leave_step_rings();
  bulk_from = bulk_move_from = bulk_send_from = kNever;
}

CudaDispatch choose_dispatch(const std::vector<CudaRule>& rules, int size, const std::string& model) {
  for (const CudaRule& rule : rules)
    if (size <= rule.max_ranks) return rule.dispatch;
  CudaDispatch made = CudaDispatch::measured(size);
  made.give_nccl(model, size);
  return made;
}

CudaDispatch agree_on_dispatch(KeyValueStore& store, int rank, int size, const std::vector<CudaRule>& rules,
                               const DispatchLimits& limits, const std::function<void()>& check) {
  constexpr size_t kFields = std::size(kCudaDispatchFields), kWords = kFields + 1;
  CudaDispatch mine = choose_dispatch(rules, size, limits.model);
  mine.buffer_bytes = std::min(mine.buffer_bytes, limits.buffer_bytes);
  for (const CudaDispatchField& field : kCudaDispatchFields)
    if (field.fast && !limits.fast) mine.*field.value = CudaDispatch::kNever;
  mine.peer_access = limits.peer_access;
  mine.any_order = limits.fast;
  mine.nccl_leaves_p2p = limits.nccl_leaves_p2p;
  mine.to_measure = limits.to_measure;
  if (size == 1) return mine;
  uint64_t words[kWords] = {};
  if (rank == 0) {
    for (size_t i = 0; i < kFields; ++i) words[i] = mine.*kCudaDispatchFields[i].value;
    words[kFields] = static_cast<uint64_t>(mine.peer_access) | (mine.any_order ? kAnyOrder : 0) |
                     (mine.nccl_leaves_p2p ? kNcclLeavesP2p : 0) | (mine.to_measure ? kToMeasure : 0) |
                     (mine.nccl_of_model ? kNcclOfModel : 0);
    std::vector<uint8_t> told(sizeof words);
    std::memcpy(told.data(), words, sizeof words);
    store.set(limits.key, told);
    return mine;
  }
  for (;;) {
    if (const auto found = store.find(limits.key)) {
      if (found->size() != sizeof words)
        throw Error(ErrorKind::system, "rank 0 runs another version of ark_torch: its dispatch has " +
                                           std::to_string(found->size()) + " bytes, this rank's " +
                                           std::to_string(sizeof words));
      std::memcpy(words, found->data(), sizeof words);
      for (size_t i = 0; i < kFields; ++i) mine.*kCudaDispatchFields[i].value = words[i];
      mine.peer_access = static_cast<PeerAccess>(words[kFields] & kPeerAccess);
      mine.any_order = (words[kFields] & kAnyOrder) != 0;
      mine.nccl_leaves_p2p = (words[kFields] & kNcclLeavesP2p) != 0;
      mine.to_measure = (words[kFields] & kToMeasure) != 0;
      mine.nccl_of_model = (words[kFields] & kNcclOfModel) != 0;
      return mine;
    }
    check();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace ark

// PyTorch's own NCCL as an entry of the dispatch table for CUDA tensors: it carries single collectives of a group whose
// other operations are ark's, at the sizes for which it was measured to be faster (CudaDispatch::nccl_*_from and _to).
//
// It is made when the first operation of such a size comes, by all ranks together; every rank decides alike, since the
// table is rank 0's and counts are equal on all ranks. all_to_all with splits stays ark's, as its counts are not.
//
// An operation that NCCL carries is enqueued like any other: on the same streams, between the same events, under the
// same numbers (CudaGroup::enqueue), in graphs too. Ahead of it goes a barrier of ark's, on the device: it has a bound
// and can say who is missing, neither of which NCCL has, and it keeps two NCCL communicators from meeting in different
// orders on different ranks. Where a peer is lost behind it, the group's watch fails the group, and NCCL is aborted.
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/cuda/cuda_communicator.hpp"
#include "shm/key_value.hpp"

namespace ark {

class NcclEntry {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  struct Options {
    int rank = 0, size = 1;
    c10::Device device{c10::kCUDA, 0};
    CudaDispatch dispatch;                         // agreed between the ranks
    std::shared_ptr<KeyValueStore> store;          // keys of this entry alone
    std::function<void(const Error&)> fail_group;  // tells the peers too
  };
  // NCCL's timeout beyond the group's: its own watchdog ends the process, the group's, which only raises, comes first.
  static constexpr std::chrono::minutes kLater{1};
  explicit NcclEntry(Options options) : options_(std::move(options)) {}

  // Whether the table gives NCCL any operation at all.
  static bool in(const CudaDispatch& dispatch);
  // `bytes`: of the whole tensor (all_gather: the gathered one; reduce_scatter, all_to_all: the input).
  bool wants(Kind kind, uint64_t bytes) const;
  // NCCL is there, or will never be.
  bool decided() const { return state_.load(std::memory_order_acquire) != State::unmade; }
  // What meets the ranks: not kept, since an entry may go while Python ends, and these may be Python's.
  struct Meeting {
    std::function<BackendPtr()> make;             // does not meet the peers yet
    std::function<void()> check;                  // between waits; throws what ends the group
    std::function<void(const std::string&)> log;  // one line for people; may be empty
  };
  // Collective, and blocking: makes NCCL's group on all ranks or on none. Not under capture.
  void meet(const Meeting& meeting);
  bool ready() const { return state_.load(std::memory_order_acquire) == State::ready; }
  BackendPtr backend() const { return ready() ? backend_ : nullptr; }
  uint64_t carried() const { return carried_.load(std::memory_order_relaxed); }

  void count() { carried_.fetch_add(1, std::memory_order_relaxed); }

  const Options& options() const { return options_; }
  // Kernels of NCCL leave; returns at once. Any thread.
  void abort();
  // Bounded; what holds NCCL up (a graph that still holds its kernels) is left to a thread of its own.
  void close(std::chrono::milliseconds patience);

 private:
  enum class State { unmade, ready, refused };
  std::string connect(const Meeting& meeting);  // empty, or why not

  const Options options_;
  std::mutex mutex_;
  std::atomic<State> state_{State::unmade};
  BackendPtr backend_;  // written before state_ is ready
  std::atomic<uint64_t> carried_{0};
  std::atomic<bool> aborted_{false};
};

// A group's collectives where NCCL has its share: what it does not carry goes on to `ours`. Lives for one call.
class SharedCommunicator final : public Communicator {
 public:
  // `even`: an all_to_all of equal parts on all ranks.
  SharedCommunicator(CudaCommunicator& ours, NcclEntry& nccl, bool even)
      : Communicator(ours.rank(), ours.size()), ours_(ours), nccl_(nccl), even_(even) {}

  void all_reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce_scatter(const Operation&, const void* const* ins, void* out, size_t count) override;
  void all_gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void broadcast(const Operation&, void* data, size_t bytes) override;
  void gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void scatter(const Operation&, const void* const* ins, void* out, size_t bytes) override;
  void all_to_all(const Operation&, const Bytes* ins, const MutableBytes* outs) override;
  void barrier(const Operation&) override;

 private:
  using Call = c10::function_ref<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;
  // NCCL, where it is to carry this; else null.
  NcclEntry::BackendPtr carrier(Kind kind, uint64_t bytes) const;
  NcclEntry::BackendPtr reducer(const Operation& operation, Kind kind, uint64_t bytes) const;
  void carry(c10d::Backend& nccl, const Operation& operation, Call call);
  at::Tensor at(const void* data, size_t count, at::ScalarType type = at::kByte) const;
  template <class Pointer>
  std::vector<at::Tensor> all_at(Pointer const* places, size_t count, at::ScalarType type = at::kByte) const;

  CudaCommunicator& ours_;
  NcclEntry& nccl_;
  const bool even_;
};

}  // namespace ark

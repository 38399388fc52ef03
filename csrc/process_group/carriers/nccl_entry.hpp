// PyTorch's NCCL as an entry of the dispatch table for CUDA tensors: it carries the sizes at which it was measured to
// be faster.
//
// All ranks create it together at the first operation of such a size (CudaDispatch::nccl_*_from and _to). They decide
// the same way because they use rank 0's table and equal counts. all_to_all with splits stays with ark, because its
// counts differ. The operation is enqueued like any other: same streams, events and numbers (CudaGroup::enqueue), also
// in graphs.
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

// A barrier of ark's on the device precedes each operation. Unlike NCCL it has a time limit and can name a missing
// rank. It also keeps two NCCL communicators from running in different orders on different ranks. If a peer is lost
// after the barrier, the group's watch fails the group and aborts NCCL.
class NcclEntry {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  struct Options {
    int rank = 0, size = 1;
    c10::Device device{c10::kCUDA, 0};
    CudaDispatch dispatch;                         // agreed between the ranks
    std::shared_ptr<KeyValueStore> store;          // with keys for this entry alone
    std::function<void(const Error&)> fail_group;  // also tells the peers
  };
  // NCCL's timeout exceeds the group's by this. NCCL's watchdog ends the process, so the group's error must come first.
  static constexpr std::chrono::minutes kLater{1};
  explicit NcclEntry(Options options) : options_(std::move(options)) {}

  // Returns true if the table gives NCCL any operation.
  static bool in(const CudaDispatch& dispatch);
  // `bytes`: size of the whole tensor (all_gather: the output; reduce_scatter, all_to_all: the input).
  bool wants(Kind kind, uint64_t bytes) const;
  // Returns true once NCCL is ready or was refused for good.
  bool decided() const { return state_.load(std::memory_order_acquire) != State::unmade; }
  // Callbacks for meet(). They are not kept, because they may belong to Python and the entry may outlive it.
  struct Meeting {
    std::function<BackendPtr()> make;             // does not contact peers yet
    std::function<void()> check;                  // called between waits; throws what ended the group
    std::function<void(const std::string&)> log;  // one line for people; may be empty
  };
  // Collective and blocking. Creates NCCL's group on all ranks or on none. Not allowed during capture.
  void meet(const Meeting& meeting);
  bool ready() const { return state_.load(std::memory_order_acquire) == State::ready; }
  BackendPtr backend() const { return ready() ? backend_ : nullptr; }
  uint64_t carried() const { return carried_.load(std::memory_order_relaxed); }

  void count(Kind kind);
  // One line for people about each collective that NCCL has carried, once. From any thread.
  std::vector<std::string> news();

  const Options& options() const { return options_; }
  // Makes NCCL's kernels leave, and returns at once. From any thread.
  void abort();
  // Bounded. If NCCL cannot end yet (a graph still holds its kernels), a separate thread waits for it.
  void close(std::chrono::milliseconds patience);

 private:
  enum class State { unmade, ready, refused };
  std::string connect(const Meeting& meeting);  // returns why it failed; empty on success

  const Options options_;
  std::mutex mutex_;
  std::atomic<State> state_{State::unmade};
  BackendPtr backend_;  // written before state_ becomes ready
  std::atomic<uint64_t> carried_{0};
  std::atomic<uint32_t> carried_kinds_{0}, told_kinds_{0};  // a bit for each Kind
  std::atomic<bool> aborted_{false};
};

// Passes NCCL its share of a group's collectives and the rest to `ours`. Lives for one call.
class SharedCommunicator final : public Communicator {
 public:
  // `even`: an all_to_all with equal parts on all ranks.
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
  // Returns NCCL if it should carry this operation, else null.
  NcclEntry::BackendPtr carrier(Kind kind, uint64_t bytes) const;
  NcclEntry::BackendPtr reducer(const Operation& operation, Kind kind, uint64_t bytes) const;
  void carry(c10d::Backend& nccl, Kind kind, const Operation& operation, Call call);
  at::Tensor at(const void* data, size_t count, at::ScalarType type = at::kByte) const;
  template <class Pointer>
  std::vector<at::Tensor> all_at(Pointer const* places, size_t count, at::ScalarType type = at::kByte) const;

  CudaCommunicator& ours_;
  NcclEntry& nccl_;
  const bool even_;
};

}  // namespace ark

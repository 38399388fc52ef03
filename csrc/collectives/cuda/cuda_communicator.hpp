// A group's collectives on CUDA tensors: kernels that move the bytes themselves, one rank one device.
//
// Every operation is enqueued on operation.stream and returns at once; nothing here waits for the GPU. Operations of
// one group must reach the device in the order in which they were issued: the caller orders streams by events. Kernels
// of send and recv use rings of their own, a pair and direction each, and are ordered among themselves only.
// Functions may be called while the stream captures a graph; create() may not.
//
// A kernel that waits longer than the operation's timeout, or whose group has failed, leaves without its result; the
// watch below then fails the group (GroupHealth), and every later call raises the error that names who was missed.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/cuda/arena_memory.hpp"
#include "collectives/cuda/copy_engine/copy_engine.hpp"
#include "collectives/cuda/cuda_dispatch.hpp"
#include "collectives/cuda/stubs.hpp"
#include "collectives/cuda/windows.hpp"
#include "collectives/operation.hpp"
#include "cuda/device_memory.hpp"
#include "cuda/move.cuh"
#include "cuda/two_shot.cuh"
#include "health/device_watch.hpp"
#include "jit/kernel.hpp"
#include "shm/key_value.hpp"

namespace ark {

class TileMemory;

// While a group meets to share memory: throws as soon as the group has failed or a peer is gone.
std::function<void()> ends_with(GroupHealth& health, std::chrono::milliseconds timeout);

inline CUstream stream_of(const Operation& operation) {
  return static_cast<CUstream>(operation.stream);
}
template <class Params>
void describe_reduction(const Operation& operation, Params& params) {
  params.average = operation.descriptor.op == ReduceOp::avg;
  params.dtype = static_cast<device::DType>(operation.descriptor.dtype);
  params.op = static_cast<device::ReduceOp>(operation.descriptor.op);
}

class CudaCommunicator final : public Communicator {
 public:
  struct Options {
    int device = 0;                        // CUDA ordinal of this process
    std::chrono::milliseconds timeout{0};  // for create()
    bool device_each = true;               // false: ranks may share one, by slices of time or side by side
    std::optional<CudaDispatch> dispatch;  // else the measured one
    std::function<void()> check;           // between the waits of create(); throws what ends it. Else the health's
    // Both are told once, when the device gave up: `note` while what was issued before still waits, and must not block;
    // `log` from a thread of its own.
    std::function<void(const Error&)> note, log;
  };

  // Collective over the group's ranks, at the first operation on CUDA tensors. `store`: keys of this group alone; kept,
  // because memory for large buckets is shared when the first one comes.
  // What ranks share is memory of the host where the devices do not reach each other's (arena_memory.hpp).
  // Null, and `why`: it is PyTorch's NCCL that is to carry the group. Every rank gets the same answer.
  static std::unique_ptr<CudaCommunicator> create(int rank, int size, std::shared_ptr<KeyValueStore> store,
                                                  GroupHealth& health, const Options& options, std::string& why);
  ~CudaCommunicator() override;

  int device() const { return device_; }
  uint64_t shared_bytes() const { return shared_bytes_; }  // of this rank's memory, which peers map
  uint64_t buffer_bytes() const { return dispatch_.buffer_bytes; }
  bool on_host() const { return arena_.on_host; }                        // what ranks share is memory of the host
  const std::string& why_on_host() const { return arena_.why_on_host; }  // empty: asked for
  const CudaDispatch& dispatch() const { return dispatch_; }
  // Why copy engines carry nothing, for good: their memory could not be shared. Empty: they do, or were not asked for.
  std::string engine_refusal() const { return engine_refused_.load(std::memory_order_acquire) ? *engine_refusal_ : ""; }
  // Of a launch that waits for peers: ranks may share a device.
  uint32_t most_blocks() const { return device_each_ ? ~uint32_t{0} : blocks_of_a_sharer(size_); }

  void all_reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce_scatter(const Operation&, const void* const* ins, void* out, size_t count) override;
  void all_gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void broadcast(const Operation&, void* data, size_t bytes) override;
  void gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void scatter(const Operation&, const void* const* ins, void* out, size_t bytes) override;
  void all_to_all(const Operation&, const Bytes* ins, const MutableBytes* outs) override;
  void barrier(const Operation&) override;  // on the device; the caller blocks the host

  void send(const Operation&, const void* data, size_t bytes, int peer);
  void recv(const Operation&, void* data, size_t bytes, int peer);

  // Memory that kernels of others' making (compiled regions) exchange packets in: zero at first, as many bytes on every
  // rank. Collective, and not under capture; ranks whose `fingerprint` differs all throw Error(mismatch). Null, and
  // `why`, alike on all ranks: a device has no room. For as long as the communicator lives.
  struct Shared {
    std::vector<char*> memory;  // by rank, as mapped here
    std::vector<char*> seen;    // this rank's, as mapped by each rank
    device::GroupStatus* status;
    std::shared_ptr<void> keep;  // the memory
  };
  std::unique_ptr<Shared> share(uint64_t bytes, uint64_t fingerprint, std::string& why);
  // What fused operators store into; made by the first, by all ranks together. Null, and `why`, as above.
  TileMemory* tiles(bool capturing, std::string& why);
  TileMemory* known_tiles() const { return tiles_.get(); }  // null: there was none yet

  // Throws the error that ended the group, if one did: what a host thread asks after it waited for the device.
  void check(const OperationContext& context) { watch_.check(context); }
  Windows& windows() { return windows_; }  // registered memory
  // Waits until the device has done all that was enqueued. False: that cannot be known (a capture, a lost context).
  bool settle();
  // Until all who are told of the group's failure have heard; else what they have not (failure_log.hpp).
  std::optional<std::string> wait_told(Clock::time_point until) { return watch_.wait_told(until); }
  // Makes every kernel of the group leave (abort, a lost peer). Any thread.
  void abort() { watch_.abort(); }
  // Called at least once when the group has failed, from the watching thread.
  void when_failed(std::function<void()> then) { watch_.when_failed(std::move(then)); }

 private:
  // In host memory that kernels, copy engines and the host write.
  struct Status {
    device::GroupStatus group;
    device::EngineStatus engine;
  };
  // Where an operation's outputs lie in registered memory, as ranks tell each other.
  struct Marked {
    CopyEngine::Outputs outputs;
    CopyEngine::MaybeOutputs given() const { return outputs.mark == 0 ? nullptr : &outputs; }
  };

  // options.dispatch is set.
  CudaCommunicator(int rank, int size, GroupHealth& health, std::shared_ptr<KeyValueStore> store, ArenaMemory arena,
                   const Options& options);

  // Compiled and loaded at its first use, from any thread.
  const jit::Kernel& kernel(GroupKernel kind, RuleKind rule);
  struct Launch;  // of one operation, by kernels (collectives.cpp)

  // By copy engines (engine_collectives.cpp). False, and nothing done, where they cannot be used.
  CopyEngine* copy_engine(const Operation& operation);
  CopyEngine::Add adding(const Operation& operation);
  Marked marked(const Operation& operation, void* const* outs, int count, uint64_t bytes, int own) const;
  bool engine_all_reduce(const Operation& operation, const void* in, void* out, uint64_t bytes);
  bool engine_reduce_scatter(const Operation& operation, const void* const* ins, void* out, uint64_t bytes);
  bool engine_all_gather(const Operation& operation, const void* in, void* const* outs, uint64_t bytes);
  bool engine_broadcast(const Operation& operation, void* data, uint64_t bytes);
  // Messages of `from` bytes and more, whose sizes become 0; all, where there is nothing to do.
  void engine_all_to_all(const Operation& operation, device::MoveParams& messages, uint64_t from);

  // Where what is this rank's alone has its offsets.
  char* own_base() const { return arena_.on_host ? arena_.own.data() : arena_.parts[rank_].data(); }
  Status* host_status() const { return static_cast<Status*>(status_->host()); }
  Status* device_status() const { return static_cast<Status*>(status_->device()); }

  const int device_;
  GroupHealth& health_;
  const std::shared_ptr<KeyValueStore> store_;
  const std::chrono::milliseconds timeout_;
  const CudaDispatch dispatch_;
  ArenaMemory arena_;
  const ArenaLayout layout_;
  Windows windows_;
  std::unique_ptr<PinnedMemory> status_;
  DeviceWatch watch_;
  const bool device_each_;
  std::atomic<uint64_t> shared_bytes_;
  std::mutex mutex_;
  const jit::Kernel* kernels_[kGroupKernels][kRuleKinds] = {};
  std::unique_ptr<CopyEngine> engine_;
  std::optional<std::string> engine_refusal_;  // why there are no copy engines for good; empty: as was asked for
  std::atomic<bool> engine_refused_{false};    // then the text above is there, and stays
  uint64_t shares_ = 0;                        // calls of share()
  std::unique_ptr<TileMemory> tiles_;
  std::string tiles_refused_;  // why there are none
};

}  // namespace ark

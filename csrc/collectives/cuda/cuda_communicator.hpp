// A group's collectives on CUDA tensors: kernels move the bytes, with one device per rank.
//
// Every operation is enqueued on operation.stream and returns at once. Operations of a group must reach the device in
// issue order; the caller orders streams with events. send and recv have rings per pair and direction and are only
// ordered among themselves. All functions except create() may be called during graph capture. A kernel that exceeds the
// operation's timeout, or whose group has failed, leaves without a result. The watch then fails the group
// (GroupHealth), and later calls raise an error that names the missing rank.
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

// Checks while a group meets to share memory. Throws as soon as the group has failed or a peer is gone.
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
    bool device_each = true;               // false: ranks may share a device, time-sliced or side by side
    std::optional<CudaDispatch> dispatch;  // unset: the measured one
    std::function<void()> check;           // called between waits of create(); throws what ends it; unset: the health's
    // Each is called once when the device gives up: `note` while earlier operations still wait, so it must not block;
    // `log` on a separate thread.
    std::function<void(const Error&)> note, log;
  };

  // Collective over the group's ranks, at the first operation on CUDA tensors. `store`: its keys belong to this group;
  // kept, because memory for large buckets is shared later. If devices do not reach each other's memory, ranks share
  // host memory (arena_memory.hpp). Returns null on all ranks, and sets `why`, if PyTorch's NCCL should carry the
  // group.
  static std::unique_ptr<CudaCommunicator> create(int rank, int size, std::shared_ptr<KeyValueStore> store,
                                                  GroupHealth& health, const Options& options, std::string& why);
  ~CudaCommunicator() override;

  int device() const { return device_; }
  uint64_t shared_bytes() const { return shared_bytes_; }  // this rank's memory that peers map
  uint64_t buffer_bytes() const { return dispatch_.buffer_bytes; }
  bool on_host() const { return arena_.on_host; }                        // ranks share host memory
  const std::string& why_on_host() const { return arena_.why_on_host; }  // empty: requested by the user
  const CudaDispatch& dispatch() const { return dispatch_; }
  // Why copy engines carry nothing for good: their memory could not be shared. Empty if they do or were not requested.
  std::string engine_refusal() const { return engine_refused_.load(std::memory_order_acquire) ? *engine_refusal_ : ""; }
  // Limit for a launch that waits for peers, because ranks may share a device.
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

  // Shares zeroed memory for kernels of compiled regions to exchange packets in, with the same size on every rank.
  // Collective; not during capture. Throws Error(mismatch) on all ranks if `fingerprint` differs. Returns null on all
  // ranks, and sets `why`, if a device has no room. The memory lives as long as the communicator.
  struct Shared {
    std::vector<char*> memory;  // by rank, as mapped here
    std::vector<char*> seen;    // this rank's memory, as mapped by each rank
    device::GroupStatus* status;
    std::shared_ptr<void> keep;  // owns the memory
  };
  std::unique_ptr<Shared> share(uint64_t bytes, uint64_t fingerprint, std::string& why);
  // The memory of fused operators, created by all ranks at the first one. Returns null and sets `why` as above.
  TileMemory* tiles(bool capturing, std::string& why);
  TileMemory* known_tiles() const { return tiles_.get(); }  // null before the first fused operator

  // Throws the error that ended the group, if any. Host threads call it after they waited for the device.
  void check(const OperationContext& context) { watch_.check(context); }
  Windows& windows() { return windows_; }                                  // registered memory
  device::GroupStatus* status() const { return &device_status()->group; }  // as kernels see it
  // Waits for all enqueued work. Returns false if that is unknown (a capture, a lost context).
  bool settle();
  // Waits until the group's failure has been reported everywhere, or returns what is unreported (failure_log.hpp).
  std::optional<std::string> wait_told(Clock::time_point until) { return watch_.wait_told(until); }
  // Makes every kernel of the group leave (abort, a lost peer). From any thread.
  void abort() { watch_.abort(); }
  // The watching thread calls this at least once after the group has failed.
  void when_failed(std::function<void()> then) { watch_.when_failed(std::move(then)); }

 private:
  // In host memory that kernels, copy engines and the host write.
  struct Status {
    device::GroupStatus group;
    device::EngineStatus engine;
  };
  // Where an operation's outputs are in registered memory, as ranks tell each other.
  struct Marked {
    CopyEngine::Outputs outputs;
    CopyEngine::MaybeOutputs given() const { return outputs.mark == 0 ? nullptr : &outputs; }
  };

  // options.dispatch must be set.
  CudaCommunicator(int rank, int size, GroupHealth& health, std::shared_ptr<KeyValueStore> store, ArenaMemory arena,
                   const Options& options);

  // Compiled and loaded at first use, from any thread.
  const jit::Kernel& kernel(GroupKernel kind, RuleKind rule);
  struct Launch;  // launches the kernels of one operation (collectives.cpp)

  // By copy engines (engine_collectives.cpp). Return false, and do nothing, if those cannot be used.
  CopyEngine* copy_engine(const Operation& operation);
  CopyEngine::Add adding(const Operation& operation);
  Marked marked(const Operation& operation, void* const* outs, int count, uint64_t bytes, int own) const;
  bool engine_all_reduce(const Operation& operation, const void* in, void* out, uint64_t bytes);
  bool engine_reduce_scatter(const Operation& operation, const void* const* ins, void* out, uint64_t bytes);
  bool engine_all_gather(const Operation& operation, const void* in, void* const* outs, uint64_t bytes);
  bool engine_broadcast(const Operation& operation, void* data, uint64_t bytes);
  // Takes messages of at least `from` bytes and sets their sizes to 0.
  void engine_all_to_all(const Operation& operation, device::MoveParams& messages, uint64_t from);

  // The base of this rank's private data.
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
  std::optional<std::string> engine_refusal_;  // why copy engines are unavailable for good; empty: as requested
  std::atomic<bool> engine_refused_{false};    // set once the text above is final
  uint64_t shares_ = 0;                        // calls of share()
  std::unique_ptr<TileMemory> tiles_;
  std::string tiles_refused_;  // why there is no tile memory
};

}  // namespace ark

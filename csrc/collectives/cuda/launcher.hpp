// What a group has on its GPU, and the launches of its kernels: from buffers and sizes to parameters, grid and stream.
//
// Which kernel an operation takes is cuda_communicator.cpp's. Launches of one group are made in the order of issue by a
// caller that holds them apart; kernels are compiled and loaded at their first use, from any thread.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "collectives/cuda/arena.hpp"
#include "collectives/cuda/copy_engine/copy_engine.hpp"
#include "collectives/cuda/cuda_communicator.hpp"
#include "collectives/cuda/stubs.hpp"
#include "collectives/cuda/windows.hpp"
#include "cuda/bulk_two_shot.cuh"
#include "cuda/device_memory.hpp"
#include "cuda/move.cuh"
#include "cuda/relay.cuh"
#include "cuda/two_shot.cuh"
#include "health/device_watch.hpp"
#include "jit/kernel.hpp"

namespace ark {

// While a group meets to share memory: throws as soon as the group has failed or a peer is gone.
std::function<void()> ends_with(GroupHealth& health, std::chrono::milliseconds timeout);

// Of the rings in bulk; 0: none are used.
inline uint32_t ring_blocks_of(const CudaDispatch& dispatch) {
  return dispatch.bulk_from == CudaDispatch::kNever ? 0 : static_cast<uint32_t>(dispatch.ring_blocks);
}

inline CUstream stream_of(const Operation& operation) {
  return static_cast<CUstream>(operation.stream);
}
template <class Params>
void describe_reduction(const Operation& operation, Params& params) {
  params.average = operation.descriptor.op == ReduceOp::avg;
  params.dtype = static_cast<device::DType>(operation.descriptor.dtype);
  params.op = static_cast<device::ReduceOp>(operation.descriptor.op);
}

class CudaLauncher {
 public:
  using Options = CudaCommunicator::Options;

  // memory[r]: rank r's arena as mapped here; options.dispatch is set.
  CudaLauncher(int rank, int size, GroupHealth& health, std::shared_ptr<KeyValueStore> store,
               std::vector<DeviceMemory> memory, const Options& options);
  ~CudaLauncher();  // waits for the device

  int device() const { return device_; }
  uint64_t shared_bytes() const { return shared_bytes_; }
  bool on_host() const { return on_host_; }
  const std::optional<std::string>& engine_refusal() const { return engine_refusal_; }
  uint32_t most_blocks() const { return device_each_ ? ~uint32_t{0} : blocks_of_a_sharer(size_); }
  DeviceWatch& watch() { return watch_; }
  Windows& windows() { return windows_; }  // registered memory
  // Waits until the device has done all that was enqueued. False: that cannot be known (a capture, a lost context).
  bool settle();

  // Sends and receives. `params` but for its rings; long messages go by several launches.
  void move(const Operation& operation, const device::MoveParams& params) {
    move(operation, layout_.collectives, params);
  }
  void transfer(const Operation& operation, const device::MoveParams& params) {
    move(operation, layout_.transfers, params);
  }
  // The root's data to everybody, by way of each other: for more than two ranks.
  void relay(const Operation& operation, void* data, uint64_t bytes);
  // params.in, out, bytes and receivers are set.
  void two_shot(const Operation& operation, device::TwoShotParams params);
  void one_shot(const Operation& operation, const void* in, void* out, uint64_t bytes);
  // Equal parts of whole units, one a rank; the last ones may be short or empty. Bit r of `receivers`: rank r gets the
  // result, in `out`.
  device::TwoShotParams parts_of(const void* in, void* out, uint64_t bytes, uint32_t receivers) const;
  // By copy engines (launcher_engine.cpp). False, and nothing done, where they cannot be used.
  bool engine_all_reduce(const Operation& operation, const void* in, void* out, uint64_t bytes);
  bool engine_reduce_scatter(const Operation& operation, const void* const* ins, void* out, uint64_t bytes);
  bool engine_all_gather(const Operation& operation, const void* in, void* const* outs, uint64_t bytes);
  bool engine_broadcast(const Operation& operation, void* data, uint64_t bytes);
  // Messages of `from` bytes and more, whose sizes become 0; all, where there is nothing to do.
  void engine_all_to_all(const Operation& operation, device::MoveParams& messages, uint64_t from);
  // Every rank's word of `bytes` (at most 16) from own_word() to words().
  void gather_words(const Operation& operation, uint64_t bytes);
  // See cuda_communicator.hpp.
  std::unique_ptr<CudaCommunicator::Shared> share(uint64_t bytes, uint64_t fingerprint, std::string& why);
  CUdeviceptr own_word() const { return reinterpret_cast<CUdeviceptr>(memory_[rank_].data() + layout_.scratch); }
  CUdeviceptr words() const { return own_word() + 16; }

 private:
  struct Reduce {
    const jit::Kernel* one_shot = nullptr;
    const jit::Kernel* add = nullptr;
    const jit::Kernel* two_shot[2] = {};  // in lines, in chunks
    const jit::Kernel* bulk = nullptr;
  };
  // In host memory that kernels, copy engines and the host write.
  struct Status {
    device::GroupStatus group;
    device::EngineStatus engine;
  };

  void move(const Operation& operation, const RingSet& set, const device::MoveParams& params);
  void launch_move(const Operation& operation, const RingSet& set, device::MoveParams& params);
  void set_rings(const Operation& operation, device::TwoShotParams& params) const;
  void launch_two_shot(const Operation& operation, device::TwoShotParams& params);
  void launch_bulk(const Operation& operation, device::TwoShotParams& params);
  void find_landings(void* const* receive, const uint64_t* bytes, device::Rings& rings) const;
  const jit::Kernel& moving();
  const jit::Kernel& relaying();
  const Reduce& reducing(const Operation& operation);
  const jit::Kernel& adding_by_parts(const Operation& operation, bool chunked);
  const jit::Kernel& adding_in_bulk(const Operation& operation);
  device::Rings rings(const Operation& operation, const RingSet& set) const;
  CopyEngine* copy_engine(const Operation& operation);
  CopyEngine::Add adding(const Operation& operation);
  struct Marked {
    CopyEngine::Outputs outputs;
    CopyEngine::MaybeOutputs given() const { return outputs.mark == 0 ? nullptr : &outputs; }
  };
  Marked marked(const Operation& operation, void* const* outs, int count, uint64_t bytes, int own) const;
  Status* host_status() const { return static_cast<Status*>(status_->host()); }
  Status* device_status() const { return static_cast<Status*>(status_->device()); }

  const int rank_, size_, device_;
  GroupHealth& health_;
  const std::shared_ptr<KeyValueStore> store_;
  const std::chrono::milliseconds timeout_;
  const ArenaLayout layout_;
  std::vector<DeviceMemory> memory_;
  Windows windows_;
  std::unique_ptr<PinnedMemory> status_;
  DeviceWatch watch_;
  const bool device_each_, on_host_;
  const uint64_t chunks_from_, landings_from_, bulk_from_, in_line_to_, part_bytes_, buffer_bytes_;
  std::atomic<uint64_t> shared_bytes_{0};
  std::mutex mutex_;
  const jit::Kernel *move_ = nullptr, *relay_ = nullptr;
  std::array<Reduce, kRuleKinds> reduces_;
  std::unique_ptr<CopyEngine> engine_;
  std::optional<std::string> engine_refusal_;  // why there are no copy engines for good; empty: as was asked for
  uint64_t shares_ = 0;  // calls of share()
};

}  // namespace ark

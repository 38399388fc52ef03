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

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/operation.hpp"
#include "shm/key_value.hpp"

namespace ark::device {
struct GroupStatus;
}

namespace ark {

class CudaLauncher;
class TileMemory;
class Windows;

// Which algorithm carries an operation, by its bytes. Alike on all ranks.
struct CudaDispatch {
  uint64_t one_shot_to;       // all_reduce up to here: every rank's whole input to every rank; above: rings
  uint64_t chunks_from;       // of one rank's part or message: from here rings of chunks, below rings of lines
  uint64_t landings_from;     // of one rank's part or message: from here into the receiver's registered memory
  uint64_t relay_from;        // broadcast to several peers: from here they hand parts on to each other
  uint64_t bulk_from;         // sums of so many bytes from every rank: from here rings in bulk, of few blocks
  uint64_t ring_blocks;       // so many
  uint64_t part_bytes;        // of one rank's part of an all_reduce by rings in one launch, at most: lanes drift apart
  uint64_t copy_engine_from;  // all_reduce from here: copy engines, which take no SM from what computes beside
  uint64_t in_line_to;        // of these, eager ones up to here are on one stream, for the sake of the host
  // The same, by the bytes of one rank's part or message.
  uint64_t reduce_scatter_engine_from;
  uint64_t all_gather_engine_from;
  uint64_t registered_all_gather_engine_from;  // in a group that has registered memory
  uint64_t broadcast_engine_from;
  uint64_t all_to_all_engine_from;  // once another operation's use has brought the memory
  uint64_t buffer_bytes;            // of shared memory for copy engines, at most (ARK_BUFFER_MB)

  // From these sizes of the whole tensor on PyTorch's NCCL carries it (process_group/carriers/nccl_entry.hpp); sums
  // only under Options::reduction "fast", as it adds in other orders.
  static constexpr uint64_t kNever = ~uint64_t{0};
  uint64_t nccl_all_reduce_from = kNever;
  uint64_t nccl_reduce_from = kNever;
  uint64_t nccl_reduce_scatter_from = kNever;
  uint64_t nccl_all_gather_from = kNever;
  uint64_t nccl_broadcast_from = kNever;
  uint64_t nccl_all_to_all_from = kNever;
  static CudaDispatch measured(int ranks);
  // Through memory of the host: what needs no more of it than 16 bytes at once, and none of the peers' own.
  CudaDispatch through_host() const;
};

class CudaCommunicator final : public Communicator {
 public:
  struct Options {
    int device = 0;                        // CUDA ordinal of this process
    std::chrono::milliseconds timeout{0};  // for create()
    bool device_each = true;               // false: ranks may share one, by slices of time or side by side
    bool on_host = false;                  // peers' memory is left alone: what ranks share is memory of the host
    std::optional<CudaDispatch> dispatch;  // else the measured one
    std::function<void()> check;           // between the waits of create(); throws what ends it. Else the health's
    // Both are told once, when the device gave up: `note` while what was issued before still waits, and must not block;
    // `log` from a thread of its own.
    std::function<void(const Error&)> note, log;
  };

  // Collective over the group's ranks, at the first operation on CUDA tensors. `store`: keys of this group alone; kept,
  // because memory for large buckets is shared when the first one comes.
  // Null, and `why`: these devices cannot reach each other's memory. Every rank gets the same answer.
  static std::unique_ptr<CudaCommunicator> create(int rank, int size, std::shared_ptr<KeyValueStore> store,
                                                  GroupHealth& health, const Options& options, std::string& why);
  ~CudaCommunicator() override;

  int device() const;
  uint64_t shared_bytes() const;  // of this rank's GPU memory, which peers map
  uint64_t buffer_bytes() const { return dispatch_.buffer_bytes; }
  bool on_host() const;  // what ranks share is memory of the host
  // Why copy engines carry nothing, for good: their memory could not be shared. Empty: they do, or were not asked for.
  // For whoever calls an operation, behind it.
  std::string engine_refusal() const;
  uint32_t most_blocks() const;  // of a launch that waits for peers: ranks may share a device

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
  void check(const OperationContext& context);
  Windows& windows();  // registered memory
  bool settle();       // waits for the device; false: what it does cannot be known
  // Until all who are told of the group's failure have heard; else what they have not (failure_log.hpp).
  std::optional<std::string> wait_told(Clock::time_point until);
  // Makes every kernel of the group leave (abort, a lost peer). Any thread.
  void abort();
  // Called at least once when the group has failed, from the watching thread.
  void when_failed(std::function<void()> then);

 private:
  CudaCommunicator(int rank, int size, std::unique_ptr<CudaLauncher> launcher, const CudaDispatch& dispatch);

  std::unique_ptr<CudaLauncher> launcher_;
  const CudaDispatch dispatch_;
  std::unique_ptr<TileMemory> tiles_;
  std::string tiles_refused_;  // why there are none
};

}  // namespace ark

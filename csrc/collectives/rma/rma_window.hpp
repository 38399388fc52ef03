// A one-sided window: memory of every rank of a group that the others write to (put), and counters of signals.
//
// open() and close() are collective. Ranks of a node map each other's memory, so a put there is a copy (of GPU memory
// by copy engines) and a signal a counter in shared memory; ranks of other nodes are written to by RDMA. A signal comes
// behind what its sender put before it; each wait for a rank's signal takes the next one of that rank. The memory may
// be used by its owner all the time: who writes where and when is the users' agreement, made with signals.
//
// A wait ends with the group: when the peer is lost, when the deadline passes (which fails the group, naming the peer),
// or when another rank has failed it. Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/rma/gpu_copies.hpp"
#include "collectives/rma/rma_record.hpp"
#include "cuda/shareable_pool.hpp"
#include "dma/rdma/messages.hpp"
#include "health/group_health.hpp"
#include "protocol/counter.hpp"
#include "shm/key_value.hpp"
#include "shm/memory_meeting.hpp"

namespace ark {

class RmaWindow {
 public:
  struct Setup {
    int rank = 0, size = 1;
    std::vector<int> own;                      // the ranks of this rank's node, in their order there
    GroupHealth* health = nullptr;             // of the node's ranks
    std::shared_ptr<MemoryMeeting> meeting;    // of the node's ranks; null where `own` is one
    std::shared_ptr<rdma::Messages> messages;  // null where all ranks are of one node
    std::shared_ptr<KeyValueStore> store;      // for open() and close(), where there are several nodes
    std::string prefix;                        // of keys in it, of this window alone
    uint32_t number = 0;                       // of this window in its group
    std::chrono::milliseconds timeout{0};      // of open() and close()
    std::function<void(const Error&)> fail;    // tells the group of an error that ends it
  };
  // What a rank offers: elements of a type (a code of the caller's) in `segment`, or of GPU memory in `gpu`, which the
  // node's ranks map; in a node of one rank any memory, and neither. All ranks of a node offer the same kind of memory.
  struct Memory {
    std::byte* data = nullptr;
    uint64_t elements = 0;
    uint32_t item = 1, type = 0;
    std::shared_ptr<SharedMemory> segment;
    rdma::Where where = rdma::Where::host;
    int device = 0;  // of GPU memory
    std::shared_ptr<const ShareableSegment> gpu;
  };

  // Error, on all ranks, where one offers nothing (offer throws) or cannot share or register what it offers.
  static std::shared_ptr<RmaWindow> open(Setup setup, const std::function<Memory()>& offer);
  ~RmaWindow();

  // Waits until the puts of all ranks are done; afterwards nobody writes to this rank's memory any more. A window that
  // goes without it leaves its memory to the peers as long as they have it mapped, and fails puts of other nodes.
  void close();

  // Where a put or a signal stands; null: it is done, as in a node it always is.
  using Transfer = std::shared_ptr<rdma::Message>;
  // `elements` from `from` to the peer's from `offset` on. `keep`: what holds `from`, until the put is done. Error
  // (type_error, invalid_argument) before a byte moves.
  Transfer put(const OperationContext& context, int peer, uint32_t type, const void* from, uint64_t elements,
               int64_t offset, std::shared_ptr<void> keep = nullptr, rdma::Where where = rdma::Where::host);
  Transfer signal(const OperationContext& context, int peer);

  // The number of the signal that the next wait takes; to be waited for.
  uint64_t expect(const OperationContext& context, int peer);
  bool arrived(int peer, uint64_t signal) const;
  // False where `until` passes before the context's deadline does.
  bool wait(const OperationContext& context, int peer, uint64_t signal, Clock::time_point until);
  bool wait(const OperationContext& context, int peer, rdma::Message& transfer, Clock::time_point until);

  // A peer's memory as it is mapped here, and what keeps it so; null: the peer is of another node.
  std::pair<std::byte*, std::shared_ptr<void>> mapped(int peer) const;
  const RmaRecord& of(int peer) const { return records_[peer]; }
  rdma::Where where() const { return own_.where; }  // of this rank's memory
  int device() const { return own_.device; }

 private:
  struct Neighbour {
    std::shared_ptr<SharedMemory> memory, signals;
    std::shared_ptr<DeviceMemory> on_gpu;  // a peer's
    std::byte* data = nullptr;
  };
  struct Pending {
    int peer;
    Transfer transfer;
    std::shared_ptr<void> keep;
  };
  explicit RmaWindow(Setup setup);
  void share(const std::function<Memory()>& offer);
  void meet_nodes();
  int local_of(int peer) const;     // -1: of another node
  std::vector<int> others() const;  // ranks of other nodes
  protocol::Counter& counter(int local, int from) const;
  void check(const OperationContext& context, int peer) const;
  template <class Body>
  auto guarded(const OperationContext& context, Body&& body) const;
  void late(const OperationContext& context, int peer, const std::string& what) const;

  const Setup setup_;
  const std::vector<int> local_;  // by rank
  Memory own_;
  std::vector<RmaRecord> records_;     // by rank
  std::vector<Neighbour> neighbours_;  // by place in the node
  std::unique_ptr<GpuCopies> copies_;  // of GPU memory
  rdma::Held registered_;
  bool opened_ = false;  // at setup_.messages
  std::atomic<bool> closed_{false};
  std::vector<std::atomic<uint64_t>> expected_;  // signals, by rank
  std::mutex mutex_;                             // of what follows
  std::vector<uint64_t> sent_;                   // signals to ranks of the node, by rank
  std::vector<Pending> pending_;
};

}  // namespace ark

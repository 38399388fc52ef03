// A group's side on one CUDA device: its communicator, its streams, and the order in which operations reach the device.
//
// Operations of a line reach the device in issue order. The collectives form one line, and so do the sends to each peer
// and the receives from each peer. A synchronous operation runs on the caller's current stream, an asynchronous one on
// the line's stream after the current stream's work. If consecutive operations of a line use different streams, the
// later stream waits for the earlier end event. Captured operations are ordered within their capture, eager ones among
// themselves.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "collectives/cuda/between/nodes_communicator.hpp"
#include "collectives/cuda/cuda_communicator.hpp"
#include "health/flight/flight_record.hpp"
#include "process_group/carriers/nccl_entry.hpp"
#include "process_group/cuda/cuda_streams.hpp"
#include "process_group/cuda/device_clock.hpp"
#include "process_group/operation_record.hpp"

namespace ark {

class GroupCore;

// What every communicator of a group on this device is made with: its time limit, and who hears of its failures.
CudaCommunicator::Options communicator_options(c10::Device device, GroupCore& core, bool share_gpu);

// Every operation's end event is recorded at once, although few are ever waited for. An event recorded later would also
// cover everything that the stream received in between. The later stream could then deadlock with a rank that issues
// groups in another order, and the flight record would show finished operations as pending. Also, a stream that is
// capturing or destroyed by then accepts no event.
//
// Each line keeps its eager operations until the device has passed them, for the flight record and to hold tensors of
// works that no caller waited for. Only drain() and close() wait for the device.
//
// Locks: mutex_ is held while an operation is enqueued, so threads may issue concurrently. Nothing that needs Python
// runs under it. life_ guards the communicator's pointer for callers that only check.
class CudaGroup {
 public:
  using RecordPtr = std::shared_ptr<OperationRecord>;
  // The line of an operation: kCollectives, or a peer and a direction.
  static constexpr int kCollectives = 0;
  static int line_of(int peer, bool is_send) { return is_send ? 1 + peer : -1 - peer; }

  // Which line, whether it uses the line's own stream, and whether it records device times.
  struct Way {
    int line = kCollectives;
    bool own_stream = false;
    bool timed = false;
  };

  // `nccl`: an entry of the dispatch table; null if NCCL has no share.
  CudaGroup(c10::Device device, std::unique_ptr<CudaCommunicator> communicator, std::shared_ptr<NcclEntry> nccl = {});
  explicit CudaGroup(c10::Device device, c10::intrusive_ptr<c10d::Backend> carrier);
  // Over several nodes. here: of this node's ranks. carrier: has what `nodes` does not take; may be null.
  CudaGroup(c10::Device device, std::shared_ptr<CudaCommunicator> here, std::unique_ptr<NodesCommunicator> nodes,
            c10::intrusive_ptr<c10d::Backend> carrier);
  ~CudaGroup();

  // Lets the core number and record the operation, then runs its body with its stream current.
  void enqueue(const RecordPtr& operation, const Way& way, GroupCore& core, FlightEntry& entry);
  // Returns an operation for everything on the current stream so far, outside any line. It keeps no tensors. `start`:
  // set if it is timed.
  RecordPtr mark(c10d::OpType type, const char* name, uint64_t sequence, SharedEvent start = {});

  // Throws the error that ended the group, if any.
  void check(const OperationContext& context);
  bool failed(const OperationContext& context, std::exception_ptr& error);  // returns the error instead
  void abort();
  // Releases the operation's tensors once the device is done, because no caller keeps them.
  void abandon(OperationRecord& operation);
  // Checks what the device has finished and calls `completed` for each operation, without a lock.
  void look();
  // Returns false if the device was not done in time. Graphs that still run are waited for when the communicator is
  // destroyed.
  bool drain(Clock::time_point until);
  // Forwards to the communicator.
  std::optional<std::string> wait_told(Clock::time_point until);
  // Frees device memory if `drained`. Otherwise kernels may still use the memory, so it is leaked.
  void close(bool drained);

  const c10::Device device;
  const c10::intrusive_ptr<c10d::Backend> carrier;  // carries CUDA tensors that ark cannot; else null
  const std::shared_ptr<NcclEntry> nccl;            // carries some collectives beside ark; may be null
  EventPool& events() { return *events_; }
  std::shared_ptr<CudaCommunicator> communicator();  // of the whole group; null if carried, over nodes or closed
  std::shared_ptr<NodesCommunicator> nodes();        // null unless over several nodes; null if closed
  uint64_t shared_bytes();                           // GPU memory of this rank that peers map
  // Device begin and end times on the steady clock, in ns; 0: unknown. `ended`: whether to read the end.
  std::pair<int64_t, int64_t> times_of(const OperationRecord& operation, bool ended);
  // Set before the first operation. look() calls `started` for a timed operation that is still running.
  std::function<void(const OperationRecord&)> completed, started;

 private:
  struct Line {
    std::optional<c10::Stream> own, own_captured;
    RecordPtr last, last_captured;
    std::deque<RecordPtr> pending;
    size_t look_at = 0;               // number of pending operations at which to ask the device next
    std::vector<RecordPtr> captured;  // of the newest capture, with what they keep
  };
  c10::Stream own_stream(Line& line, bool captured);
  // Whose kernels the watch looks after; null if carried or closed.
  std::shared_ptr<CudaCommunicator> watched();
  // Moves finished operations to `passed`.
  void look(Line& line, std::vector<RecordPtr>& passed, bool all);

  std::atomic<int> abandoned_{0};
  std::unique_ptr<DeviceClock> clock_;  // created under mutex_ at the first timed operation
  std::mutex life_;
  std::shared_ptr<CudaCommunicator> communicator_;
  std::shared_ptr<CudaCommunicator> here_;  // with nodes_: of this node's ranks
  std::shared_ptr<NodesCommunicator> nodes_;
  std::mutex mutex_;
  std::map<int, Line> lines_;
  std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>();
};

}  // namespace ark

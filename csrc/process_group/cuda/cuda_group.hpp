// A group's side on one CUDA device: its communicator, its streams, and the order in which operations reach the device.
//
// Operations of one line reach the device in the order of issue: the collectives are one line, the messages sent to a
// peer another, those received from it a third. A synchronous operation is enqueued on the caller's current stream, an
// asynchronous one on a stream of the line, after all that the current stream holds. Where consecutive operations of a
// line are on different streams, the later stream waits for the end event of the earlier. Captured operations are
// ordered among those of the same capture, eager ones among the eager: an event of the one kind must not be waited on
// by the other.
//
// Every operation's end event is recorded at once, though few are ever waited for: one recorded when it is needed would
// stand for all that its stream got in between. The later stream could then wait in a circle with another rank, whose
// order of issue among groups differs; the flight record would show what ended as pending behind what hangs; and a
// stream that captures by then, or that its owner has destroyed, takes no event at all.
//
// Each line keeps its eager operations until the device has passed them, for the flight record and for the tensors of
// works that nobody waited for. Nothing here waits for the device but drain() and close().
//
// Locks: mutex_ is held while an operation is enqueued, so threads may issue concurrently; nothing that needs Python
// runs under it. life_ guards the communicator's pointer, for those who only check.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "collectives/cuda/cuda_communicator.hpp"
#include "health/flight/flight_record.hpp"
#include "process_group/carriers/nccl_entry.hpp"
#include "process_group/cuda/cuda_streams.hpp"
#include "process_group/cuda/device_clock.hpp"
#include "process_group/operation_record.hpp"

namespace ark {

class GroupCore;

class CudaGroup {
 public:
  using RecordPtr = std::shared_ptr<OperationRecord>;
  // Which line an operation belongs to: kCollectives, or a peer and a direction.
  static constexpr int kCollectives = 0;
  static int line_of(int peer, bool is_send) { return is_send ? 1 + peer : -1 - peer; }

  // On which line, on its own stream or the caller's, and whether the device's time is taken.
  struct Way {
    int line = kCollectives;
    bool own_stream = false;
    bool timed = false;
  };

  // `nccl`: an entry of the dispatch table; null where it has no share.
  CudaGroup(c10::Device device, std::unique_ptr<CudaCommunicator> communicator, std::shared_ptr<NcclEntry> nccl = {});
  explicit CudaGroup(c10::Device device, c10::intrusive_ptr<c10d::Backend> carrier);
  ~CudaGroup();

  // Has the group's core number and record the operation, and runs its body with its stream current.
  void enqueue(const RecordPtr& operation, const Way& way, GroupCore& core, FlightEntry& entry);
  // What the current stream holds by now, as an operation: for what belongs to no line. Keeps no tensors. `start`:
  // where it is timed.
  RecordPtr mark(c10d::OpType type, const char* name, uint64_t sequence, SharedEvent start = {});

  // Throws the error that ended the group, if one did.
  void check(const OperationContext& context);
  bool failed(const OperationContext& context, std::exception_ptr& error);  // the same, returned
  void abort();
  // Nobody keeps the operation's tensors any more: they go when the device is done with them.
  void abandon(OperationRecord& operation);
  // Looks at what the device has done since; `completed` is told of each operation, never with a lock held.
  void look();
  // False: the device was not done by then. Graphs that still run are waited for when the communicator goes.
  bool drain(Clock::time_point until);
  // As the communicator's.
  std::optional<std::string> wait_told(Clock::time_point until);
  // Frees device memory. `drained`: the device is done; otherwise the memory is given up, since kernels may use it.
  void close(bool drained);

  const c10::Device device;
  const c10::intrusive_ptr<c10d::Backend> carrier;  // carries CUDA tensors, where ark cannot; else null
  const std::shared_ptr<NcclEntry> nccl;            // carries single collectives beside ark; may be null
  EventPool& events() { return *events_; }
  std::shared_ptr<CudaCommunicator> communicator();  // null: carried, or closed
  uint64_t shared_bytes();                           // of this rank's GPU memory, which the group's peers map
  // When the device began and ended the operation, on the steady clock (ns); 0: not known. Ended or not.
  std::pair<int64_t, int64_t> times_of(const OperationRecord& operation, bool ended);
  // Set before the first operation. `started` is told of operations that are timed and still run, when somebody looks.
  std::function<void(const OperationRecord&)> completed, started;

 private:
  struct Line {
    std::optional<c10::Stream> own, own_captured;
    RecordPtr last, last_captured;
    std::deque<RecordPtr> pending;
    size_t look_at = 0;               // how many are pending when the device is asked next
    std::vector<RecordPtr> captured;  // of the newest capture, with what they keep
  };
  c10::Stream own_stream(Line& line, bool captured);
  // Moves what the device has passed to `passed`.
  void look(Line& line, std::vector<RecordPtr>& passed, bool all);

  std::atomic<int> abandoned_{0};
  std::unique_ptr<DeviceClock> clock_;  // from the first timed operation on; made under mutex_
  std::mutex life_;
  std::shared_ptr<CudaCommunicator> communicator_;
  std::mutex mutex_;
  std::map<int, Line> lines_;
  std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>();
};

}  // namespace ark

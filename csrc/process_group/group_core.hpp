// What the members of one group share with their works: the communicator, the executor, health, flight record.
//
// A GroupCore outlives the ProcessGroupArk as long as a Work of its is held. In a forked child it is inert: every
// call raises, nothing is joined, closed or told to the peers.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "collectives/cpu/shm_communicator.hpp"
#include "collectives/node_plan.hpp"
#include "collectives/rma/rma_window.hpp"
#include "health/flight/flight_record.hpp"
#include "process_group/executor.hpp"
#include "process_group/timeout_extension.hpp"

namespace ark {

class CudaGroup;

class GroupCore : public std::enable_shared_from_this<GroupCore> {
 public:
  GroupCore(int rank, int size);
  ~GroupCore();

  // Throws Error(closed) after shutdown() or in a forked child.
  void check_open(const char* operation) const;
  void check_forked(const char* operation) const;
  bool forked() const;

  OperationContext context(const char* operation, uint64_t sequence, std::chrono::milliseconds asked) const;

  // What an operation is given that asked for `asked` (-1 ms: the group's timeout), with its share of extensions.
  std::chrono::milliseconds extended(std::chrono::milliseconds asked, const TimeoutExtension::SharePtr& share) const;

  // Counts an operation in (but for messages, which have their number) and records it, in the order of issue.
  void number(OperationRecord& operation, FlightEntry& entry);
  // Notes the outcome of a work: flight record, error state, failure dump, completion hook.
  void finished(const WorkArk& work, std::exception_ptr error);

  // The same for an operation on CUDA tensors that could not be enqueued, and for the device as a whole: before what it
  // still waits for is let go, which then is no success, and afterwards.
  void not_enqueued(uint64_t flight, const Error& error);
  void device_gives_up(const Error& error);
  void device_gave_up(const Error& error);

  // The group's side on its CUDA device; null before the first operation there.
  std::shared_ptr<CudaGroup> cuda();
  void adopt(std::shared_ptr<CudaGroup> cuda);

  // Called when an operation fails, on the thread that finds it out, and before abort(): for what people want to
  // capture then. More than once after one failure, as every later operation fails too. What a hook throws is a
  // warning.
  using AbortHook = std::function<void()>;
  void add_abort_hook(int64_t id, AbortHook hook);
  void remove_abort_hook(int64_t id);
  void run_abort_hooks();

  // Of the ranks that this one shares memory with.
  GroupHealth& health() { return shm ? shm->health() : *node_health; }
  // A window whose tensor is registered: peers may write to it as long as the group lives, or until it is closed.
  void keep(std::shared_ptr<RmaWindow> window);
  void forget(const std::shared_ptr<RmaWindow>& window);

  void abort(const std::string& why);
  // Waits for what was issued (bounded, on the device by a time of its own), says goodbye to the peers, stops the
  // threads. Idempotent.
  void shutdown(std::chrono::milliseconds patience, std::chrono::milliseconds device_patience);
  static void shutdown_in_background(std::shared_ptr<GroupCore> core, std::chrono::milliseconds patience,
                                     std::chrono::milliseconds device_patience);
  void wait_for_hooks();  // until the completion hook has run for everything finished so far

  const int rank;
  const int size;
  std::string name;
  int global_rank = 0;
  std::atomic<int64_t> timeout_ms{30 * 60 * 1000};
  const std::shared_ptr<TimeoutExtension> extension = std::make_shared<TimeoutExtension>();
  std::unique_ptr<Communicator> communicator;
  ShmCommunicator* shm = nullptr;             // communicator, when it is that
  c10::intrusive_ptr<c10d::Backend> carrier;  // what carries the group otherwise
  // Of a group over several nodes: where its ranks are, its node's health, and RDMA or why there is none.
  std::optional<NodePlan> plan;
  GroupHealth* node_health = nullptr;
  std::shared_ptr<rdma::Messages> rdma;
  std::string no_rdma;
  std::shared_ptr<Executor> executor = std::make_shared<Executor>();
  std::atomic<uint64_t> sequence{0};  // collectives issued
  std::atomic<uint64_t> p2p_sequence{0};
  std::atomic<c10d::ErrorType> error{c10d::ErrorType::SUCCESS};
  uint32_t flight_group = 0;
  std::string flight_dump;  // file prefix, empty: no dump
  std::function<void(std::shared_ptr<c10d::WorkInfo>)> completion_hook;
  std::atomic<bool> timing{false};  // operations on CUDA tensors take the device's time

 private:
  void report_failure(const Error& error);
  void run_hook(c10d::OpType type, uint64_t sequence, Clock::time_point started, Clock::time_point ended);
  void drain_hooks();
  void close_device(std::chrono::milliseconds patience);

  std::mutex cuda_mutex_;
  std::optional<Error> device_failure_;  // under cuda_mutex_
  std::shared_ptr<CudaGroup> cuda_;      // after the communicator: it uses that one's health, and goes first

  std::mutex windows_mutex_;
  std::vector<std::shared_ptr<RmaWindow>> windows_;  // under windows_mutex_

  std::mutex hooks_mutex_;
  std::condition_variable hooks_changed_;
  std::map<int64_t, std::shared_ptr<AbortHook>> abort_hooks_;  // under hooks_mutex_
  std::deque<std::shared_ptr<c10d::WorkInfo>> hooks_;
  int hooks_pending_ = 0;
  bool hooks_running_ = false;
  const uint64_t fork_generation_;
  std::atomic<bool> closed_{false};
};

// Groups of this process that are open, for the shutdown at exit.
void shutdown_all_groups(std::chrono::milliseconds patience);
// Takes note of what devices have done so far, for the flight record.
void look_at_devices();

}  // namespace ark

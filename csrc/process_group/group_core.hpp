// State that a group's members share with its works: communicator, executor, health and flight record.
//
// A GroupCore outlives its ProcessGroupArk while any of its works is alive. In a forked child it is inert: every call
// raises, and nothing is joined, closed or reported to peers.
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

  // Returns the operation's timeout: `asked` (-1 ms: the group's) plus its share of extensions.
  std::chrono::milliseconds extended(std::chrono::milliseconds asked, const TimeoutExtension::SharePtr& share) const;

  // Numbers the operation (messages have a number already) and records it, in issue order.
  void number(OperationRecord& operation, FlightEntry& entry);
  // Reports the end of a work: flight record, error state, failure dump, completion hook.
  void finished(const WorkArk& work, std::exception_ptr error);

  // The same for an operation on CUDA tensors that could not be enqueued, and for a failed device: before waiting
  // operations are released (their end is then no success), and afterwards.
  void not_enqueued(uint64_t flight, const Error& error);
  void device_gives_up(const Error& error);
  void device_gave_up(const Error& error);

  // The group's side on its CUDA device; null before the first operation there.
  std::shared_ptr<CudaGroup> cuda();
  void adopt(std::shared_ptr<CudaGroup> cuda);

  // Called on the thread that finds a failed operation, before abort(), to capture state. Every later operation fails
  // too, so hooks may run more than once. Exceptions from a hook become warnings.
  using AbortHook = std::function<void()>;
  void add_abort_hook(int64_t id, AbortHook hook);
  void remove_abort_hook(int64_t id);
  void run_abort_hooks();

  // Of the ranks that this one shares memory with.
  GroupHealth& health() { return shm ? shm->health() : *node_health; }
  // The first failure; before any operation has found one, whether a rank of this machine has ended or failed.
  c10d::ErrorType state();
  // A window whose tensor is registered: peers may write to it as long as the group lives, or until it is closed.
  void keep(std::shared_ptr<RmaWindow> window);
  void forget(const std::shared_ptr<RmaWindow>& window);

  void abort(const std::string& why);
  // Waits for issued operations (bounded, with a separate limit for the device), says goodbye to peers and stops the
  // threads. Idempotent.
  void shutdown(std::chrono::milliseconds patience, std::chrono::milliseconds device_patience);
  static void shutdown_in_background(std::shared_ptr<GroupCore> core, std::chrono::milliseconds patience,
                                     std::chrono::milliseconds device_patience);
  void wait_for_hooks();  // until the completion hook has run for all works finished so far

  const int rank;
  const int size;
  std::string name;
  int global_rank = 0;
  std::atomic<int64_t> timeout_ms{30 * 60 * 1000};
  const std::shared_ptr<TimeoutExtension> extension = std::make_shared<TimeoutExtension>();
  std::unique_ptr<Communicator> communicator;
  ShmCommunicator* shm = nullptr;             // the communicator, if it uses shared memory
  c10::intrusive_ptr<c10d::Backend> carrier;  // carries the group otherwise
  // For a group over several nodes: the place of its ranks, the health of this node, and RDMA or why it is not used.
  std::optional<NodePlan> plan;
  GroupHealth* node_health = nullptr;
  std::shared_ptr<rdma::Messages> rdma;
  std::string no_rdma;
  std::shared_ptr<Executor> executor = std::make_shared<Executor>();
  std::atomic<uint64_t> sequence{0};  // number of collectives issued
  std::atomic<uint64_t> p2p_sequence{0};
  std::atomic<c10d::ErrorType> error{c10d::ErrorType::SUCCESS};
  uint32_t flight_group = 0;
  std::string flight_dump;  // file prefix; empty: no dump
  std::function<void(std::shared_ptr<c10d::WorkInfo>)> completion_hook;
  std::atomic<bool> timing{false};  // operations on CUDA tensors record device times

 private:
  void report_failure(const Error& error);
  void run_hook(c10d::OpType type, uint64_t sequence, Clock::time_point started, Clock::time_point ended);
  void drain_hooks();
  void close_device(std::chrono::milliseconds patience);

  std::mutex cuda_mutex_;
  std::optional<Error> device_failure_;  // guarded by cuda_mutex_
  std::shared_ptr<CudaGroup> cuda_;  // declared after the communicator, whose health it uses, so it is destroyed first

  std::mutex windows_mutex_;
  std::vector<std::shared_ptr<RmaWindow>> windows_;  // under windows_mutex_

  std::mutex hooks_mutex_;
  std::condition_variable hooks_changed_;
  std::map<int64_t, std::shared_ptr<AbortHook>> abort_hooks_;  // guarded by hooks_mutex_
  std::deque<std::shared_ptr<c10d::WorkInfo>> hooks_;
  int hooks_pending_ = 0;
  bool hooks_running_ = false;
  const uint64_t fork_generation_;
  std::atomic<bool> closed_{false};
};

// Shuts down all open groups of this process at exit.
void shutdown_all_groups(std::chrono::milliseconds patience);
// Updates the flight record with what devices have finished so far.
void look_at_devices();

}  // namespace ark

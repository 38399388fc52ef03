// The c10d::Backend "ark": PyTorch's collectives over ark's communicators.
//
// Every virtual method checks its arguments, describes the operation once (Call), turns it into one blocking body over
// the group's Communicator and issues that. Only issue() knows how a body runs (operation_record.hpp); for CUDA tensors
// it enqueues the body on a stream (cuda_group.hpp). Results have the same bits with every carrier. Methods may be
// called from any thread; the issue order must be the same on all ranks.
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collectives/cuda/cuda_dispatch.hpp"
#include "collectives/cuda/registration.hpp"
#include "collectives/dispatch.hpp"
#include "collectives/node_plan.hpp"
#include "collectives/sum_order.hpp"
#include "cuda/fused/tiles.cuh"
#include "dma/rdma/endpoint.hpp"
#include "dma/rdma/options.hpp"
#include "process_group/comms_record.hpp"
#include "process_group/cuda/cuda_streams.hpp"
#include "process_group/group_core.hpp"
#include "process_group/rma/window_interface.hpp"
#include "process_group/tensors.hpp"
#include "process_group/torch_version.hpp"
#include "process_group/translate.hpp"

namespace ark {

class CudaCommunicator;
class NodesCommunicator;
class CudaGroup;
class CudaWork;
class NcclEntry;

class ProcessGroupArk : public c10d::Backend {
 public:
  // The pg_options of init_process_group() and new_group(); copyable.
  struct Options : c10d::Backend::Options {
    enum class SharedMemory : int { automatic = 0, on = 1, off = 2 };
    Options() : c10d::Backend::Options("ark") {}
    SharedMemory shared_memory = SharedMemory::automatic;
    bool debug = false;                   // compare all ranks' arguments before every collective
    int64_t node = -1;                    // count as this machine, for trials; -1: the real one
    int64_t spin_us = -1;                 // how long a waiting thread polls before it sleeps; negative: automatic
    int64_t flight_record = 2048;         // operations that the process's flight record keeps
    std::string flight_dump;              // file prefix for dumps after a failure; empty: none
    std::vector<Rule> dispatch;           // empty: measured defaults; rank 0's setting counts
    std::vector<CudaRule> cuda_dispatch;  // the same for CUDA tensors
    int64_t buffer_mb = 512;              // most GPU memory that peers map for large buckets; rank 0's setting counts
    bool share_gpu = false;               // ranks may share a GPU; slow, for tests
    // true: CUDA tensors go through host memory; false: never; unset: only if peers' memory is unavailable. Rank 0's
    // counts.
    std::optional<bool> disable_p2p;
    bool nccl_leaves_p2p = false;            // PyTorch's NCCL avoids peers' memory (NCCL_P2P_DISABLE); rank 0's
    bool timing = false;                     // operations on CUDA tensors record device times
    bool fast_reduction = false;             // CUDA tensors: sums in any order if that measured faster; rank 0's
    SumOrder sums;                           // over several nodes; alike on all ranks
    rdma::Wish net = rdma::Wish::automatic;  // carrier between nodes
    rdma::Options rdma;                      // settings for RDMA
    int64_t global_rank = -1;                // for names of dumps; -1: the rank in the group
    // Makes the carrier (PyTorch's Gloo) if ranks share no memory; called at most once, on every rank. split(), merge()
    // and shrink() keep it.
    std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store>, int rank, int size,
                                                    std::chrono::milliseconds timeout)>
        make_carrier;
    // The same for CUDA tensors if ark cannot move them between these GPUs (PyTorch's NCCL).
    std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store>, int rank, int size,
                                                    std::chrono::milliseconds timeout)>
        make_cuda_carrier;
    // A dispatch for this device and number of ranks that was measured before: fields and values, none of them for the
    // built-in values; nullopt: it is to be measured. Only rank 0 is asked, and only if cuda_dispatch has no rule.
    std::function<std::optional<std::map<std::string, uint64_t>>(int device, int size)> known_dispatch;
    // Measures such a dispatch; collective. Does not throw, and returns within a bounded time whatever peers do. Rank
    // 0's result counts.
    std::function<std::map<std::string, uint64_t>(c10::intrusive_ptr<c10d::Store>, int rank, int size, int device)>
        measure_dispatch;
    // Allocates an uninitialised tensor that can be registered (ark_torch.memory.pool()).
    std::function<at::Tensor(int64_t size, at::ScalarType dtype, c10::Device device)> allocate;
    std::function<void(const std::string&)> log;  // one line for people

    // PyTorch copies a parent's options for split and merge. Without this they would be shared and modified.
    c10::intrusive_ptr<c10d::Backend::Options> clone() const ARK_OVERRIDE_SINCE_2_14;
  };

  // Collective over the group's ranks. Returns when all have joined, or throws.
  static c10::intrusive_ptr<ProcessGroupArk> create(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    const c10::intrusive_ptr<Options>& options);
  ProcessGroupArk(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  const c10::intrusive_ptr<Options>& options);
  ~ProcessGroupArk() override;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Dense collectives (dense_reduce.cpp, dense_gather.cpp, dense_all_to_all.cpp).
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions& = {}) override;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions& = {}) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions& = {}) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions& = {}) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions& = {}) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions& = {}) override;
  // gather_into_tensor(), its former name, ends here too.
  WorkPtr gather_single(at::Tensor&, at::Tensor&, const c10d::GatherOptions& = {}) ARK_OVERRIDE_SINCE_2_14;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions& = {}) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions& = {}) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions& = {}) override;
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions& = {}) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions& = {}) override;
  WorkPtr barrier(const c10d::BarrierOptions& = {}) override;

  // Several tensors in one call, and sparse COO tensors (coalesced.cpp, sparse.cpp).
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions& = {}) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions& = {}) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions& = {}) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions& = {}) override;
  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions& = {}) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Point to point (send_recv.cpp).
  WorkPtr send(Tensors&, int destination, int tag) override;
  WorkPtr recv(Tensors&, int source, int tag) override;
  WorkPtr recvAnysource(Tensors&, int tag) override;

  // Administration (process_group_ark.cpp).
  const std::string getBackendName() const override { return "ark"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return core_->sequence.load(); }
  void setGroupUid(const std::string& uid) override;
  void monitoredBarrier(const c10d::BarrierOptions&, bool wait_all_ranks = false) override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override { core_->timing = true; }  // on the host getDuration() always works
  c10d::ErrorType getError() override { return core_->state(); }
  void abort() override;
  void shutdown() override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) ARK_OVERRIDE_SINCE_2_14;
  bool supportsAbortHooks() const ARK_OVERRIDE_SINCE_2_15 { return true; }
  void registerAbortHook(int64_t id, GroupCore::AbortHook hook) ARK_OVERRIDE_SINCE_2_14;
  void unregisterAbortHook(int64_t id) ARK_OVERRIDE_SINCE_2_14;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>&) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>&,
                                          const c10::intrusive_ptr<c10d::Backend::Options>&, const int& rank,
                                          const int& size) override;
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int flags = 0,
                                           const c10::intrusive_ptr<c10d::Backend::Options>& = nullptr) override;

  // For example "2 nodes (2 + 2 ranks), 2 rails, gloo between them"; empty if all ranks share memory.
  const std::string& plan() const { return plan_; }
  std::string rdma_trouble() const { return core_->rdma ? core_->rdma->trouble() : ""; }
  uint64_t messages_between_nodes() const;  // sent by this rank in collectives
  bool shares_memory() const { return core_->shm != nullptr; }
  // What moves CUDA tensors: "ark", a carrier's name, or "" before the first such operation.
  std::string cuda_carrier() const;
  // Why CUDA tensors go through host memory; empty if they do not.
  std::string cuda_on_host() const;
  std::optional<CudaDispatch> cuda_dispatch() const;  // nullopt before the first use, and if ark does not carry
  uint64_t cuda_shared_bytes() const;
  uint64_t cuda_registered_bytes() const;
  uint64_t cuda_carried() const;  // collectives that NCCL carried as a dispatch table entry

  // Until it is set to false: operations on CUDA tensors that are captured are part of a training step that all ranks
  // of the group capture together, with the same operations (ark_torch.train.capture).
  void set_captures_step(bool value);
  bool captures_step() const { return captures_step_.load(std::memory_order_relaxed); }

  // Registered memory (registration.cpp). Collective. Returns false, and does nothing, if ark does not carry CUDA
  // tensors of this group. A rank without a tensor passes none, and all ranks learn of it.
  bool register_memory(const std::optional<at::Tensor>& tensor);
  void deregister_memory(const std::optional<at::Tensor>& tensor);
  // Registers all segments of a pool (address and bytes) on this device. Segments that are registered already stay so.
  using PoolId = std::pair<uint64_t, uint64_t>;
  using Segments = std::vector<std::pair<uintptr_t, uint64_t>>;
  bool register_pool(const PoolId& pool, c10::Device device, const Segments& segments);
  void deregister_pool(const PoolId& pool);

  // One-sided windows on CPU tensors (rma/windows.cpp), PyTorch's interface since 2.14. Both calls are collective.
  bool supportsWindow() const ARK_OVERRIDE_SINCE_2_14;
  c10::intrusive_ptr<BaseWindow> new_window(const std::optional<at::Tensor>& tensor = std::nullopt)
      ARK_OVERRIDE_SINCE_2_14;
  // For WindowArk. `offer` returns this rank's memory, or throws what its tensor lacks.
  std::shared_ptr<RmaWindow> open_window(const std::function<RmaWindow::Memory()>& offer);
  void close_window(const std::shared_ptr<RmaWindow>& window);
  bool shares_windows() const;  // true if other ranks must be able to map this rank's tensor
  const std::shared_ptr<GroupCore>& core() const { return core_; }

  // Launches a compiled region with collectives of this group on the current stream, numbered, recorded and ordered as
  // one operation of the group. Returns false, and does nothing, if ark does not carry CUDA tensors of this group.
  using RegionLaunch = c10::function_ref<void(CudaCommunicator&, const Operation&)>;
  bool launch_region(const char* name, c10::Device device, RegionLaunch launch);
  // The same for a group over several nodes, with which regions_over_nodes() agrees. Returns false also if the group is
  // on one node.
  using NodesLaunch = c10::function_ref<void(NodesCommunicator&, const Operation&)>;
  bool launch_over_nodes(const char* name, c10::Device device, NodesLaunch launch);
  // The number of nodes that collectives of compiled regions reach on CUDA tensors: 1 if all ranks share memory; 0, and
  // sets `why`, if they reach no other node. Alike on all ranks.
  int regions_over_nodes(std::string& why) const;
  // Runs a fused operator on CPU tensors as one collective of the group and returns when it is done. Ranks compare
  // `fingerprint`.
  using FusedBody = OperationRecord::Body;
  void run_fused(const char* name, const at::Tensor& result, uint64_t fingerprint, FusedBody body);
  // What ranks have agreed on for a fused operator's CUDA calls with this key, or none yet.
  std::optional<bool> agreed(const std::vector<int64_t>& key) const;
  void agree(const std::vector<int64_t>& key, bool value);
  // What a fused operator on CUDA tensors has reported (collectives/cuda/tile_memory.hpp).
  std::optional<device::TileReport> tile_failure() const;
  // Allocates an uninitialised CUDA tensor that can be registered, if the group has registered memory; else undefined.
  at::Tensor allocate_registered(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);
  // Logs, once, that results of fused operators are copied since the group has no registered memory.
  void tell_of_copies();
  // Throws the error that ended the group on this device, if any.
  void check_region(const char* name, c10::Device device);

  // Allocates tensors from ark_torch.memory.pool().
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;
  bool supportsTensorAlloc(c10::DeviceIndex index) override;

 private:
  using Body = OperationRecord::Body;
  // What one thread has issued between startCoalescing and endCoalescing.
  struct SelfEnd {
    at::Tensor tensor;
    c10::Stream stream;  // the issuer's
    SharedEvent issued;
  };
  struct Coalescing {
    std::vector<WorkPtr> works;
    std::deque<SelfEnd> self_sends, self_recvs;  // without a counterpart yet
    c10::intrusive_ptr<c10d::Backend> carrier;   // also coalesces, from its first operation on
  };

  void join();  // meets the other ranks (join.cpp)
  std::pair<NodePlan, Neighbourhood> find_node(StoreAdapter& store, const ConnectResult& result);
  void join_nodes(StoreAdapter& store, const ConnectResult& result);
  void tell_mixed_versions(StoreAdapter& store) const;
  CallSite site(const char* operation) const;  // also checks that the group is open
  // Runs or queues the body; for CUDA tensors enqueues it. The call's outputs are the work's result (issue.cpp).
  WorkPtr issue(const Call& call, Body body);
  c10::intrusive_ptr<WorkArk> run_on_host(const Call& call, Body body);
  c10::intrusive_ptr<WorkArk> make_work(c10d::OpType type, const char* name, Tensors outputs);
  FlightEntry flight_entry(const Call& call) const;
  // Fills in everything except what numbering and running add.
  void describe(const Call& call, Body body, const FlightEntry& entry, OperationRecord& operation) const;
  const CommsGroup& comms();
  // The shape that ranks compare in debug mode; otherwise 0.
  uint64_t debug_shape(const at::Tensor& tensor) const { return options_->debug ? shape_hash(1, tensor) : 0; }
  uint64_t debug_shape(const Tensors& list) const {
    uint64_t hash = 1;
    for (const at::Tensor& tensor : list) hash = options_->debug ? shape_hash(hash, tensor) : 0;
    return hash;
  }
  WorkPtr transfer_to_self(const CallSite& site, const at::Tensor& tensor, bool is_send);
  WorkPtr transfer(Tensors& tensors, int peer, int tag, bool is_send, bool any_source);
  uint64_t next_message(bool is_send, int peer, int tag);  // counts messages, for the flight record
  WorkPtr collect(WorkPtr work);                           // keeps the work while coalescing

  // CUDA tensors (issue.cpp, cuda/cuda_side.cpp, cuda/first_use.cpp).
  c10::Device device_of(const Call& call) const;  // of all tensors; refuses several devices
  std::shared_ptr<CudaGroup> cuda_side(const char* operation, c10::Device device);
  std::shared_ptr<CudaGroup> join_on(const char* operation, c10::Device device);
  using Check = std::function<void()>;  // called between waits; throws what ends them
  CudaDispatch find_dispatch(KeyValueStore& store, c10::Device device, const std::function<Check()>& make_check);
  // Over several nodes (cuda/cuda_nodes.cpp). Returns null on all ranks, and sets `why`, if the carrier should have
  // all.
  std::shared_ptr<CudaGroup> join_nodes_on(c10::Device device, std::string& why);
  std::shared_ptr<CudaCommunicator> join_node_on(c10::Device device, std::string& why);
  DispatchLimits cuda_limits() const;
  [[noreturn]] void fail_cuda(KeyValueStore& store, Error error);
  void tell_cuda_failure(KeyValueStore& store, const Error& error) const;
  static void raise_peers_cuda_failure(KeyValueStore& store, int rank);
  static void raise_last_words(KeyValueStore& store, int rank);
  std::string host_line(const CudaCommunicator& communicator) const;
  std::shared_ptr<NcclEntry> nccl_entry(c10::Device device, const CudaDispatch& dispatch);
  void meet_for_nccl(const Call& call, CudaGroup& cuda);
  void tell_of_engines(const std::string& why);
  void tell_of_nccl(NcclEntry& nccl);
  c10::intrusive_ptr<CudaWork> enqueue(const Call& call, Body body, const std::shared_ptr<CudaGroup>& cuda);
  void enqueue_region(const char* name, const std::shared_ptr<CudaGroup>& cuda, const Body& body);
  WorkPtr carry_cuda(const Call& call, CudaGroup& cuda);
  // `message`: the number of a send or recv.
  c10::intrusive_ptr<CudaWork> enqueue_on(int line, uint64_t message, const Call& call, Body body,
                                          const std::shared_ptr<CudaGroup>& cuda, FlightEntry entry);
  WorkPtr transfer_cuda(const Call& call, const FlightEntry& entry, uint64_t number);
  std::optional<c10::Device> barrier_device(const c10d::BarrierOptions& options);
  WorkPtr barrier_cuda(const Call& call, const c10d::BarrierOptions& options, c10::Device device);
  WorkPtr all_reduce_sparse_cuda(const at::Tensor& tensor, const c10d::AllreduceOptions& options);

  // Registered memory (registration.cpp). All but range_of() require registering_.
  template <class Act>
  auto registering(const char* call, Act&& act);
  static RegisteredRange range_of(const CallSite& site, const std::optional<at::Tensor>& tensor);
  bool may_register();           // false, with a log line, if ark does not carry CUDA tensors
  Registration& registration();  // all ranks create it at the first call
  Windows* windows_on(const char* call, c10::Device device, std::shared_ptr<CudaCommunicator>& communicator);

  c10::intrusive_ptr<Options> options_like(const c10::intrusive_ptr<c10d::Backend::Options>& given) const;

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<GroupCore> core_;
  std::mutex mutex_;  // guards children, comms and coalescing
  std::map<std::string, c10::intrusive_ptr<c10d::Backend>> children_;
  CommsGroup comms_;
  bool comms_ready_ = false;
  std::map<std::thread::id, Coalescing> coalescing_;
  std::map<std::tuple<bool, int, int>, uint64_t> messages_;
  std::atomic<int> coalescing_threads_{0};
  int shrinks_ = 0;
  std::string start_;  // ConnectResult::start
  std::string plan_;
  std::mutex registering_;  // serialises calls; guards the members below
  std::unique_ptr<Registration> registration_;
  std::optional<Error> registration_failure_;
  bool told_of_registration_ = false;
  std::atomic<bool> told_of_engines_{false}, told_of_copies_{false};
  std::atomic<bool> captures_step_{false}, told_of_step_{false};
  std::mutex windowing_;  // one window is opened or closed at a time; what follows
  std::shared_ptr<MemoryMeeting> window_meeting_;
  std::optional<Error> window_failure_;
  uint32_t windows_ = 0;
  struct RegisteredPool {
    std::set<char*> known;
    std::vector<uint32_t> ids;
  };
  std::map<PoolId, RegisteredPool> pools_;
  std::mutex joining_;  // serialises creation of the device side; guards cuda_failure_
  std::optional<Error> cuda_failure_;
  mutable std::mutex agreeing_;
  std::map<std::vector<int64_t>, bool> agreed_;
};

}  // namespace ark

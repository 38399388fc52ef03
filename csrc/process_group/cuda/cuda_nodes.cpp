// A group's side on a CUDA device where its ranks are on several nodes: ark's kernels in each node, and between nodes
// the RDMA that already carries its CPU tensors.
//
// All ranks decide the same way: each tells whether its node's GPUs can share memory and its NIC can take what kernels
// ask for, and one that cannot leaves the group's CUDA tensors to PyTorch's NCCL, with the reason in the log. NCCL also
// has what nodes do not take (send and recv, all_to_all with splits); it connects at its first operation.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "collectives/cuda/cuda_dispatch.hpp"
#include "process_group/cuda/cuda_group.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark {

// Of this node's ranks. Returns null, and sets `why`, if their GPUs share no memory.
std::shared_ptr<CudaCommunicator> ProcessGroupArk::join_node_on(c10::Device device, std::string& why) {
  const NodePlan& plan = *core_->plan;
  const int places = static_cast<int>(plan.own().size());
  const std::string prefix = "ark/cuda/" + start_ + "/node/" + std::to_string(plan.node());
  auto store = std::make_shared<StoreAdapter>(c10::make_intrusive<c10d::PrefixStore>(prefix, store_));
  CudaCommunicator::Options options = communicator_options(device, *core_, options_->share_gpu);
  // Other nodes hear of a failure at once, too.
  options.log = [log = options.log, core = core_.get()](const Error& error) {
    core->communicator->abort(error);
    log(error);
  };
  options.check = [store, check = ends_with(*core_->node_health, options.timeout), rank = rank_] {
    try {
      check();
    } catch (const Error&) {
      raise_last_words(*store, rank);
      throw;
    }
    raise_peers_cuda_failure(*store, rank);
  };
  try {
    options.dispatch =
        agree_on_dispatch(*store, plan.local(), places, options_->cuda_dispatch, cuda_limits(), options.check);
    options.dispatch->leave_step_rings();  // measured for whole groups
    options.dispatch->step_copy_engine_from = CudaDispatch::kNever;
    return CudaCommunicator::create(plan.local(), places, store, *core_->node_health, options, why);
  } catch (const Error& error) {
    why = error.message();
    tell_cuda_failure(*store, error);
  }
  return nullptr;
}

std::shared_ptr<CudaGroup> ProcessGroupArk::join_nodes_on(c10::Device device, std::string& why) {
  if (!core_->plan || !options_->make_cuda_carrier) return nullptr;
  const NodePlan& plan = *core_->plan;
  if (!core_->rdma) {
    why += " (no RDMA: " + core_->no_rdma + ")";
    return nullptr;
  }
  if (options_->net != rdma::Wish::rdma) {  // its speed on a NIC is not measured yet
    why += " (ARK_NET=rdma would take RDMA between nodes)";
    return nullptr;
  }
  if (const std::string shape = BetweenStage::why_not(plan); !shape.empty()) {
    why = shape;
    return nullptr;
  }
  BetweenStage::Setup setup;
  setup.rank = rank_, setup.size = size_;
  setup.device = device.index();
  setup.messages = core_->rdma;
  setup.sums = options_->sums;
  setup.prefix = "cuda/" + start_ + "/between";
  setup.timeout = std::chrono::milliseconds(core_->timeout_ms.load());
  setup.fail = [core = core_.get(), rank = rank_](const Error& error) {
    const Error told = error.at(rank, "a collective on CUDA tensors between nodes");
    core->device_gives_up(told);
    core->communicator->abort(told);
  };
  std::shared_ptr<CudaCommunicator> here = join_node_on(device, setup.refused);
  if (here) setup.status = here->status();
  if (!here && setup.refused.empty()) setup.refused = "the GPUs of its node share no memory";
  const auto store = std::make_shared<StoreAdapter>(c10::make_intrusive<c10d::PrefixStore>("ark", store_));
  setup.store = store;
  std::string refused;
  auto stage = BetweenStage::open(std::move(setup), plan, *store, refused);
  if (!stage) {
    why = refused;
    return nullptr;
  }
  if (rank_ == 0 && options_->log) {
    const rdma::GpuPath& path = stage->path();  // the first rank of a node has a rail
    const std::string uneven = BetweenStage::no_regions(plan);
    options_->log(
        "group \"" + options_->group_name + "\" of " + std::to_string(size_) + " ranks on " + plan.text() +
        ": CUDA tensors are carried by ark's kernels in each node and RDMA between them, here " +
        (path.direct ? "from and to GPU memory (dma-buf)" : "through pinned memory of the host (" + path.reason + ")") +
        ", " + std::to_string(stage->bytes() >> 20) +
        " MB a rank; PyTorch's NCCL has send, recv and all_to_all with splits or lists" +
        (uneven.empty() ? "" : "; compiled regions are cut at its collectives: " + uneven));
  }
  auto nodes = std::make_unique<NodesCommunicator>(rank_, size_, plan, here, std::move(stage));
  auto carrier = options_->make_cuda_carrier(c10::make_intrusive<c10d::PrefixStore>("cuda-carrier/" + start_, store_),
                                             rank_, size_, std::chrono::milliseconds(core_->timeout_ms.load()));
  return std::make_shared<CudaGroup>(device, std::move(here), std::move(nodes), std::move(carrier));
}

}  // namespace ark

// Chooses the device and the carrier of operations on CUDA tensors.
//
// All ranks create the group's side on the device together at its first operation there, which may be a send. That
// waits for peers, so it cannot happen during graph capture. If ark cannot move bytes between these GPUs, PyTorch's
// NCCL gets the same calls. A rank uses one device per group: the first that it used.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

#include "collectives/cuda/cuda_communicator.hpp"
#include "jit/settings.hpp"
#include "process_group/cuda/cuda_group.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {
constexpr char kCudaFailure[] = "failure";
constexpr char kAsAsked[] = "as ARK_DISABLE_P2P asks";
}  // namespace

DispatchLimits ProcessGroupArk::cuda_limits() const {
  const PeerAccess access = !options_->disable_p2p   ? PeerAccess::tested
                            : *options_->disable_p2p ? PeerAccess::avoided
                                                     : PeerAccess::trusted;
  return {static_cast<uint64_t>(options_->buffer_mb) << 20, options_->fast_reduction, access,
          options_->nccl_leaves_p2p};
}

// One line for people: why CUDA tensors go through the host, how much memory that takes, and what NCCL carries.
std::string ProcessGroupArk::host_line(const CudaCommunicator& communicator) const {
  const std::string& why = communicator.why_on_host();
  const CudaDispatch& dispatch = communicator.dispatch();
  std::string line = "group \"" + options_->group_name + "\" of " + std::to_string(size_) +
                     " ranks: CUDA tensors go through memory of the host (" +
                     std::to_string(communicator.shared_bytes() >> 20) + " MB of it pinned for each rank), " +
                     (why.empty() ? kAsAsked : "for all pairs, since " + why);
  if (!options_->make_cuda_carrier || !NcclEntry::in(dispatch)) return line;
  const bool sums = dispatch.nccl_all_reduce_from != CudaDispatch::kNever;
  return line + ". PyTorch's NCCL has what it is faster with, of " +
         std::to_string(dispatch.nccl_all_gather_from >> 10) + " KB to " +
         std::to_string(dispatch.nccl_all_gather_to >> 20) + " MB" +
         (sums ? "" : ", but for sums, which ARK_REDUCTION=fast would give it");
}

uint64_t ProcessGroupArk::cuda_shared_bytes() const {
  const auto cuda = core_->cuda();
  return cuda ? cuda->shared_bytes() : 0;
}

std::string ProcessGroupArk::cuda_carrier() const {
  const auto cuda = core_->cuda();
  return !cuda ? "" : cuda->carrier && !cuda->nodes() ? cuda->carrier->getBackendName() : "ark";
}

std::string ProcessGroupArk::cuda_on_host() const {
  const auto cuda = core_->cuda();
  const auto communicator = cuda ? cuda->communicator() : nullptr;
  if (!communicator || !communicator->on_host()) return "";
  return communicator->why_on_host().empty() ? kAsAsked : communicator->why_on_host();
}

std::shared_ptr<CudaGroup> ProcessGroupArk::cuda_side(const char* operation, c10::Device device) {
  auto cuda = core_->cuda();
  if (!cuda) cuda = join_on(operation, device);
  if (cuda->device != device) {
    refuse({rank_, operation}, ErrorKind::invalid_argument,
           "the tensor is on " + device.str() + ", but this group uses " + cuda->device.str() +
               " on this rank, the device of its first operation on CUDA tensors",
           "Move the tensor there (torch.cuda.set_device early), or use a group for each device.");
  }
  return cuda;
}

std::shared_ptr<CudaGroup> ProcessGroupArk::join_on(const char* operation, c10::Device device) {
  const CallSite here{rank_, operation};
  if (const auto bound = getBoundDeviceId(); bound && bound->is_cuda() && *bound != device) {
    refuse(here, ErrorKind::invalid_argument,
           "the tensor is on " + device.str() + ", but init_process_group was given device_id=" + bound->str(),
           "Move the tensor there, or name this device.");
  }
  const std::lock_guard lock(joining_);
  if (auto made = core_->cuda()) return made;
  if (cuda_failure_) throw *cuda_failure_;
  auto store = std::make_shared<StoreAdapter>(c10::make_intrusive<c10d::PrefixStore>("ark/cuda/" + start_, store_));
  bool capturing = false;
  try {
    capturing = is_capturing(device);
  } catch (const Error& error) {
    fail_cuda(*store, error.at(rank_, operation));
  }
  if (capturing) {
    refuse(here, ErrorKind::invalid_argument,
           "this group's first operation on CUDA tensors is under graph capture, where ranks cannot meet",
           "Call one collective on CUDA tensors, on all ranks, before the capture begins.");
  }
  try {
    jit::ensure_configured();
    std::string why = "its ranks share no memory";
    std::shared_ptr<CudaGroup> side;
    if (core_->shm) {
      CudaCommunicator::Options options = communicator_options(device, *core_, options_->share_gpu);
      const auto make_check = [&]() -> Check {
        return [store, check = ends_with(core_->shm->health(), options.timeout), rank = rank_] {
          try {
            check();
          } catch (const Error&) {
            raise_last_words(*store, rank);
            throw;
          }
          raise_peers_cuda_failure(*store, rank);
        };
      };
      options.dispatch = find_dispatch(*store, device, make_check);
      options.check = make_check();
      auto communicator = CudaCommunicator::create(rank_, size_, store, core_->shm->health(), options, why);
      if (communicator) {
        auto nccl = nccl_entry(device, communicator->dispatch());
        if (communicator->on_host() && rank_ == 0 && options_->log) options_->log(host_line(*communicator));
        side = std::make_shared<CudaGroup>(device, std::move(communicator), std::move(nccl));
      }
    }
    if (!core_->shm) side = join_nodes_on(device, why);
    if (!side) {
      if (!options_->make_cuda_carrier) {
        throw Error(ErrorKind::system,
                    "ark cannot move CUDA tensors of this group (" + why + ") and nothing else is set",
                    ErrorContext{rank_, -1, operation, 0,
                                 "Set Options::make_cuda_carrier to a function that makes an NCCL group, or pass CPU "
                                 "tensors."});
      }
      side = std::make_shared<CudaGroup>(
          device, options_->make_cuda_carrier(c10::make_intrusive<c10d::PrefixStore>("cuda-carrier/" + start_, store_),
                                              rank_, size_, std::chrono::milliseconds(core_->timeout_ms.load())));
    }
    core_->adopt(side);
    if (side->carrier && !side->nodes() && rank_ == 0 && options_->log) {
      const bool gloo = side->carrier->getBackendName() == "gloo";
      options_->log("group \"" + options_->group_name + "\" of " + std::to_string(size_) +
                    " ranks: CUDA tensors are carried by PyTorch's " + (gloo ? "Gloo: " : "NCCL: ") + why +
                    (options_->sums.flat ? "; ARK_ORDER=flat does not hold for their sums" : ""));
    }
    return side;
  } catch (const Error& error) {
    fail_cuda(*store, error.at(rank_, operation));
  } catch (const std::exception& error) {
    fail_cuda(*store, Error(ErrorKind::system, std::string("CUDA tensors cannot be used: ") + error.what(),
                            ErrorContext{rank_, -1, operation, 0, "Pass CPU tensors, or see the cause above."}));
  }
}

// If one rank cannot use CUDA tensors, no rank can. Peers are told, since they would wait for it. There is no second
// try, because they have moved on. CPU tensors are not affected.
void ProcessGroupArk::fail_cuda(KeyValueStore& store, Error error) {
  cuda_failure_ = std::move(error);
  tell_cuda_failure(store, *cuda_failure_);
  throw *cuda_failure_;
}

void ProcessGroupArk::tell_cuda_failure(KeyValueStore& store, const Error& error) const {
  try {
    const std::string told = std::to_string(rank_) + " " + error.what();
    store.set(kCudaFailure, {told.begin(), told.end()});
  } catch (const std::exception&) {
    // Without a store no peer waits there either.
  }
}

void ProcessGroupArk::raise_peers_cuda_failure(KeyValueStore& store, int rank) {
  const auto found = store.find(kCudaFailure);
  if (!found) return;
  const std::string told(found->begin(), found->end());
  const int peer = std::atoi(told.c_str());
  if (peer == rank) return;
  throw Error(ErrorKind::system,
              "rank " + std::to_string(peer) +
                  " cannot use CUDA tensors: " + told.substr(std::min(told.size(), told.find(' ') + 1)),
              ErrorContext{rank, peer, "", 0, "Mend that, and create the group again."});
}

// A peer that could not use CUDA tensors may have ended since. Its message explains more than that it is gone.
void ProcessGroupArk::raise_last_words(KeyValueStore& store, int rank) {
  try {
    raise_peers_cuda_failure(store, rank);
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    // The store has ended too.
  }
}

std::shared_ptr<NcclEntry> ProcessGroupArk::nccl_entry(c10::Device device, const CudaDispatch& dispatch) {
  if (size_ == 1 || !options_->make_cuda_carrier || !NcclEntry::in(dispatch)) return nullptr;
  NcclEntry::Options options;
  options.rank = rank_;
  options.size = size_;
  options.device = device;
  options.dispatch = dispatch;
  options.store = std::make_shared<StoreAdapter>(c10::make_intrusive<c10d::PrefixStore>("ark/nccl/" + start_, store_));
  options.fail_group = [core = core_.get()](const Error& error) { core->shm->health().fail(error); };
  return std::make_shared<NcclEntry>(std::move(options));
}

// Creates NCCL before the first operation that it should carry. The decision uses sizes that are equal on all ranks;
// for reduce_scatter that is the list's size, not the output's.
void ProcessGroupArk::meet_for_nccl(const Call& call, CudaGroup& cuda) {
  if (cuda.nccl->decided()) return;
  uint64_t most = 0, least = ~uint64_t{0}, all = 0;
  call.inputs.for_each([&](const at::Tensor& tensor) {
    most = std::max<uint64_t>(most, tensor.nbytes());
    least = std::min<uint64_t>(least, tensor.nbytes());
    all += tensor.nbytes();
  });
  const bool list = call.type == c10d::OpType::REDUCE_SCATTER;
  if (list && least != most) return;  // several reductions
  const uint64_t bytes = list ? all : call.kind == Kind::all_gather ? most * size_ : most;
  if (!cuda.nccl->wants(call.kind, bytes) || is_capturing(cuda.device)) return;
  if (call.kind == Kind::all_to_all && !call.even) return;
  const std::chrono::milliseconds timeout(core_->timeout_ms.load()), later = timeout + NcclEntry::kLater;
  NcclEntry::Meeting meeting;
  meeting.make = [&] {
    auto store = c10::make_intrusive<c10d::PrefixStore>("ark/nccl/own/" + start_, store_);
    return options_->make_cuda_carrier(std::move(store), rank_, size_, later);
  };
  meeting.check = ends_with(core_->shm->health(), timeout);
  if (options_->log) {
    meeting.log = [&](const std::string& line) {
      options_->log("group \"" + options_->group_name + "\" of " + std::to_string(size_) + " ranks: " + line);
    };
  }
  cuda.nccl->meet(meeting);
}

uint64_t ProcessGroupArk::cuda_carried() const {
  const auto cuda = core_->cuda();
  return cuda && cuda->nccl ? cuda->nccl->carried() : 0;
}

ProcessGroupArk::WorkPtr ProcessGroupArk::carry_cuda(const Call& call, CudaGroup& cuda) {
  if (!call.carry) {
    refuse({rank_, call.name}, ErrorKind::invalid_argument,
           cuda.carrier->getBackendName() + ", which carries CUDA tensors of this group, has no such operation",
           "Pass CPU tensors.");
  }
  if (coalescing_threads_.load(std::memory_order_relaxed) != 0) {
    const std::lock_guard lock(mutex_);
    const auto found = coalescing_.find(std::this_thread::get_id());
    if (found != coalescing_.end() && !found->second.carrier) {
      cuda.carrier->startCoalescing();
      found->second.carrier = cuda.carrier;
    }
  }
  return call.carry(*cuda.carrier);
}

}  // namespace ark

#include "process_group/rma/window_ark.hpp"

#include <c10/core/Event.h>

#include <sstream>
#include <thread>

#include "cuda/shareable_pool.hpp"
#include "dma/rdma/gpu_memory.hpp"
#include "process_group/cuda/cuda_streams.hpp"
#include "process_group/process_group_ark.hpp"
#include "process_group/rma/shared_storage.hpp"
#include "process_group/work.hpp"

namespace ark {

namespace {

constexpr const char* kOtherwise = "Use a CPU tensor, or collectives, or send and recv.";

rdma::Where where_of(const at::Tensor& tensor) {
  return tensor.is_cuda() ? rdma::Where::gpu : rdma::Where::host;
}

// The NIC reads what kernels have written: those that were issued on the current stream must have ended.
void wait_for_stream(const CallSite& site, const OperationContext& context, c10::Device device) {
  c10::Event issued(c10::DeviceType::CUDA);
  issued.record(current_stream(device));
  while (!issued.query()) {
    if (Clock::now() >= context.deadline)
      throw Error(ErrorKind::timeout, "the current stream did not finish within the timeout",
                  ErrorContext{site.rank, -1, site.operation, context.sequence,
                               "See what this rank's kernels wait for, or raise the timeout."});
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// The memory that this machine's other ranks can map.
std::shared_ptr<const ShareableSegment> shareable_part(const CallSite& site, const at::Tensor& tensor) {
  auto found = tensor.numel() > 0 ? find_shareable(tensor.data_ptr(), tensor.nbytes()) : nullptr;
  if (!found)
    refuse(site, ErrorKind::invalid_argument,
           tensor.numel() == 0 ? "tensor is empty, and other ranks of this machine map its memory"
                               : "tensor's memory is not of ark_torch.memory.pool(), so other ranks of this machine "
                                 "cannot map it",
           "Make the tensor within `with torch.cuda.use_mem_pool(ark_torch.memory.pool()):`.");
  return found;
}

RmaWindow::Memory offer_of(const CallSite& site, const at::Tensor& tensor, bool shared) {
  if (!tensor.is_contiguous()) {
    std::ostringstream shape;
    shape << tensor.sizes() << ", strides " << tensor.strides();
    refuse(site, ErrorKind::invalid_argument, "tensor is not contiguous (sizes " + shape.str() + ")",
           "Register the tensor that it is a view of.");
  }
  RmaWindow::Memory memory;
  memory.where = where_of(tensor);
  if (tensor.is_cuda()) {
    memory.device = tensor.device().index();
    if (shared) memory.gpu = shareable_part(site, tensor);
  } else if (shared) {
    memory.segment = share_storage(site, tensor);
  }
  memory.elements = static_cast<uint64_t>(tensor.numel());
  memory.item = static_cast<uint32_t>(tensor.element_size());
  memory.type = static_cast<uint32_t>(tensor.scalar_type());
  // An empty tensor has no address.
  memory.data = tensor.numel() > 0 ? static_cast<std::byte*>(tensor.data_ptr())
                : memory.segment   ? memory.segment->data()
                                   : nullptr;
  return memory;
}

}  // namespace

// What a call began: its work, and what the waits for it go by.
struct WindowArk::Issue {
  c10::intrusive_ptr<WorkArk> work;
  OperationContext context;
  int peer;
  std::shared_ptr<GroupCore> core;

  // How the work ends; several threads may find out.
  template <class Wait, class Done>
  c10::intrusive_ptr<c10d::Work> hand_out(Wait wait, Done done, bool async) {
    auto once = std::make_shared<std::once_flag>();
    const auto end = [raw = work.get(), once](std::exception_ptr error) {
      std::call_once(*once, [&] {
        raw->finish(error);
        raw->settle();
      });
    };
    work->wait_elsewhere = [wait, end](Clock::time_point until) {
      std::exception_ptr error;
      try {
        if (!wait(until)) return false;
      } catch (...) {
        error = std::current_exception();
      }
      end(error);
      return true;
    };
    work->poll = [done, raw = work.get()] {
      if (done()) raw->wait_elsewhere(Clock::time_point::max());
    };
    work->need_progress = [raw = work.get(), executor = core->executor] {
      if (raw->done()) return;
      auto held = c10::intrusive_ptr<WorkArk>::unsafe_reclaim_from_nonowning(raw);
      executor->defer([held] { held->wait_elsewhere(Clock::time_point::max()); });
    };
    if (!async) work->wait();
    return work;
  }

  c10::intrusive_ptr<c10d::Work> fail(const Error& error) {
    work->finish(std::make_exception_ptr(error));
    work->settle();
    throw error;
  }
};

WindowArk::WindowArk(c10::intrusive_ptr<ProcessGroupArk> group) : group_(std::move(group)), core_(group_->core()) {}

// Peers may write to the tensor's memory as long as the group lives: the group keeps what is not deregistered.
WindowArk::~WindowArk() = default;

CallSite WindowArk::site(const char* operation) const {
  core_->check_open(operation);
  return {core_->rank, operation};
}

std::shared_ptr<RmaWindow> WindowArk::opened(const CallSite& site) const {
  const std::lock_guard lock(mutex_);
  if (!window_)
    refuse(site, ErrorKind::invalid_argument, "no tensor is registered with this window",
           "Call tensor_register first, on all ranks together.");
  return window_;
}

// Whether windows and puts can use this tensor's memory.
void WindowArk::check_device(const CallSite& site, const at::Tensor& tensor) {
  check_tensor(site, "tensor", tensor);
  if (tensor.is_cpu()) return;
  const std::string where = "tensor is on " + tensor.device().str();
  if (!tensor.is_cuda())
    refuse(site, ErrorKind::invalid_argument, where + ", and windows take CPU and CUDA tensors", kOtherwise);
  if (is_capturing(tensor.device()))
    refuse(site, ErrorKind::invalid_argument, "a graph is being captured, and what the host waits for is no part of it",
           "Call it before the capture begins.");
  if (!core_->rdma) return;  // one machine
  const int gpu = tensor.device().index();
  {
    const std::lock_guard lock(mutex_);
    if (reached_gpus_.contains(gpu)) return;
  }
  for (int rail = 0; rail < core_->rdma->rails(); ++rail) {
    const auto path = rdma::gpu_path(*core_->rdma->engine(rail)->device(), gpu);
    if (!path.direct)
      refuse(site, ErrorKind::system, where + ", and the NIC does not reach its memory: " + path.reason, kOtherwise);
  }
  const std::lock_guard lock(mutex_);
  reached_gpus_.insert(gpu);
}

void WindowArk::tensor_register(const at::Tensor& tensor, bool owning) {
  with_torch_errors([&] {
    const CallSite here = site("tensor_register");
    {
      const std::lock_guard lock(mutex_);
      if (window_)
        refuse(here, ErrorKind::invalid_argument, "this window has a tensor",
               "Call tensor_deregister first, or make another window.");
    }
    auto window = group_->open_window([&] {
      check_device(here, tensor);
      return offer_of(here, tensor, group_->shares_windows());
    });
    const std::lock_guard lock(mutex_);
    window_ = std::move(window);
    if (owning) tensor_ = tensor;
  });
}

void WindowArk::tensor_deregister() {
  with_torch_errors([&] {
    const auto window = opened(site("tensor_deregister"));
    group_->close_window(window);
    const std::lock_guard lock(mutex_);
    window_.reset();
    tensor_.reset();
  });
}

WindowArk::Issue WindowArk::begin(const CallSite& site, const char* argument, int64_t peer,
                                  std::chrono::milliseconds timeout, const at::Tensor* tensor) {
  check_rank(site, argument, peer, core_->size);
  const bool receives = tensor == nullptr && std::string(site.operation) == "wait_signal";
  auto work = c10::make_intrusive<WorkArk>(core_, receives ? c10d::OpType::RECV : c10d::OpType::SEND, site.operation,
                                           tensor ? Tensors{*tensor} : Tensors{});
  const uint64_t number = core_->p2p_sequence.fetch_add(1) + 1;
  FlightEntry entry;
  entry.operation = site.operation;
  entry.peer = static_cast<int32_t>(peer);
  entry.is_p2p = true;
  entry.state = FlightState::started;
  entry.sequence = core_->sequence.load();
  entry.p2p_sequence = number;
  entry.timeout_ms = timeout.count() >= 0 ? timeout.count() : core_->timeout_ms.load();
  if (tensor) {
    entry.dtype = static_cast<int8_t>(dtype_of(tensor->scalar_type()));
    entry.inputs.add(tensor->sizes().data(), tensor->dim());
    entry.input_elements = static_cast<uint64_t>(tensor->numel());
    entry.input_bytes = tensor->nbytes();
  }
  OperationRecord& operation = work->operation;
  operation.held = {{}, core_->extension->take()};
  operation.asked = core_->extended(timeout, operation.held.second);
  operation.context.sequence = number;
  core_->number(operation, entry);
  const OperationContext context = core_->context(site.operation, number, operation.asked);
  return {std::move(work), context, static_cast<int>(peer), core_};
}

c10::intrusive_ptr<c10d::Work> WindowArk::follow_transfer(Issue issue, const std::shared_ptr<RmaWindow>& window,
                                                          const RmaWindow::Transfer& transfer, bool async) {
  if (!transfer) {
    issue.work->finish(nullptr);
    issue.work->settle();
    return issue.work;
  }
  return issue.hand_out([window, transfer, context = issue.context, peer = issue.peer](
                            Clock::time_point until) { return window->wait(context, peer, *transfer, until); },
                        [transfer] { return transfer->done(); }, async);
}

c10::intrusive_ptr<c10d::Work> WindowArk::put(const at::Tensor& tensor, int64_t peer, int64_t offset, bool async,
                                              const PutOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("put");
    const auto window = opened(here);
    check_device(here, tensor);
    check_rank(here, "dst_rank", peer, core_->size);
    const auto there = static_cast<at::ScalarType>(window->of(static_cast<int>(peer)).type);
    if (tensor.scalar_type() != there)
      refuse(here, ErrorKind::type_error,
             "tensor is " + dtype_name(tensor.scalar_type()) + ", and the window of rank " + std::to_string(peer) +
                 " is " + dtype_name(there),
             "Put a tensor of the window's dtype.");
    Issue issue = begin(here, "dst_rank", peer, options.timeout, &tensor);
    const auto source = std::make_shared<Input>(tensor);
    RmaWindow::Transfer transfer;
    try {
      if (tensor.is_cuda()) wait_for_stream(here, issue.context, tensor.device());
      transfer = window->put(issue.context, issue.peer, static_cast<uint32_t>(there), source->data(),
                             static_cast<uint64_t>(tensor.numel()), offset, source, where_of(tensor));
    } catch (const Error& error) {
      return issue.fail(error);
    }
    return follow_transfer(std::move(issue), window, transfer, async);
  });
}

c10::intrusive_ptr<c10d::Work> WindowArk::signal(int64_t peer, bool async, const SignalOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("signal");
    const auto window = opened(here);
    Issue issue = begin(here, "peer_rank", peer, options.timeout, nullptr);
    RmaWindow::Transfer transfer;
    try {
      transfer = window->signal(issue.context, issue.peer);
    } catch (const Error& error) {
      return issue.fail(error);
    }
    return follow_transfer(std::move(issue), window, transfer, async);
  });
}

c10::intrusive_ptr<c10d::Work> WindowArk::wait_signal(int64_t peer, bool async, const WaitSignalOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("wait_signal");
    const auto window = opened(here);
    Issue issue = begin(here, "peer_rank", peer, options.timeout, nullptr);
    uint64_t signal = 0;
    try {
      signal = window->expect(issue.context, issue.peer);
    } catch (const Error& error) {
      return issue.fail(error);
    }
    return issue.hand_out([window, signal, context = issue.context, peer = issue.peer](
                              Clock::time_point until) { return window->wait(context, peer, signal, until); },
                          [window, signal, peer = issue.peer] { return window->arrived(peer, signal); }, async);
  });
}

at::Tensor WindowArk::map_remote_tensor(int64_t rank) {
  return with_torch_errors([&] {
    const CallSite here = site("map_remote_tensor");
    const auto window = opened(here);
    check_rank(here, "rank", rank, core_->size);
    const RmaRecord& record = window->of(static_cast<int>(rank));
    const auto [data, holds] = window->mapped(static_cast<int>(rank));
    if (data == nullptr && record.elements > 0)
      refuse(here, ErrorKind::invalid_argument,
             "rank " + std::to_string(rank) + " is of another node, whose memory cannot be mapped",
             "Write to it with put.");
    const bool on_gpu = window->where() == rdma::Where::gpu;
    const c10::Device device(on_gpu ? c10::kCUDA : c10::kCPU, on_gpu ? static_cast<int8_t>(window->device()) : -1);
    // Mapped for this rank's device, wherever the memory is.
    return at::for_blob(data, {static_cast<int64_t>(record.elements)})
        .deleter([window, holds = holds](void*) {})
        .options(at::TensorOptions().dtype(static_cast<at::ScalarType>(record.type)).device(device))
        .target_device(device)
        .make_tensor();
  });
}

WindowAttr WindowArk::get_attr(int64_t peer) {
  return with_torch_errors([&] {
    check_rank(site("get_attr"), "peer_rank", peer, core_->size);
    return WindowAttr{};  // unified: the memory that peers write to is the tensor's own
  });
}

}  // namespace ark

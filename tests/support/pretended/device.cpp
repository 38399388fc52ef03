// A pretended CUDA device for tests of the host side. PyTorch's "cuda" streams and events do nothing, "cuda" tensors
// are in host memory, and PyTorch's own operators compute on them there. A backend stands in for NCCL: it carries
// operations by another group on the same memory, and records them.
#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <pybind11/stl.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream, c10::StreamId;
using Tensors = std::vector<at::Tensor>;

thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream = 0;
std::atomic<bool> lagging{false};  // no event has completed
using Step = std::tuple<std::string, intptr_t, StreamId>;
std::mutex steps_mutex;
std::vector<Step> steps;  // events recorded on a stream or waited for by it

void note_step(const char* what, void* event, const Stream& stream) {
  const std::lock_guard lock(steps_mutex);
  steps.emplace_back(what, reinterpret_cast<intptr_t>(event), stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    const Device former(DeviceType::CUDA, current_device);
    current_device = device.index();
    return former;
  }
  Device getDevice() const override { return {DeviceType::CUDA, current_device}; }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::UNSAFE, device, current_stream); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::UNSAFE, device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    static std::atomic<int> drawn{0};
    return Stream(Stream::UNSAFE, device, 1 + drawn++ % 32);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream former(Stream::UNSAFE, stream.device(), current_stream);
    current_stream = stream.id();
    return former;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    static std::atomic<intptr_t> made{0};
    if (*event == nullptr) *event = reinterpret_cast<void*>(++made);
    note_step("record", *event, stream);
  }
  void block(void* event, const Stream& stream) const override { note_step("block", event, stream); }
  bool queryEvent(void*) const override { return !lagging; }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.5; }
  DeviceIndex deviceCount() const noexcept override { return 16; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

at::Tensor on_device(const at::Tensor& host, int device) {
  const Device where(at::kCUDA, static_cast<DeviceIndex>(device));
  return at::for_blob(host.data_ptr(), host.sizes())
      .strides(host.strides())
      .deleter([host](void*) {})
      .options(host.options().device(where))
      .target_device(where)
      .make_tensor();
}

// The same memory, kept as long as the view or views of it live.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options().device(at::kCPU));
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat>) {
  return on_device(at::empty(sizes, at::TensorOptions(dtype.value_or(at::kFloat))), current_device);
}

// Runs an operator on the arguments' memory. What it changes in place, it returns.
void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<std::pair<at::Tensor, at::Tensor>> moved;  // as given, as computed on
  const auto to_host = [&](const at::Tensor& given) {
    if (!given.defined() || !given.is_cuda()) return given;
    moved.emplace_back(given, on_host(given));
    return moved.back().second;
  };
  const auto to_device = [&](const at::Tensor& made) {
    for (const auto& [given, used] : moved)
      if (made.is_same(used)) return given;
    return made.defined() ? on_device(made, current_device) : made;
  };
  const auto each = [&](size_t count, const std::function<at::Tensor(const at::Tensor&)>& move) {
    for (auto value = stack->end() - static_cast<std::ptrdiff_t>(count); value != stack->end(); ++value) {
      if (value->isTensor()) {
        *value = move(value->toTensor());
      } else if (value->isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& one : value->toTensorVector()) list.push_back(move(one));
        *value = std::move(list);
      } else if (value->isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& one : value->toOptionalTensorVector())
          list.push_back(one ? std::optional(move(*one)) : std::nullopt);
        *value = std::move(list);
      } else if (value->isDevice() && value->toDevice().is_cuda()) {
        *value = Device(at::kCPU);
      }
    }
  };
  each(op.schema().arguments().size(), to_host);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  each(op.schema().returns().size(), to_device);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());  // one for all devices has none
}
TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

class Recorder : public c10d::Backend {
 public:
  Recorder(int rank, int size, c10::intrusive_ptr<c10d::Backend> inner, bool fails, std::string name)
      : Backend(rank, size),
        inner_(*new c10::intrusive_ptr<c10d::Backend>(std::move(inner))),
        fails_(fails),
        name_(std::move(name)) {}
  const std::string getBackendName() const override { return name_; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    note("allreduce", options.asyncOp);
    auto views = host(tensors);
    return given(inner_->allreduce(views, options), options.asyncOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    note("reduce", options.asyncOp);
    auto views = host(tensors);
    return given(inner_->reduce(views, options), options.asyncOp);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    note("broadcast", options.asyncOp);
    auto views = host(tensors);
    return given(inner_->broadcast(views, options), options.asyncOp);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    note("_allgather_base", options.asyncOp);
    at::Tensor to = host(output), from = host(input);
    return given(inner_->_allgather_base(to, from, options), options.asyncOp);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    note("allgather", options.asyncOp);
    std::vector<Tensors> to{host(outputs[0])};
    auto from = host(inputs);
    return given(inner_->allgather(to, from, options), options.asyncOp);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    note("_reduce_scatter_base", options.asyncOp);
    at::Tensor to = host(output), from = host(input);
    return given(inner_->_reduce_scatter_base(to, from, options), options.asyncOp);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    note("reduce_scatter", options.asyncOp);
    auto to = host(outputs);
    std::vector<Tensors> from{host(inputs[0])};
    return given(inner_->reduce_scatter(to, from, options), options.asyncOp);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& receives,
                        std::vector<int64_t>& sends, const c10d::AllToAllOptions& options) override {
    note("alltoall_base", options.asyncOp);
    at::Tensor to = host(output), from = host(input);
    return given(inner_->alltoall_base(to, from, receives, sends, options), options.asyncOp);
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    note("send", false);
    auto views = host(tensors);
    return inner_->send(views, peer, tag);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    note("recv", false);
    auto views = host(tensors);
    return inner_->recv(views, peer, tag);
  }
  void startCoalescing() override { inner_->startCoalescing(); }
  WorkPtr endCoalescing() override { return inner_->endCoalescing(); }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    note("barrier", false);
    c10d::BarrierOptions plain;
    plain.timeout = options.timeout;
    return given(inner_->barrier(plain), options.asyncOp);
  }
  void eagerConnectSingleDevice(at::Device device) override {
    note("connect " + device.str(), false);
    while (hangs_) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (fails_) throw std::runtime_error("no transport between these GPUs");
  }
  void abort() override { note("abort", false); }
  void shutdown() override { note("shutdown", false); }
  void setTimeout(std::chrono::milliseconds timeout) override {
    note("timeout " + std::to_string(timeout.count()), false);
  }

  std::vector<std::string> calls() {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  std::atomic<bool> hangs_{false};
  std::atomic<bool> raises_{false};

 private:
  static at::Tensor host(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "the carrier was given a tensor on ", tensor.device());
    return on_host(tensor);
  }
  // As NCCL: a synchronous operation has no work.
  static WorkPtr given(WorkPtr work, bool async) {
    if (async) return work;
    work->wait();
    return nullptr;
  }
  static Tensors host(const Tensors& tensors) {
    Tensors views;
    for (const at::Tensor& tensor : tensors) views.push_back(host(tensor));
    return views;
  }
  void note(const std::string& call, bool async) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(async ? call + " async" : call);
    if (raises_ && call.find("connect") == std::string::npos) throw std::runtime_error("unhandled cuda error");
  }

  const c10::intrusive_ptr<c10d::Backend>& inner_;  // leaked: its Python functions may outlive the interpreter
  const bool fails_;
  const std::string name_;
  std::mutex mutex_;
  std::vector<std::string> calls_;
};

}  // namespace

PYBIND11_MODULE(pretended_device, m) {
  pybind11::module_::import("torch.distributed");
  m.def("tensor", &on_device);
  m.def("host", [](const at::Tensor& tensor) { return on_host(tensor).clone(); });
  m.def("lag", [](bool on) { lagging = on; });
  m.def("set_stream", [](StreamId stream) { current_stream = stream; });
  m.def("stream", [] { return current_stream; });
  m.def("mark", [](const char* what) {
    note_step(what, nullptr, Stream(Stream::UNSAFE, Device(DeviceType::CUDA, 0), current_stream));
  });
  m.def("steps", [] {  // since the last call
    const std::lock_guard lock(steps_mutex);
    return std::exchange(steps, {});
  });
  m.def("set_device", [](int device) { current_device = static_cast<DeviceIndex>(device); });
  pybind11::class_<Recorder, c10d::Backend, c10::intrusive_ptr<Recorder>>(m, "Recorder")
      .def(pybind11::init<int, int, c10::intrusive_ptr<c10d::Backend>, bool, std::string>())
      .def("calls", &Recorder::calls)
      .def("hang", [](Recorder& self, bool on) { self.hangs_ = on; })
      .def("fail", [](Recorder& self, bool on) { self.raises_ = on; });
}

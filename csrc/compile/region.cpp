// Calls of region.hpp.
#include "compile/region.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <cstring>
#include <exception>
#include <limits>
#include <utility>

#include "error.hpp"
#include "jit/driver.hpp"
#include "jit/host_compiler.hpp"
#include "jit/kernel.hpp"
#include "plan/costs.hpp"
#include "plan/targets.hpp"
#include "process_group/cuda_streams.hpp"

namespace ark::compile {

namespace {

at::ScalarType to_torch(plan::ScalarType type) {
  switch (type) {
    case plan::ScalarType::f32: return at::kFloat;
    case plan::ScalarType::bf16: return at::kBFloat16;
    case plan::ScalarType::f16: return at::kHalf;
    case plan::ScalarType::i64: return at::kLong;
    case plan::ScalarType::i32: return at::kInt;
    case plan::ScalarType::boolean: return at::kBool;
  }
  return at::kFloat;
}

// What a collective of the step that runs on this thread threw.
thread_local std::exception_ptr collective_failure;

// The process's, with what is configured when the first region is compiled. Never destroyed: the settings hold a
// function of Python, which has ended by then.
jit::HostCompiler& compiler() {
  static auto* instance = new jit::HostCompiler(jit::settings());
  return *instance;
}

plan::Target target_of(const RegionOptions& options) {
  if (options.device >= 0) {
    const auto& library = jit::KernelLibrary::of(options.device);
    return plan::gpu_target(library.target().arch, options.workers > 0 ? options.workers : library.multiprocessors());
  }
  plan::Target target;
  target.workers = options.workers > 0 ? options.workers : at::get_num_threads();
  return options.measured_costs ? plan::with_measured_costs(target, compiler(), jit::settings().log) : target;
}

c10d::ReduceOp reduce_op(const std::string& name) {
  static const std::map<std::string, c10d::ReduceOp::RedOpType> known = {
      {"sum", c10d::ReduceOp::SUM}, {"avg", c10d::ReduceOp::AVG},   {"product", c10d::ReduceOp::PRODUCT},
      {"min", c10d::ReduceOp::MIN}, {"max", c10d::ReduceOp::MAX},   {"band", c10d::ReduceOp::BAND},
      {"bor", c10d::ReduceOp::BOR}, {"bxor", c10d::ReduceOp::BXOR},
  };
  const auto found = known.find(name);
  if (found == known.end()) throw Error(ErrorKind::invalid_argument, "there is no reduce_op '" + name + "'");
  return found->second;
}

template <class List>
std::string text_of(const List& list) {
  std::string text = "[";
  for (size_t i = 0; i < list.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(list[i]);
  return text + "]";
}

// Reads a byte of each cache line of an object, if there is one. No read waits for another.
template <class T>
void touch(const T* object) {
  if (object == nullptr) return;
  const auto* bytes = reinterpret_cast<const volatile char*>(object);
  for (size_t i = 0; i < sizeof(T); i += 64) static_cast<void>(bytes[i]);
  static_cast<void>(bytes[sizeof(T) - 1]);
}

}  // namespace

void prepare_costs() {
  plan::prepare_costs(compiler());
}

Region::Region(plan::Graph graph, std::vector<int> arguments, std::vector<int> results, const RegionOptions& options)
    : options_(options) {
  graph.check();
  plan_ = plan::make_plan(std::move(graph), target_of(options), options.chained);
  plan::validate(plan_);
  for (const int value : arguments) inputs_.push_back(spec_of(value));
  for (const int value : results) outputs_.push_back(spec_of(value));
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Spec& spec = inputs_[i];
    expected_.push_back({spec.type, static_cast<uint32_t>(spec.sizes.size()), static_cast<uint32_t>(extents_.size())});
    extents_.insert(extents_.end(), spec.sizes.begin(), spec.sizes.end());
    extents_.insert(extents_.end(), spec.strides.begin(), spec.strides.end());
    if (spec.mutated) mutated_.push_back(i);
  }
  if (options.device >= 0) {
    cuda_ = std::make_unique<plan::CudaLoop>(plan_, options.device);
    if (const plan::Exchanges& all = cuda_->exchanges(); all.ranks > 0)
      ranks_ = std::make_unique<RegionRanks>(options.name, options.groups.at(static_cast<size_t>(all.group)), device(),
                                             *cuda_);
    return;
  }
  for (const plan::Stage& stage : plan_.stages)
    if (const auto* ends = std::get_if<plan::CollectiveStage>(&stage.body)) add_collective(stage.node, *ends);
  kernel_ = std::make_unique<plan::CpuLoop>(plan_, compiler());
  kernel_->set_collective(&Region::run_collective, this);
}

// On the thread that called run(), which takes the exception from here.
bool Region::run_collective(void* region, int32_t node, const void* input, void* output) {
  try {
    static_cast<Region*>(region)->collectives_.at(node)(input, output);
    return true;
  } catch (...) {
    collective_failure = std::current_exception();
    return false;
  }
}

c10::intrusive_ptr<c10d::Backend> Region::group(int64_t number) const {
  const std::string& name = options_.groups.at(static_cast<size_t>(number));
  try {
    return c10d::resolve_process_group(name)->getBackend(c10::DeviceType::CPU);
  } catch (const c10::Error&) {
    throw Error(ErrorKind::closed,
                options_.name + ": there is no process group '" + name + "' for CPU tensors any more",
                ErrorContext{-1, -1, "", 0, "Make it again, or compile again (torch._dynamo.reset())."});
  }
}

// The group's own call, made synchronously on the caller's thread: over shared memory it runs there and then, after
// whatever else was issued to the group, on the channels that eager collectives use.
void Region::add_collective(int index, const plan::CollectiveStage& ends) {
  const plan::Node& node = plan_.graph.nodes()[index];
  const auto group = [this, number = node.integer("group")] { return this->group(number); };
  const Spec in = spec_of(ends.input), out = spec_of(ends.output);
  const auto wrap = [](const void* data, const Spec& spec) {
    return at::from_blob(const_cast<void*>(data), spec.sizes, spec.strides, at::TensorOptions(spec.type));
  };
  const auto finish = [](const c10::intrusive_ptr<c10d::Work>& work) {
    if (work) work->wait();
  };
  if (node.op == "all_to_all") {
    collectives_[index] = [=, send = node.integers("input_splits"), receive = node.integers("output_splits")](
                              const void* input, void* output) mutable {
      at::Tensor to = wrap(output, out), from = wrap(input, in);
      finish(group()->alltoall_base(to, from, receive, send, {.asyncOp = false}));
    };
  } else if (node.op == "all_gather") {
    collectives_[index] = [=](const void* input, void* output) {
      at::Tensor to = wrap(output, out), from = wrap(input, in);
      c10d::AllgatherOptions options;
      options.asyncOp = false;
      finish(group()->_allgather_base(to, from, options));
    };
  } else if (node.op == "reduce_scatter") {
    collectives_[index] = [=, op = reduce_op(node.text("reduce_op"))](const void* input, void* output) {
      at::Tensor to = wrap(output, out), from = wrap(input, in);
      c10d::ReduceScatterOptions options;
      options.reduceOp = op;
      options.asyncOp = false;
      finish(group()->_reduce_scatter_base(to, from, options));
    };
  } else {
    collectives_[index] = [=, op = reduce_op(node.text("reduce_op")),
                           bytes = plan_.graph.values()[ends.output].elements() *
                                   plan::size_of(plan_.graph.values()[ends.output].type)](const void* input,
                                                                                          void* output) {
      if (input != output) std::memcpy(output, input, bytes);
      std::vector<at::Tensor> tensors{wrap(output, out)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      options.asyncOp = false;
      finish(group()->allreduce(tensors, options));
    };
  }
}

Region::Spec Region::spec_of(int index) const {
  const plan::Value& value = plan_.graph.values()[index];
  const plan::Buffer& buffer = plan_.graph.buffer_of(index);
  return {to_torch(value.type), value.shape, value.strides, buffer.mutated, plan::footprint(value)};
}

at::Device Region::device() const {
  return options_.device < 0 ? at::Device(at::kCPU)
                             : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(options_.device));
}

bool Region::is_as_expected(const at::Tensor& input, const Expected& spec) const {
  const at::IntArrayRef sizes(extents_.data() + spec.first, spec.dims);
  const at::IntArrayRef strides(extents_.data() + spec.first + spec.dims, spec.dims);
  return input.device() == device() && input.layout() == at::kStrided &&
         !input.unsafeGetTensorImpl()->is_python_dispatch() && input.scalar_type() == spec.type &&
         input.sizes() == sizes && input.strides() == strides;
}

// Of an input that is not as expected: throws, unless only strides differ that mean nothing.
void Region::check(size_t i, const at::Tensor& input) const {
  const Spec& spec = inputs_[i];
  const auto fail = [&](const std::string& what) {
    throw Error(ErrorKind::invalid_argument, options_.name + ": input " + std::to_string(i) + " " + what,
                ErrorContext{-1, -1, "", 0, "Compile again for this input (torch._dynamo.reset())."});
  };
  if (input.device() != device()) fail("is on " + input.device().str() + ", not " + device().str());
  if (input.layout() != at::kStrided) fail("is not strided");
  if (input.unsafeGetTensorImpl()->is_python_dispatch()) fail("is of a class that may have no memory of its own");
  if (input.scalar_type() != spec.type)
    fail(std::string("is ") + c10::toString(input.scalar_type()) + ", not " + c10::toString(spec.type));
  if (input.sizes() != at::IntArrayRef(spec.sizes))
    fail("has the shape " + text_of(input.sizes()) + ", not " + text_of(spec.sizes));
  // The stride of a dimension of one element (or of none) means nothing.
  for (size_t d = 0; d < spec.sizes.size() && input.numel() > 0; ++d) {
    if (spec.sizes[d] > 1 && input.stride(d) != spec.strides[d])
      fail("has the strides " + text_of(input.strides()) + ", not " + text_of(spec.strides));
  }
}

// Checks, and takes the addresses. Tensors and their storages lie scattered, and what ran before has left few of them
// in near caches: all are touched first, since the check's branches would wait for them one by one.
std::vector<void*> Region::pointers_of(const std::vector<at::Tensor>& inputs) const {
  if (inputs.size() != inputs_.size())
    throw Error(ErrorKind::invalid_argument, options_.name + " takes " + std::to_string(inputs_.size()) +
                                                 " inputs, not " + std::to_string(inputs.size()));
  for (const at::Tensor& input : inputs) {
    touch(input.unsafeGetTensorImpl());
    touch(input.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
  std::vector<void*> pointers(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_as_expected(inputs[i], expected_[i])) check(i, inputs[i]);
    pointers[i] = inputs[i].data_ptr();
  }
  return pointers;
}

// What is written in place must lie apart from every other argument, byte for byte: the plan orders accesses by
// argument. (Tensors that lie interleaved, as halves of one cache may, are apart.) What was found
// apart is remembered, since most calls bring the same again.
bool Region::overlap(const std::vector<void*>& pointers) const {
  {
    const std::lock_guard lock(apart_mutex_);
    if (pointers == apart_) return false;
  }
  for (const size_t i : mutated_) {
    const auto at = reinterpret_cast<intptr_t>(pointers[i]);
    for (size_t k = 0; k < pointers.size(); ++k) {
      const auto other = reinterpret_cast<intptr_t>(pointers[k]);
      const plan::Footprint &mine = inputs_[i].bytes, &its = inputs_[k].bytes;
      if (k == i || at + mine.end() <= other || other + its.end() <= at) continue;
      plan::Footprint one = mine, two = its;
      (at < other ? two : one).first += at < other ? other - at : at - other;
      if (plan::may_overlap(one, two)) return true;
    }
  }
  const std::lock_guard lock(apart_mutex_);
  apart_ = pointers;
  return false;
}

// Steps that fail are in the trace too, as far as they came.
template <class Run>
void Region::traced(Run&& run) {
  plan::Trace* trace = plan::Trace::current();
  if (trace == nullptr) return run(nullptr);
  std::call_once(traced_once_, [this] { traced_ = std::make_shared<const plan::TracedPlan>(plan_, options_.name); });
  plan::StepStamps stamps;
  const int lane = trace->enter();
  const uint64_t begin = cpu::now_ns();
  const auto leave = [&] { trace->leave(lane, traced_, std::move(stamps), begin, cpu::now_ns()); };
  try {
    run(&stamps);
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

void Region::fail_overlap() const {
  throw Error(ErrorKind::invalid_argument, options_.name + ": two inputs share memory that the compiled region writes",
              ErrorContext{-1, -1, "", 0, "Give it tensors of their own, or options={\"fallback\": True}."});
}

// As any operator that writes in place: autograd must see that what it saved has changed. So it may have where the
// kernel failed.
void Region::bump_versions(const std::vector<at::Tensor>& inputs) const {
  for (const size_t i : mutated_)
    if (!inputs[i].is_inference()) inputs[i].unsafeGetTensorImpl()->bump_version();
}

// What a collective threw goes on from here, rather than the kernel's report of it.
template <class Launch>
void Region::launch(const std::vector<at::Tensor>& inputs, Launch&& call) {
  bump_versions(inputs);
  try {
    traced(call);
  } catch (const Error&) {
    if (collective_failure) std::rethrow_exception(std::exchange(collective_failure, nullptr));
    throw;
  }
}

// False, and nothing done, on all ranks: their group does not exchange packets.
bool Region::run_cuda(const std::vector<at::Tensor>& inputs, void* const* pointers, void* const* results) {
  const CurrentContext context(options_.device);
  const auto step = [&](CUstream stream, const loop::Ranks* ranks) {
    launch(inputs, [&](plan::StepStamps* stamps) { cuda_->run(pointers, results, stream, stamps, ranks); });
  };
  if (ranks_) return ranks_->launch([&](CUstream stream, const loop::Ranks& ranks) { step(stream, &ranks); });
  step(static_cast<CUstream>(native_stream(current_stream(device()))), nullptr);
  return true;
}

std::vector<at::Tensor> Region::run(const std::vector<at::Tensor>& inputs) {
  RECORD_FUNCTION(options_.name, {});
  const std::vector<void*> pointers = pointers_of(inputs);
  if (!mutated_.empty() && overlap(pointers)) {
    if (options_.otherwise) return options_.otherwise(inputs);
    fail_overlap();
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  std::vector<void*> results;
  results.reserve(outputs_.size());
  for (const Spec& spec : outputs_) {
    outputs.push_back(cuda_ ? at::empty_strided(spec.sizes, spec.strides, at::TensorOptions(spec.type).device(device()))
                            : at::detail::empty_strided_cpu(spec.sizes, spec.strides, spec.type));
    results.push_back(outputs.back().data_ptr());
  }
  if (cuda_) {
    if (run_cuda(inputs, pointers.data(), results.data())) return outputs;
    if (options_.otherwise) return options_.otherwise(inputs);
    fail_carried();
  }
  const uint64_t begin = cpu::now_ns();
  launch(inputs, [&](plan::StepStamps* stamps) { kernel_->run(pointers.data(), results.data(), stamps); });
  last_kernel_ns_.store(cpu::now_ns() - begin, std::memory_order_relaxed);
  return outputs;
}

void Region::fail_carried() const {
  throw Error(ErrorKind::invalid_argument, options_.name + ": ark does not carry CUDA tensors of its process group",
              ErrorContext{-1, -1, "", 0, "Give it options={\"fallback\": True}."});
}

// Not in the timeline: stamps are of one step.
uint64_t Region::run_cuda_steps(const std::vector<at::Tensor>& inputs, uint64_t most,
                                const std::function<bool()>& interrupted) {
  const std::vector<void*> pointers = pointers_of(inputs);
  if (!mutated_.empty() && overlap(pointers)) fail_overlap();
  if (most > std::numeric_limits<uint32_t>::max())
    throw Error(ErrorKind::invalid_argument, options_.name + ": " + std::to_string(most) + " steps in one launch",
                ErrorContext{-1, -1, "", 0, "Ask for fewer than 2^32 at once."});
  const CurrentContext context(options_.device);
  const auto stream = static_cast<CUstream>(native_stream(current_stream(device())));
  loop::Report* launched = nullptr;
  const auto start = [&](CUstream on, const loop::Ranks* ranks) {
    launched = &cuda_->launch_steps(pointers.data(), on, static_cast<uint32_t>(most), ranks);
  };
  bump_versions(inputs);
  if (!ranks_)
    start(stream, nullptr);
  else if (!ranks_->launch([&](CUstream on, const loop::Ranks& ranks) { start(on, &ranks); }))
    fail_carried();
  try {
    return cuda_->wait_steps(*launched, stream, interrupted);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::aborted)
      for (size_t number = 0; number < options_.groups.size(); ++number) group(static_cast<int64_t>(number))->abort();
    throw;
  }
}

uint64_t Region::run_steps(const std::vector<at::Tensor>& inputs, uint64_t most,
                           const std::function<bool()>& interrupted) {
  RECORD_FUNCTION(options_.name, {});
  if (!outputs_.empty()) throw Error(ErrorKind::invalid_argument, options_.name + " has results of each step");
  if (cuda_) return run_cuda_steps(inputs, most, interrupted);
  const std::vector<void*> pointers = pointers_of(inputs);
  if (!mutated_.empty() && overlap(pointers)) fail_overlap();
  struct Asker {
    const std::function<bool()>& question;
    bool answer = false;
  } asker{interrupted};
  plan::CpuLoop::Steps steps;
  steps.most = most;
  steps.asker = &asker;
  if (interrupted)
    steps.interrupted = [](void* argument) {
      Asker& one = *static_cast<Asker*>(argument);
      return one.answer = one.question();
    };
  uint64_t done = 0;
  try {
    launch(inputs,
           [&](plan::StepStamps* stamps) { done = kernel_->run_steps(pointers.data(), nullptr, steps, stamps); });
  } catch (const Error&) {
    if (asker.answer)
      for (size_t number = 0; number < options_.groups.size(); ++number) group(static_cast<int64_t>(number))->abort();
    throw;
  }
  return done;
}

}  // namespace ark::compile

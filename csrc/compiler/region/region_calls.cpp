// Calls of a region (region.hpp): one step or many in one launch, on the CPU and on a GPU, with the timeline and with
// exceptions thrown by collectives.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>

#include <exception>
#include <limits>
#include <utility>

#include "compiler/region/region.hpp"
#include "cuda/driver.hpp"
#include "process_group/cuda/cuda_streams.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

// The exception of a collective in the step that this thread runs.
thread_local std::exception_ptr collective_failure;

// Where the next step of this thread puts its stamps; nullptr: into the trace, if there is one.
thread_local StepStamps* wanted_stamps = nullptr;

}  // namespace

// Runs on the thread that called run(), which rethrows the stored exception.
bool Region::run_collective(void* region, int32_t node, const void* input, void* output) {
  try {
    static_cast<Region*>(region)->collectives_.at(node)(input, output);
    return true;
  } catch (...) {
    collective_failure = std::current_exception();
    return false;
  }
}

// Failed steps are traced too, as far as they got.
template <class Run>
void Region::traced(Run&& run) {
  if (StepStamps* const wanted = std::exchange(wanted_stamps, nullptr)) return run(wanted);
  Trace* trace = Trace::current();
  if (trace == nullptr) return run(nullptr);
  std::call_once(traced_once_, [this] { traced_ = std::make_shared<const TracedPlan>(plan_, options_.name); });
  StepStamps stamps;
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

// Rethrows a collective's exception in place of the kernel's report of it.
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

// Returns false on all ranks, without running anything, if their group does not exchange packets.
bool Region::run_cuda(const std::vector<at::Tensor>& inputs, void* const* pointers, void* const* results) {
  const CurrentContext context(options_.device);
  const auto step = [&](CUstream stream, const loop::Ranks* ranks) {
    launch(inputs, [&](StepStamps* stamps) { cuda_->run(pointers, results, stream, stamps, ranks); });
  };
  if (ranks_) return ranks_->launch([&](CUstream stream, const loop::Ranks& ranks) { step(stream, &ranks); });
  step(static_cast<CUstream>(native_stream(current_stream(device()))), nullptr);
  return true;
}

StepStamps Region::stamped(const std::vector<at::Tensor>& inputs) {
  StepStamps stamps;
  wanted_stamps = &stamps;
  try {
    run(inputs);
  } catch (...) {  // perhaps before the step began
    wanted_stamps = nullptr;
    throw;
  }
  return stamps;
}

std::vector<at::Tensor> Region::run(const std::vector<at::Tensor>& inputs) {
  auto outputs = run_apart(inputs);
  if (!outputs) fail_overlap();
  return *std::move(outputs);
}

std::optional<std::vector<at::Tensor>> Region::run_apart(const std::vector<at::Tensor>& inputs) {
  RECORD_FUNCTION(options_.name, {});
  std::vector<void*> pointers = pointers_of(inputs);
  if (!mutated_.empty() && overlap(pointers)) return std::nullopt;
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
    const Copies copies = align(inputs, pointers);
    if (run_cuda(inputs, pointers.data(), results.data())) {
      write_back(inputs, copies);
      return outputs;
    }
    if (options_.otherwise) return options_.otherwise(inputs);
    fail_carried();
  }
  const uint64_t begin = cpu::now_ns();
  launch(inputs, [&](StepStamps* stamps) { kernel_->run(pointers.data(), results.data(), stamps); });
  last_kernel_ns_.store(cpu::now_ns() - begin, std::memory_order_relaxed);
  return outputs;
}

void Region::fail_carried() const {
  throw Error(ErrorKind::invalid_argument, options_.name + ": ark does not carry CUDA tensors of its process group",
              ErrorContext{-1, -1, "", 0, "Give it options={\"fallback\": True}."});
}

// Not in the timeline, as stamps cover one step.
uint64_t Region::run_cuda_steps(const std::vector<at::Tensor>& inputs, uint64_t most,
                                const std::function<bool()>& interrupted) {
  std::vector<void*> pointers = pointers_of(inputs);
  if (!mutated_.empty() && overlap(pointers)) fail_overlap();
  if (most > std::numeric_limits<uint32_t>::max())
    throw Error(ErrorKind::invalid_argument, options_.name + ": " + std::to_string(most) + " steps in one launch",
                ErrorContext{-1, -1, "", 0, "Ask for fewer than 2^32 at once."});
  const CurrentContext context(options_.device);
  const auto stream = static_cast<CUstream>(native_stream(current_stream(device())));
  const Copies copies = align(inputs, pointers);
  CudaLoop::Launched launched;
  const auto start = [&](CUstream on, const loop::Ranks* ranks) {
    launched = cuda_->launch_steps(pointers.data(), on, static_cast<uint32_t>(most), ranks);
  };
  bump_versions(inputs);
  if (!ranks_)
    start(stream, nullptr);
  else if (!ranks_->launch([&](CUstream on, const loop::Ranks& ranks) { start(on, &ranks); }))
    fail_carried();
  try {
    const uint64_t done = cuda_->wait_steps(launched, stream, interrupted);
    if (write_back(inputs, copies))
      ark::check(driver().stream_synchronize(stream), "waiting for inputs that steps wrote");
    return done;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::aborted)
      for (size_t number = 0; number < options_.groups.size(); ++number) group(static_cast<int64_t>(number))->abort();
    // The steps before the end count.
    if (error.kind() == ErrorKind::aborted || error.kind() == ErrorKind::timeout) write_back(inputs, copies);
    if (error.kind() != ErrorKind::aborted && ranks_) ranks_->raise_ended(error);
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
  CpuLoop::Steps steps;
  steps.most = most;
  steps.asker = &asker;
  if (interrupted)
    steps.interrupted = [](void* argument) {
      Asker& one = *static_cast<Asker*>(argument);
      return one.answer = one.question();
    };
  uint64_t done = 0;
  try {
    launch(inputs, [&](StepStamps* stamps) { done = kernel_->run_steps(pointers.data(), nullptr, steps, stamps); });
  } catch (const Error&) {
    if (asker.answer)
      for (size_t number = 0; number < options_.groups.size(); ++number) group(static_cast<int64_t>(number))->abort();
    throw;
  }
  return done;
}

}  // namespace ark::compiler

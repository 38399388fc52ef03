// Memory, launches and errors of plans on a GPU. See cuda_loop.hpp.
#include "compiler/runtime/cuda_loop.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "compiler/passes/prologue_fusion.hpp"
#include "compiler/runtime/launch_wait.hpp"
#include "compiler/runtime/step_failure.hpp"
#include "cuda/graph_owned.hpp"
#include "cuda/loop/lookahead.cuh"
#include "protocol/atomics.hpp"
#include "util/error.hpp"
#include "util/format.hpp"

namespace ark::compiler {

namespace {

// Bytes of local memory per thread that calls between functions need.
constexpr int kMostLocal = 2048;

static_assert(kMostOperands <= loop::kMostOperands);

// Added to the peers' limit for waits between workers: the worker waited for may itself wait for a peer.
constexpr std::chrono::nanoseconds kLaterThanPeers = std::chrono::minutes(1);

// While a launch of many steps runs: how often the host checks whether it has ended, and asks whether to stop it.
constexpr auto kPoll = std::chrono::microseconds(50);
constexpr auto kAsk = std::chrono::milliseconds(50);

}  // namespace

CudaLoop::CudaLoop(Plan plan, int device, const SavedKernel* saved)
    : plan_(std::move(plan)),
      source_(emit_cuda(plan_)),
      exchanges_(exchanges_of(plan_.graph, plan_.stages)),
      device_(device),
      memories_(plan_, source_.scratch_bytes, device, exchanges_.ranks > 0) {
  auto& library = jit::KernelLibrary::of(device);
  if (saved != nullptr) check_saved(*saved, source_.text);
  kernel_ = &library.get(source_.text, kLoopKernel, true, false, saved != nullptr ? &saved->binary : nullptr);
  ErrorContext context;
  context.remedy = "Leave this region to another backend.";
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::invalid_argument, formatted("the loop kernel of {} stages {}", plan_.stages.size(), why),
                context);
  };
  if (kernel_->local > kMostLocal)
    refuse(
        formatted("keeps {} bytes of each thread in memory: it needs more than the {} registers that a thread can have",
                  kernel_->local, kernel_->registers));
  if (kernel_->max_dynamic_shared < shared_bytes())
    refuse(formatted("needs {} bytes of shared memory a block, and the device has {}",
                     shared_bytes() + kernel_->static_shared, kernel_->max_dynamic_shared + kernel_->static_shared));
  const int resident = resident_blocks(*kernel_, loop::kThreads, static_cast<size_t>(shared_bytes()));
  if (resident < static_cast<int>(plan_.queues.size()))
    refuse(formatted("needs {} blocks at once, and the device holds {}", plan_.queues.size(), resident));
}

CudaLoop::~CudaLoop() = default;

SavedKernel CudaLoop::saved() const {
  return {source_.text, jit::KernelLibrary::of(device_).cubin(source_.text)};
}

int CudaLoop::shared_bytes() const {
  return source_.shared_bytes;
}

void CudaLoop::raise_if_failed() {
  const std::optional<loop::Report> found = memories_.take_failure();
  if (!found) return;
  const auto failure = static_cast<loop::Failure>(found->failure);
  raise_step_failure(plan_, step_failure(failure == loop::Failure::deadline ? StepFailure::Kind::deadline
                                         : failure == loop::Failure::peer   ? StepFailure::Kind::peer
                                                                            : StepFailure::Kind::index_too_large,
                                         *found, timeout_));
}

void CudaLoop::renew() {
  memories_.renew();
}

std::string CudaLoop::left() const {
  const std::optional<loop::Report> found = memories_.failure();
  if (!found || static_cast<loop::Failure>(found->failure) != loop::Failure::peer) return "";
  return describe_left(plan_, step_failure(StepFailure::Kind::peer, *found, timeout_));
}

// The device's clock has another origin than the host's. The last task's end is equated with the time at which the
// stream was found idle, which shifts all stamps by a few microseconds.
void CudaLoop::take_stamps(StepMemory& memory, CUstream stream, uint64_t begin_ns, StepStamps& stamps) const {
  check(driver().stream_synchronize(stream), "waiting for the step to be traced");
  const uint64_t done_ns = cpu::now_ns();
  const auto* device = static_cast<const loop::Stamp*>(memory.stamps->host());
  unsigned long long last = 0;
  for (size_t i = 0; i < plan_.tasks.size(); ++i) last = std::max(last, device[i].end_ns);
  const auto host = [&](unsigned long long when) -> uint64_t {
    return when == 0 ? 0 : std::max<uint64_t>(begin_ns, done_ns - (last - when));
  };
  stamps.tasks.clear();
  stamps.wait_ends.clear();
  std::vector<uint64_t> carried;
  for (size_t i = 0; i < plan_.tasks.size(); ++i) {
    const uint64_t began = host(device[i].begin_ns);
    stamps.tasks.push_back({host(device[i].came_ns), began, host(device[i].end_ns)});
    stamps.wait_ends.insert(stamps.wait_ends.end(), waits_of(plan_, static_cast<int>(i)).size(), began);
    carried.insert(carried.end(), plan_.tasks[i].carried.size(), began);
  }
  stamps.wait_ends.insert(stamps.wait_ends.end(), carried.begin(), carried.end());
  stamps.wait_ends.push_back(0);
}

std::chrono::nanoseconds CudaLoop::limit_of(const loop::Ranks* ranks) const {
  if (ranks == nullptr) return timeout_;
  const std::chrono::nanoseconds most = std::chrono::nanoseconds::max() - kLaterThanPeers;
  if (ranks->limit_ns > static_cast<uint64_t>(most.count())) return {};
  return std::chrono::nanoseconds(ranks->limit_ns) + kLaterThanPeers;
}

void CudaLoop::launch(StepMemory& memory, const void* const* inputs, void* const* outputs, CUstream stream,
                      bool stamped, const loop::Ranks* ranks, uint32_t most_steps) {
  const auto given = static_cast<size_t>(source_.pointers);
  const auto most = static_cast<size_t>(plan_.graph.inputs());
  std::vector<char> launch(sizeof(loop::LaunchHead) + given * sizeof(char*));
  char* const base = memory.data.data();
  loop::LaunchHead head{};
  head.arena = base + memory.arena;
  head.own = base + memory.own;
  head.own_stride = static_cast<long long>(memory.own_stride);
  head.scratch = base + memory.scratch;
  head.scratch_stride = static_cast<long long>(memory.scratch_stride);
  head.events = reinterpret_cast<uint32_t*>(base + memory.events);
  head.steps = reinterpret_cast<uint32_t*>(base + memory.steps);
  head.control = reinterpret_cast<loop::Control*>(base);
  head.report = static_cast<loop::Report*>(memory.report.device());
  if (stamped) head.stamps = static_cast<loop::Stamp*>(memory.stamps->device());
  head.most = most_steps;
  head.timeout_ns = static_cast<unsigned long long>(limit_of(ranks).count());
  if (ranks != nullptr) head.ranks = *ranks;
  std::memcpy(launch.data(), &head, sizeof(head));
  char* at = launch.data() + sizeof(head);
  std::memcpy(at, inputs, most * sizeof(char*));
  if (const auto results = static_cast<size_t>(plan_.graph.outputs()); results > 0)
    std::memcpy(at + most * sizeof(char*), outputs, results * sizeof(char*));
  jit::launch(*kernel_, {static_cast<unsigned>(plan_.queues.size())}, {loop::kThreads},
              static_cast<size_t>(shared_bytes()), stream, launch.data(), launch.size(), jit::LaunchMode::cooperative);
}

void CudaLoop::run(const void* const* inputs, void* const* outputs, CUstream stream, StepStamps* stamps,
                   const loop::Ranks* ranks) {
  raise_if_failed();
  const std::shared_ptr<StepMemory> memory = memories_.of(stream);
  if (stamps != nullptr && capture_of(stream).id != 0) stamps = nullptr;
  if (stamps != nullptr) {
    const size_t bytes = (plan_.tasks.size() + 1) * sizeof(loop::Stamp);
    if (memory->stamps == nullptr) memory->stamps = std::make_unique<PinnedMemory>(device_, bytes);
    std::memset(memory->stamps->host(), 0, bytes);
  }
  const uint64_t begin_ns = cpu::now_ns();
  launch(*memory, inputs, outputs, stream, stamps != nullptr, ranks, 1);
  if (stamps != nullptr) take_stamps(*memory, stream, begin_ns, *stamps);
}

CudaLoop::Launched CudaLoop::launch_steps(const void* const* inputs, CUstream stream, uint32_t most,
                                          const loop::Ranks* ranks) {
  if (most < 1 || !plan_.multi_step || capture_of(stream).id != 0)
    throw Error(ErrorKind::invalid_argument,
                formatted("a launch of {} steps of a plan that is {}multi_step{}", most, plan_.multi_step ? "" : "not ",
                          capture_of(stream).id != 0 ? ", under graph capture" : ""));
  raise_if_failed();
  const std::shared_ptr<StepMemory> memory = memories_.of(stream);
  loop::Report& report = memory->host_report();
  report.stop = report.steps = 0;
  launch(*memory, inputs, nullptr, stream, false, ranks, most);
  return {&report, most, limit_of(ranks)};
}

uint64_t CudaLoop::wait_steps(const Launched& launched, CUstream stream, const std::function<bool()>& interrupted) {
  const RelaxedCapture relaxed;
  loop::Report& report = *launched.report;
  auto asked = std::chrono::steady_clock::now();
  LaunchWait wait(asked, launched.most, launched.limit);
  const auto stuck = [&](const std::string& what) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(wait.limit()).count();
    throw Error(ErrorKind::timeout,
                formatted("a launch of {} steps, for which the host waits {} s, {}", launched.most, seconds, what),
                ErrorContext{-1, -1, "compiled region", 0,
                             "Look at what was enqueued on its stream before, and at the GPU (nvidia-smi)."});
  };
  CUresult state = driver().stream_query(stream);
  for (; state == CUDA_ERROR_NOT_READY; state = driver().stream_query(stream)) {
    std::this_thread::sleep_for(kPoll);
    const auto now = std::chrono::steady_clock::now();
    const bool stopping = protocol::load_acquire(report.stop) != 0;
    const LaunchWait::Next next = wait.at(now, stopping);
    if (next == LaunchWait::Next::give_up) stuck("has not ended, though it was asked to stop");
    if (next == LaunchWait::Next::stop) protocol::store_release(report.stop, 1u);
    if (!interrupted || now - asked < kAsk || stopping) continue;
    asked = now;
    if (interrupted()) protocol::store_release(report.stop, 1u);
  }
  raise_if_failed();
  check(state, "waiting for a launch of many steps");
  if (wait.overdue()) stuck(formatted("was stopped after {}", report.steps));
  if (protocol::load_acquire(report.stop) != 0)
    throw Error(ErrorKind::aborted, formatted("a compiled region was stopped after {} steps", report.steps),
                ErrorContext{-1, -1, "compiled region", 0, ""});
  return report.steps;
}

}  // namespace ark::compiler

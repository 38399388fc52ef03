// Memory, launches and errors of plans on the CPU. See cpu_loop.hpp.
#include "compiler/runtime/cpu_loop.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "compiler/emit/cpu/emit_cpu.hpp"
#include "compiler/runtime/step_failure.hpp"
#include "compiler/runtime/worker_pool.hpp"
#include "util/error.hpp"
#include "util/format.hpp"

namespace ark::compiler {

static_assert(kMostOperands <= cpu::kMostOperands);

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

// Zeroed memory, aligned to a cache line, or to a huge page if large enough.
class Block {
 public:
  explicit Block(int64_t bytes) {
    if (bytes <= 0) return;
    const int64_t alignment = bytes >= kHugePage ? kHugePage : 64;
    bytes_ = (bytes + alignment - 1) / alignment * alignment;
    data_ = static_cast<char*>(std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(bytes_)));
    if (data_ == nullptr)
      throw Error(ErrorKind::system, formatted("no memory for the {} bytes of a compiled region", bytes_));
    if (alignment == kHugePage) ::madvise(data_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
    std::memset(data_, 0, static_cast<size_t>(bytes_));
  }
  ~Block() { std::free(data_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  char* data() const { return data_; }
  void clear() {
    if (data_ != nullptr) std::memset(data_, 0, static_cast<size_t>(bytes_));
  }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Pads workers' parts so that they share neither a cache line nor adjacent lines that are prefetched together.
int64_t apart(int64_t bytes) {
  return bytes == 0 ? 0 : (bytes + 255) / 256 * 256 + 128;
}

}  // namespace

struct CpuLoop::Memory {
  Memory(const Plan& plan, const cpu::PlanInfo& info)
      : own_stride(apart(plan.own_bytes) / 64 * 64),
        scratch_stride(apart(info.scratch_bytes) / 64 * 64),
        arena(plan.arena_bytes),
        own(own_stride * info.workers),
        scratch(scratch_stride * info.workers),
        events(static_cast<int64_t>(info.events + 1) * static_cast<int64_t>(sizeof(cpu::EventCount))) {}

  // Resets the set after a failed step.
  void begin_anew() {
    events.clear();
    step = 0;
  }

  const int64_t own_stride, scratch_stride;
  Block arena, own, scratch, events;
  cpu::Report report{};
  uint64_t step = 0;
};

CpuLoop::CpuLoop(Plan plan, jit::HostCompiler& compiler) : plan_(std::move(plan)), source_(emit_cpu(plan_)) {
  // A cached library may not load on this machine (other libraries, an older loader): compile it again.
  try {
    load(compiler.library(source_));
  } catch (const Error&) {
    if (!from_cache_) throw;
    load(compiler.library(source_, true));
  }
}

CpuLoop::CpuLoop(Plan plan, const SavedKernel& saved) : plan_(std::move(plan)), source_(emit_cpu(plan_)) {
  check_saved(saved, source_);
  load({saved.binary, jit::CachedKernel::Origin::cache, "saved", ""});
}

void CpuLoop::load(const jit::HostCompiler::Result& compiled) {
  key_ = compiled.key;
  from_cache_ = compiled.origin == jit::CachedKernel::Origin::cache;
  library_ = std::make_unique<jit::LoadedLibrary>(compiled.library);
  run_ = reinterpret_cast<void (*)(const cpu::Launch*, int)>(library_->symbol(kRunSymbol));
  info_ = *static_cast<const cpu::PlanInfo*>(library_->symbol(kInfoSymbol));
  if (info_.abi != cpu::kAbi || info_.workers != plan_.queues.size() || info_.events != plan_.events.size() ||
      info_.tasks != plan_.tasks.size())
    throw Error(ErrorKind::system, formatted("a compiled plan is not the one that was asked for ({})", key_));
}

CpuLoop::~CpuLoop() = default;

void CpuLoop::set_collective(Collective collective, void* host) {
  collective_ = collective;
  collective_host_ = host;
}

void CpuLoop::run(const void* const* inputs, void* const* outputs, StepStamps* stamps) {
  run_steps(inputs, outputs, {}, stamps);
}

uint64_t CpuLoop::run_steps(const void* const* inputs, void* const* outputs, const Steps& steps, StepStamps* stamps) {
  if (steps.most < 1 || (steps.most > 1 && !plan_.multi_step))
    throw Error(ErrorKind::invalid_argument, formatted("a launch of {} steps of a plan that is {}multi_step",
                                                       steps.most, plan_.multi_step ? "" : "not "));
  size_t waits = 0;
  const uint64_t stamped = stamps == nullptr ? 0 : std::min(steps.most, steps.stamped);
  if (stamps != nullptr) {
    waits = 1;  // allocate at least one element, so that the pointer is not null
    for (const Task& task : plan_.tasks) waits += task.waits.size() + task.carried.size();
    stamps->tasks.assign(plan_.tasks.size() * stamped, {});
    stamps->wait_ends.assign(waits * stamped, 0);
  }
  std::unique_ptr<Memory> memory;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      memory = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (memory == nullptr) memory = std::make_unique<Memory>(plan_, info_);
  memory->report = {};
  struct GiveBack {
    CpuLoop& loop;
    std::unique_ptr<Memory>& memory;
    ~GiveBack() {
      const std::lock_guard lock(loop.mutex_);
      loop.idle_.push_back(std::move(memory));
    }
  } give_back{*this, memory};

  cpu::Launch launch{};
  launch.abi = cpu::kAbi;
  launch.workers = info_.workers;
  launch.inputs = inputs;
  launch.outputs = outputs;
  launch.arena = memory->arena.data();
  launch.own = memory->own.data();
  launch.own_stride = memory->own_stride;
  launch.scratch = memory->scratch.data();
  launch.scratch_stride = memory->scratch_stride;
  launch.events = reinterpret_cast<cpu::EventCount*>(memory->events.data());
  launch.report = &memory->report;
  memory->report.collective_ns = 0;
  if (stamps != nullptr) {
    launch.stamps = stamps->tasks.data();
    launch.wait_ends = stamps->wait_ends.data();
    launch.stamped = stamped;
    launch.waits = waits;
  }
  launch.step = memory->step + 1;
  launch.steps = steps.most;
  launch.timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout_).count());
  launch.collective = collective_;
  launch.host = collective_host_;
  launch.interrupted = steps.interrupted;
  launch.asker = steps.asker;
  struct Job {
    void (*run)(const cpu::Launch*, int);
    const cpu::Launch* launch;
  } job{run_, &launch};
  WorkerPool::run(
      static_cast<int>(info_.workers),
      [](void* argument, int worker) {
        const Job& mine = *static_cast<const Job*>(argument);
        mine.run(mine.launch, worker);
      },
      &job);
  if (protocol::load_acquire(memory->report.abort) != 0) {
    memory->begin_anew();
    raise(memory->report);
  }
  memory->step += memory->report.steps;
  return memory->report.steps;
}

void CpuLoop::raise(const cpu::Report& report) const {
  auto kind = StepFailure::Kind::aborted;
  switch (static_cast<cpu::Failure>(protocol::load_acquire(report.failure))) {
    case cpu::Failure::index_too_large: kind = StepFailure::Kind::index_too_large; break;
    case cpu::Failure::deadline: kind = StepFailure::Kind::deadline; break;
    case cpu::Failure::collective: kind = StepFailure::Kind::collective; break;
    case cpu::Failure::aborted:
    case cpu::Failure::none: break;
  }
  raise_step_failure(plan_, step_failure(kind, report, timeout_));
}

}  // namespace ark::compiler

// Allocates, finds and resets the memory sets of steps. See step_memory.hpp.
#include "compiler/runtime/step_memory.hpp"

#include "cuda/graph_owned.hpp"
#include "protocol/atomics.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

size_t aligned(int64_t bytes) {
  return static_cast<size_t>((bytes + 255) / 256 * 256);
}

}  // namespace

StepMemory::StepMemory(const Plan& plan, int64_t scratch_bytes, int device)
    : events(aligned(sizeof(loop::Control))),
      steps(events + (plan.events.size() + 1) * loop::kEventStride * sizeof(uint32_t)),
      own(steps + plan.queues.size() * loop::kEventStride * sizeof(uint32_t)),
      own_stride(aligned(plan.own_bytes)),
      scratch(own + own_stride * plan.queues.size()),
      scratch_stride(aligned(scratch_bytes)),
      arena(scratch + scratch_stride * plan.queues.size()),
      data(DeviceMemory::allocate(
          device, arena + aligned(plan.arena_bytes),
          "Free memory on this device (torch.cuda.empty_cache() gives back what PyTorch keeps), or leave this region "
          "to another backend.")),
      report(device, sizeof(loop::Report)) {}

StepMemories::StepMemories(const Plan& plan, int64_t scratch_bytes, int device, bool one)
    : plan_(plan), scratch_bytes_(scratch_bytes), device_(device), one_(one) {}

// Running kernels use the sets, so wait for them. Errors are ignored: either the driver is gone and nothing runs, or it
// refuses because a capture is active, and nothing better can be done.
StepMemories::~StepMemories() {
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    if (!own_.empty()) static_cast<void>(driver().ctx_synchronize());
    release_ended_graphs();
  } catch (const Error&) {
  }
}

std::shared_ptr<StepMemory> StepMemories::of(CUstream stream) {
  const Capture capture = capture_of(stream);
  const std::lock_guard lock(mutex_);
  std::weak_ptr<StepMemory>& known = one_ ? sets_[{nullptr, 0}] : sets_[{stream, capture.id}];
  std::shared_ptr<StepMemory> set = known.lock();
  const bool made = set == nullptr;
  if (made) {
    release_ended_graphs();
    known = set = std::make_shared<StepMemory>(plan_, scratch_bytes_, device_);
  }
  if (capture.id != 0 && (made || one_)) keep_with_graph(capture, set);
  if (made && (capture.id == 0 || one_)) own_.push_back(set);
  if (made) std::erase_if(sets_, [](const auto& one) { return one.second.expired(); });
  return set;
}

std::pair<std::shared_ptr<StepMemory>, CUstream> StepMemories::failed() const {
  for (const auto& [where, known] : sets_)
    if (auto set = known.lock(); set && protocol::load_acquire(set->host_report().failure) != 0)
      return {std::move(set), where.first};
  return {};
}

std::optional<loop::Report> StepMemories::failure() const {
  const std::lock_guard lock(mutex_);
  const auto [set, stream] = failed();
  return set == nullptr ? std::nullopt : std::optional(set->host_report());
}

// Zeroes the memory too, since the count of steps restarts and old packets must not look like those of later steps. The
// memset has no effect if an assertion has destroyed the context.
std::optional<loop::Report> StepMemories::take_failure() {
  const std::lock_guard lock(mutex_);
  const auto [set, stream] = failed();
  if (set == nullptr) return std::nullopt;
  const loop::Report found = set->host_report();
  if (one_) return found;
  set->host_report() = {};
  const auto data = reinterpret_cast<CUdeviceptr>(set->data.data());
  static_cast<void>(driver().memset_d8_async(data, 0, set->data.size(), stream));
  return found;
}

void StepMemories::renew() {
  const std::lock_guard lock(mutex_);
  if (own_.empty()) return;
  const RelaxedCapture relaxed;
  check(driver().ctx_synchronize(), "waiting for the steps of a group that has ended");
  own_.clear();
  sets_.clear();
}

}  // namespace ark::compiler

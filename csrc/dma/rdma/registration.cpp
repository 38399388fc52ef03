// Finds, creates and evicts memory regions. Registering is slow, so a region that contains the requested range is
// reused. If the NIC refuses a new one, idle regions are dropped, oldest first, before that becomes an error.
#include "dma/rdma/registration.hpp"

#include <sys/resource.h>

#include <cerrno>

#include "dma/rdma/gpu_memory.hpp"

namespace ark::rdma {

namespace {

Error refused(const Device& device, size_t bytes, int error) {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool bounded = limit.rlim_cur != RLIM_INFINITY;
  const std::string what = "cannot register " + std::to_string(bytes) + " bytes of memory with " + device.port().device;
  if ((error == ENOMEM || error == EAGAIN || error == EPERM) && bounded)
    return system_error(
        what + ", where memory that may be locked is limited to " + std::to_string(limit.rlim_cur >> 10) +
            " KiB (ulimit -l)",
        error,
        "Raise it before the program starts: `ulimit -l unlimited`, or a line \"* - memlock unlimited\" "
        "in /etc/security/limits.d/rdma.conf (containers: `--ulimit memlock=-1`).");
  return system_error(what, error, "See the device's limits (`ibv_devinfo -v`: max_mr, max_mr_size) and free memory.");
}

}  // namespace

Registrations::Registrations(std::shared_ptr<Device> device, size_t most_idle_bytes)
    : device_(std::move(device)), most_idle_bytes_(most_idle_bytes) {}

Registrations::~Registrations() {
  for (const auto& [region, state] : regions_) device_->verbs().dereg_mr(region);
}

void Registrations::Use::reset() {
  if (of_) of_->release(region_);
  of_ = nullptr;
}

// Null if no region covers the range. A region of GPU memory that was freed since is dropped, or left to its users.
ibv_mr* Registrations::find(uintptr_t begin, size_t bytes, uint64_t buffer) {
  // Look back over a few regions that begin at or before the address. A longer search would cost more than a new
  // registration.
  auto found = by_address_.upper_bound(begin);
  for (int steps = 0; steps < 8 && found != by_address_.begin(); ++steps) {
    --found;
    ibv_mr* region = found->second;
    const Region& state = regions_.at(region);
    if (state.buffer != buffer) {
      if (state.uses > 0) continue;
      ++found;
      drop(region);
      continue;
    }
    if (begin - found->first + bytes <= region->length) return region;
  }
  return nullptr;
}

Registrations::Use Registrations::take(ibv_mr* region) {
  Region& state = regions_.at(region);
  if (state.uses++ == 0) {
    idle_.erase(state.idle);
    idle_bytes_ -= region->length;
  }
  ++reused_;
  return {this, region};
}

Registrations::Use Registrations::Use::again() const {
  if (of_ == nullptr) return {};
  const std::lock_guard lock(of_->mutex_);
  ++of_->regions_.at(region_).uses;
  return {of_, region_};
}

Registrations::Use Registrations::hold(const void* address, size_t bytes, Where where) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const uint64_t buffer = where == Where::gpu ? gpu_buffer_of(address) : 0;
  const std::lock_guard lock(mutex_);
  if (ibv_mr* known = find(begin, bytes, buffer)) return take(known);
  const auto attempt = [&] {
    return where == Where::gpu ? register_gpu_memory(*device_, address, bytes)
                               : device_->verbs().reg_mr(device_->domain(), const_cast<void*>(address), bytes, kAccess);
  };
  ibv_mr* region = attempt();
  while (!region && !idle_.empty()) {
    drop_oldest();
    region = attempt();
  }
  if (!region) throw refused(*device_, bytes, errno);
  ++registered_;
  Region& state = regions_[region];
  state.begin = begin;
  state.uses = 1;
  state.buffer = buffer;
  by_address_.emplace(begin, region);
  return {this, region};
}

void Registrations::release(ibv_mr* region) {
  const std::lock_guard lock(mutex_);
  Region& state = regions_.at(region);
  if (--state.uses > 0) return;
  state.idle = idle_.insert(idle_.end(), region);
  idle_bytes_ += region->length;
  while (idle_bytes_ > most_idle_bytes_) drop_oldest();
}

void Registrations::drop(ibv_mr* region) {
  const auto state = regions_.find(region);
  idle_.erase(state->second.idle);
  idle_bytes_ -= region->length;
  const auto range = by_address_.equal_range(state->second.begin);
  for (auto one = range.first; one != range.second; ++one) {
    if (one->second != region) continue;
    by_address_.erase(one);
    break;
  }
  regions_.erase(state);
  device_->verbs().dereg_mr(region);
}

Registrations::Counts Registrations::counts() const {
  const std::lock_guard lock(mutex_);
  return {regions_.size() - idle_.size(), idle_.size(), idle_bytes_, registered_, reused_};
}

}  // namespace ark::rdma

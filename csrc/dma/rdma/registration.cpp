// Finds, creates and evicts memory regions. Registering is slow, so a region that contains the requested range is
// reused. If the NIC refuses a new one, idle regions are dropped, oldest first, before that becomes an error.
#include "dma/rdma/registration.hpp"

#include <sys/resource.h>

#include <cerrno>

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

Registrations::Use Registrations::hold(const void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  // Look back over a few regions that begin at or before the address. A longer search would cost more than a new
  // registration.
  auto found = by_address_.upper_bound(begin);
  for (int steps = 0; steps < 8 && found != by_address_.begin(); ++steps) {
    --found;
    ibv_mr* region = found->second;
    if (begin - found->first + bytes > region->length) continue;
    Region& state = regions_.at(region);
    if (state.uses++ == 0) {
      idle_.erase(state.idle);
      idle_bytes_ -= region->length;
    }
    ++reused_;
    return {this, region};
  }
  constexpr int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  const auto attempt = [&] {
    return device_->verbs().reg_mr(device_->domain(), const_cast<void*>(address), bytes, access);
  };
  ibv_mr* region = attempt();
  while (!region && !idle_.empty()) {
    drop_oldest();
    region = attempt();
  }
  if (!region) throw refused(*device_, bytes, errno);
  ++registered_;
  regions_[region].uses = 1;
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

void Registrations::drop_oldest() {
  ibv_mr* region = idle_.front();
  idle_.pop_front();
  idle_bytes_ -= region->length;
  const auto range = by_address_.equal_range(reinterpret_cast<uintptr_t>(region->addr));
  for (auto one = range.first; one != range.second; ++one) {
    if (one->second != region) continue;
    by_address_.erase(one);
    break;
  }
  regions_.erase(region);
  device_->verbs().dereg_mr(region);
}

Registrations::Counts Registrations::counts() const {
  const std::lock_guard lock(mutex_);
  return {regions_.size() - idle_.size(), idle_.size(), idle_bytes_, registered_, reused_};
}

}  // namespace ark::rdma

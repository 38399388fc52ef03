// Sets a part of the cache aside and puts back what was there before. See persisting_cache.hpp.
#include "cuda/persisting_cache.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "cuda/driver.hpp"
#include "util/error.hpp"

namespace ark {

namespace {

// By device: what living objects ask for, and the context's size before the first and as last set here.
struct Aside {
  std::multiset<size_t> asked;
  size_t before = 0, set = 0;
};

std::mutex g_aside_mutex;  // guards the map, and the context's size from its query to its change

std::map<int, Aside>& asides() {
  static auto* instance = new std::map<int, Aside>;  // regions may end during exit
  return *instance;
}

size_t aside_now() {
  size_t bytes = 0;
  check(driver().ctx_get_limit(&bytes, CU_LIMIT_PERSISTING_L2_CACHE_SIZE),
        "asking for the size of the cache set aside");
  return bytes;
}

// Returns what the driver made of it.
size_t set_aside(size_t bytes) {
  check(driver().ctx_set_limit(CU_LIMIT_PERSISTING_L2_CACHE_SIZE, bytes), "setting a part of the cache aside");
  return aside_now();
}

}  // namespace

PersistingCache::PersistingCache(int device, size_t bytes)
    : device_(device),
      most_window_(static_cast<size_t>(device_attribute(device, CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE))),
      bytes_(std::min(
          bytes, static_cast<size_t>(device_attribute(device, CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE)))) {
  if (bytes_ == 0) return;
  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  const std::lock_guard lock(g_aside_mutex);
  Aside& here = asides()[device];
  if (here.asked.empty()) here.before = here.set = aside_now();
  if (bytes_ > here.set) here.set = set_aside(bytes_);
  here.asked.insert(bytes_);
}

// Lines that stay would keep their place from all later work, so they become plain ones with the last object. Errors
// are ignored: the context is gone, and its cache's division with it.
PersistingCache::~PersistingCache() {
  if (bytes_ == 0) return;
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    const std::lock_guard lock(g_aside_mutex);
    Aside& here = asides()[device_];
    here.asked.erase(here.asked.find(bytes_));
    if (aside_now() != here.set) return;
    const size_t wanted = here.asked.empty() ? here.before : std::max(here.before, *here.asked.rbegin());
    if (wanted < here.set) here.set = set_aside(wanted);
    if (here.asked.empty() && here.before == 0) static_cast<void>(driver().ctx_reset_persisting());
  } catch (const Error&) {
  }
}

CUaccessPolicyWindow PersistingCache::window(void* base, size_t bytes) const {
  CUaccessPolicyWindow window{base, std::min(bytes, most_window_), 0, CU_ACCESS_PROPERTY_PERSISTING,
                              CU_ACCESS_PROPERTY_NORMAL};
  if (bytes_ == 0) window.num_bytes = 0;
  if (window.num_bytes > 0)
    window.hitRatio = std::min(1.0F, static_cast<float>(bytes_) / static_cast<float>(window.num_bytes));
  return window;
}

}  // namespace ark

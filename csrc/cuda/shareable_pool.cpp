// The process's table of segments, by address.
#include "cuda/shareable_pool.hpp"

#include <map>
#include <mutex>

namespace ark {

namespace {

// Never destroyed, because PyTorch frees segments during process exit.
struct Segments {
  std::mutex mutex;
  std::map<uintptr_t, std::shared_ptr<const ShareableSegment>> by_address;
  uint64_t last_number = 0;
};
Segments& segments() {
  static auto* instance = new Segments;
  return *instance;
}

}  // namespace

std::shared_ptr<const ShareableSegment> find_shareable(const void* data, uint64_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(data);
  Segments& all = segments();
  const std::lock_guard lock(all.mutex);
  auto behind = all.by_address.upper_bound(at);
  if (behind == all.by_address.begin()) return nullptr;
  const auto& [begin, segment] = *std::prev(behind);
  const uint64_t size = segment->memory.size(), offset = at - begin;
  return offset <= size && bytes <= size - offset ? segment : nullptr;
}

size_t count_shareable() {
  Segments& all = segments();
  const std::lock_guard lock(all.mutex);
  return all.by_address.size();
}

}  // namespace ark

void* ark_pool_alloc(ssize_t bytes, int device, void*) {
  if (bytes <= 0) return nullptr;
  auto memory = ark::DeviceMemory::try_allocate(device, static_cast<size_t>(bytes));
  if (!memory) return nullptr;
  memory->open_to_peers();
  char* const data = memory->data();
  ark::Segments& all = ark::segments();
  const std::lock_guard lock(all.mutex);
  all.by_address[reinterpret_cast<uintptr_t>(data)] =
      std::make_shared<const ark::ShareableSegment>(++all.last_number, device, std::move(*memory));
  return data;
}

void ark_pool_free(void* data, ssize_t, int, void*) {
  std::shared_ptr<const ark::ShareableSegment> last;  // unmapped outside the lock
  ark::Segments& all = ark::segments();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_address.find(reinterpret_cast<uintptr_t>(data));
  if (found == all.by_address.end()) return;
  last = std::move(found->second);
  all.by_address.erase(found);
}

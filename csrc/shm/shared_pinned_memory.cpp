// Creates, exchanges and registers the parts of shared_pinned_memory.hpp in one step of a meeting, so that either all
// ranks have all parts or none has.
#include "shm/shared_pinned_memory.hpp"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "util/error.hpp"

namespace ark {

std::unique_ptr<SharedPinnedMemory> SharedPinnedMemory::create(MemoryMeeting& meeting, int device, size_t bytes,
                                                               const std::function<void(void* own)>& prepare,
                                                               std::string& why) {
  std::unique_ptr<SharedPinnedMemory> made(new SharedPinnedMemory(device, meeting.size()));
  const auto share = [&] {
    SharedMemory& own = made->parts_[meeting.rank()].memory;
    own = SharedMemory::create("ark-words", bytes);
    own.commit(0, bytes);
    prepare(own.data());
    const UniqueFd fd(::fcntl(own.fd(), F_DUPFD_CLOEXEC, 0));
    if (!fd) throw system_error("cannot share " + std::to_string(bytes) + " bytes of host memory", errno);
    for (int peer = 0; peer < meeting.size(); ++peer)
      if (peer != meeting.rank()) meeting.give(peer, fd);
    for (int peer = 0; peer < meeting.size(); ++peer)
      if (peer != meeting.rank()) made->parts_[peer].memory = SharedMemory::attach(meeting.take(peer), bytes);
    const RelaxedCapture relaxed;
    const CurrentContext context(device);
    for (Part& part : made->parts_) made->add(part);
  };
  if (!meeting.step(share, why)) return nullptr;
  return made;
}

void SharedPinnedMemory::add(Part& part) {
  void* const host = part.memory.data();
  check(driver().mem_host_register(host, part.memory.size(), kHostRegisterPortable | kHostRegisterDeviceMap),
        "cuMemHostRegister of " + std::to_string(part.memory.size()) + " shared bytes");
  part.registered = true;
  check(driver().mem_host_get_device_pointer(&part.device, host, 0), "cuMemHostGetDevicePointer");
  part.memory.close_fd();
}

SharedPinnedMemory::~SharedPinnedMemory() {
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(ordinal_);
    for (const Part& part : parts_)
      if (part.registered) driver().mem_host_unregister(part.memory.data());
  } catch (const Error&) {  // at exit the driver may be gone
  }
}

}  // namespace ark

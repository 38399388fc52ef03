// memfd segments: creation, attaching untrusted descriptors, and committing pages.
#include "shm/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "shm/available_memory.hpp"
#include "util/error.hpp"

namespace ark {

namespace {

constexpr size_t kMaxMemfdName = 249;  // the kernel's limit
constexpr size_t kCommitStep = size_t{64} << 20;
constexpr size_t kMinCommitStep = size_t{64} << 10;
constexpr size_t kWorthAsking = size_t{16} << 20;  // smaller requests are left to the kernel

std::string hint_for(int error) {
  switch (error) {
    case ENOMEM:
    case ENOSPC: return "Free memory on this machine, raise the limit (ulimit -v, container), or use smaller buffers.";
    case EMFILE:
    case ENFILE: return "Raise the limit of open files (ulimit -n).";
    case EFBIG: return "Raise the limit of file size (ulimit -f); it counts for shared memory too.";
    case ENOSYS:
    case EPERM:
    case EACCES: return "The system or container forbids memfd_create; set ARK_SHARED_MEMORY=off to do without.";
    default: return {};
  }
}

[[noreturn]] void refuse(const std::string& what, size_t bytes, int error) {
  throw system_error("cannot " + what + " a shared segment of " + std::to_string(bytes) + " bytes", error,
                     hint_for(error));
}

std::byte* map(int fd, size_t bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) refuse("map", bytes, errno);
  return static_cast<std::byte*>(address);
}

[[noreturn]] void distrust(const std::string& why) {
  ErrorContext context;
  context.remedy = "All ranks must run the same build of ark_torch.";
  throw Error(ErrorKind::system, "a peer's shared segment is refused: " + why, context);
}

}  // namespace

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      owned_(other.owned_) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    SharedMemory old(std::move(*this));
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    owned_ = other.owned_;
  }
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr && owned_) ::munmap(data_, size_);
}

SharedMemory SharedMemory::create(const std::string& name, size_t bytes) {
  if (bytes == 0) throw Error(ErrorKind::invalid_argument, "a shared segment needs at least one byte, got 0");
  if (bytes > static_cast<size_t>(INT64_MAX)) refuse("create", bytes, EFBIG);
  UniqueFd fd(::memfd_create(name.substr(0, kMaxMemfdName).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) refuse("create", bytes, errno);
  // Growing past RLIMIT_FSIZE would kill the process with SIGXFSZ.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur)
    refuse("create", bytes, EFBIG);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) refuse("create", bytes, errno);
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) refuse("seal", bytes, errno);
  std::byte* data = map(fd.get(), bytes);
  return SharedMemory(std::move(fd), data, bytes);
}

SharedMemory SharedMemory::attach(UniqueFd fd, size_t expected_bytes) {
  if (!fd || expected_bytes == 0) distrust("there is no descriptor or no size");
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) refuse("inspect", expected_bytes, errno);
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (!S_ISREG(status.st_mode) || seals < 0) distrust("the descriptor is not a memfd");
  if ((seals & F_SEAL_SHRINK) == 0) distrust("its size is not sealed");
  if (status.st_size < 0 || static_cast<uint64_t>(status.st_size) != expected_bytes)
    distrust("it has " + std::to_string(status.st_size) + " bytes where " + std::to_string(expected_bytes) +
             " were announced");
  std::byte* data = map(fd.get(), expected_bytes);
  return SharedMemory(std::move(fd), data, expected_bytes);
}

SharedMemory SharedMemory::alias(const SharedMemory& other) {
  UniqueFd fd(::fcntl(other.fd(), F_DUPFD_CLOEXEC, 0));
  if (!fd) refuse("share", other.size(), errno);
  SharedMemory same(std::move(fd), other.data(), other.size());
  same.owned_ = false;
  return same;
}

void SharedMemory::commit(size_t offset, size_t bytes) {
  if (offset > size_ || bytes > size_ - offset)
    throw Error(ErrorKind::invalid_argument, "commit of bytes " + std::to_string(offset) + " + " +
                                                 std::to_string(bytes) + " in a segment of " + std::to_string(size_));
  if (!fd_) throw Error(ErrorKind::closed, "commit on a segment whose descriptor was closed");
  struct stat status {};
  if (bytes >= kWorthAsking && ::fstat(fd_.get(), &status) == 0) {
    // At most the pages that are missing, wherever they are.
    const size_t present = std::min(size_, static_cast<size_t>(status.st_blocks) * 512);
    if (std::min(bytes, size_ - present) > available_memory())
      refuse("find pages for " + std::to_string(bytes) + " bytes of", size_, ENOMEM);
  }
  // A signal makes fallocate undo its work and start over. Small steps let it finish under a profiler's frequent
  // signals.
  const size_t end = offset + bytes;
  size_t longest = kCommitStep;
  while (offset < end) {
    const size_t step = std::min(longest, end - offset);
    if (::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(step)) == 0)
      offset += step;
    else if (errno == EINTR)
      longest = std::max(kMinCommitStep, longest / 2);
    else
      refuse("find pages for " + std::to_string(bytes) + " bytes of", size_, errno);
  }
}

}  // namespace ark

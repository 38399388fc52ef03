// A memory segment that several processes map: a sealed memfd and its mapping.
//
// A memfd has no name in a file system, so nothing is left behind if all holders die, and the size of /dev/shm does not
// limit it. Its size is sealed at creation, so truncation can never cause SIGBUS. Pages are allocated on first touch,
// and a shortage then is a SIGBUS. So callers that will touch many new pages call commit() first, where it is an Error.
// The mapping stays valid after the descriptor is closed and is inherited across fork.
#pragma once

#include <cstddef>
#include <string>

#include "util/unique_fd.hpp"

namespace ark {

class SharedMemory {
 public:
  SharedMemory() noexcept = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // Creates a zeroed segment. `name` only appears in /proc/<pid>/maps and need not be unique. Throws
  // Error(invalid_argument) if bytes is 0, Error(system) with size and hint if the system refuses.
  static SharedMemory create(const std::string& name, size_t bytes);

  // Maps a segment whose descriptor came from another process. The descriptor is untrusted: throws Error(system) unless
  // it is a writable memfd of exactly `expected_bytes` that cannot shrink.
  static SharedMemory attach(UniqueFd fd, size_t expected_bytes);

  // Another, non-owning view of the mapping, for ranks that are threads of one process. `other` must outlive it.
  static SharedMemory alias(const SharedMemory& other);

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }
  int fd() const noexcept { return fd_.get(); }

  // Allocates the pages of [offset, offset + bytes) now. Contents are kept, and repeating it is cheap. Throws
  // Error(system) if the machine or the container has too little memory; large requests are checked before any page is
  // taken.
  void commit(size_t offset, size_t bytes);

  // The descriptor is only needed for handing the segment on and for commit().
  void close_fd() noexcept { fd_.reset(); }

 private:
  SharedMemory(UniqueFd fd, std::byte* data, size_t size) noexcept : fd_(std::move(fd)), data_(data), size_(size) {}

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  bool owned_ = true;
};

}  // namespace ark

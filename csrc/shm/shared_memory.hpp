// One segment of memory that several processes map: a sealed memfd and its mapping.
//
// A memfd has no name in any file system: nothing is left behind when every holder dies, and the size of /dev/shm
// does not limit it. Its size is sealed at creation, so that a peer which maps it can never be hit by SIGBUS because
// somebody truncated it. Pages are made on first touch; a page that cannot be made then is a SIGBUS, so whoever is
// about to touch many new pages calls commit() first, where the same shortage is an Error.
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

  // A new zeroed segment. `name` is shown in /proc/<pid>/maps only; need not be unique.
  // Error(invalid_argument) when bytes is 0; Error(system) with size and hint when the system refuses.
  static SharedMemory create(const std::string& name, size_t bytes);

  // Maps a segment whose descriptor came from another process. The descriptor is untrusted: Error(system) unless it
  // is a memfd of exactly `expected_bytes` that can no longer shrink and may be written.
  static SharedMemory attach(UniqueFd fd, size_t expected_bytes);

  // The same mapping once more, not owned: for ranks that are threads of one process. `other` must outlive it.
  static SharedMemory alias(const SharedMemory& other);

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }
  int fd() const noexcept { return fd_.get(); }

  // Makes the pages of [offset, offset + bytes) real now. Contents are kept; repeating it is cheap. Error(system) when
  // the machine or the container has not enough; large requests are checked before the first page is taken.
  void commit(size_t offset, size_t bytes);

  // The descriptor is only needed to hand the segment on and to commit().
  void close_fd() noexcept { fd_.reset(); }

 private:
  SharedMemory(UniqueFd fd, std::byte* data, size_t size) noexcept : fd_(std::move(fd)), data_(data), size_(size) {}

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  bool owned_ = true;
};

}  // namespace ark

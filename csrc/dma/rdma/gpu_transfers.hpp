// Messages of GPU memory over RDMA, in chunks: directly, where the NIC reaches GPU memory, or through pinned host
// memory.
//
// Both ends cut a message into the same chunks, so each end chooses its own path (gpu_memory.hpp). A staged end keeps
// several chunks in flight: while one is copied between GPU and host, others are on the network. Calls block their
// thread; calls of several threads run side by side, each on a stream and pinned memory of its own. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "dma/rdma/gpu_memory.hpp"
#include "dma/rdma/messages.hpp"

namespace ark::rdma {

class GpuTransfers {
 public:
  using Clock = std::chrono::steady_clock;
  struct Setup {
    int gpu = 0;
    size_t chunk_bytes = 1 << 20;  // alike on all ranks
    int chunks = 4;                // in flight
  };
  GpuTransfers(std::shared_ptr<Messages> messages, Setup setup, GpuPath path);
  ~GpuTransfers();

  // Sends memory that no kernel writes any more; returns when it may be written again. Throws Error(timeout) at the
  // deadline, and whatever the messages or the driver fail with.
  void send(int peer, int32_t tag, const void* data, size_t bytes, Clock::time_point deadline);
  // Returns when the data are there for kernels that start later.
  void receive(int peer, int32_t tag, void* data, size_t bytes, Clock::time_point deadline);

  const GpuPath& path() const { return path_; }

 private:
  class Lane;
  struct Piece {
    size_t begin, bytes;
    bool direct;
  };
  template <class Body>
  void with_lane(Body&& body);
  std::vector<Piece> pieces_of(size_t bytes) const;
  Held hold_all(const void* data, size_t bytes) const;
  void wait(Message& message, int peer, Clock::time_point deadline, const char* operation) const;

  const std::shared_ptr<Messages> messages_;
  const Setup setup_;
  const GpuPath path_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> idle_;  // under mutex_
};

}  // namespace ark::rdma

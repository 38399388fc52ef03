// A proxy: a host thread that starts copy engines for kernels, which send requests through a ring in host memory.
//
// A window is memory that requests may name. Data is read from a window of this GPU and written to a window of the
// peer, as mapped for this GPU. The proxy refuses a request beyond its window: it stops, check() throws, and the
// kernels time out. A channel's signal writes the next count to its word in the peer's memory, on the same stream, so
// after earlier copies.
//
// Ordering. Kernel to copy: protocol/request_ring.hpp, then the driver's call by the thread that acquired the request.
// Copy to peer: the driver orders the write of the word after the copy, at system scope.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device_memory.hpp"
#include "dma/request_server.hpp"

namespace ark {

class Proxy {
 public:
  struct Window {
    char* data = nullptr;
    uint64_t bytes = 0;
  };

  // `arrived[c]` is the word of channel c in the peer's memory as mapped here. It holds the count `told`.
  Proxy(int device, Window from, Window to, std::vector<uint64_t*> arrived, uint64_t told = 0);
  ~Proxy();

  // For kernels: the device addresses of the ring and of the word that goes with it.
  protocol::RequestRing* ring() const { return static_cast<protocol::RequestRing*>(ring_.device()); }
  uint64_t* head() const { return reinterpret_cast<uint64_t*>(head_.data()); }

  void stop();         // serves no further request; what was enqueued still runs
  void synchronize();  // waits for everything enqueued
  void check() const;  // throws the thread's error
  uint64_t served() const { return server_->served(); }

 private:
  void serve(const protocol::Request& request);

  const int device_;
  const Window from_, to_;
  const std::vector<uint64_t*> arrived_;
  std::vector<uint64_t> told_;
  PinnedMemory ring_;
  DeviceMemory head_;
  CUstream stream_ = nullptr;
  std::unique_ptr<RequestServer> server_;
};

// Returns why a request is refused, or an empty string if it is valid.
std::string why_refused(const protocol::Request& request, uint64_t from_bytes, uint64_t to_bytes, size_t channels);

}  // namespace ark

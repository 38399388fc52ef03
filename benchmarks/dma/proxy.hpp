// A proxy: the host thread that starts copy engines for kernels which ask for it through a ring in host memory.
//
// A window is memory that requests may name: here this GPU's, from which bytes are read, and a peer's as mapped for
// this GPU, to which they go. A request that reaches beyond its window is refused: the proxy stops, check() throws, and
// the kernels run into their bounds. A channel's signal writes the next count into its word of the peer's memory, on
// the same stream and so behind the copies before it.
//
// Ordering, from the kernel to the copy: protocol/request_ring.hpp, then the driver's call on the thread that acquired
// the request. From the copy to the peer: the driver orders the write of the word behind the copy, at system scope.
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

  // `arrived[c]`: the word of channel c in the peer's memory as mapped here, which holds the count `told`.
  Proxy(int device, Window from, Window to, std::vector<uint64_t*> arrived, uint64_t told = 0);
  ~Proxy();

  // For kernels: the ring as the device sees it, and the device's own word beside it.
  protocol::RequestRing* ring() const { return static_cast<protocol::RequestRing*>(ring_.device()); }
  uint64_t* head() const { return reinterpret_cast<uint64_t*>(head_.data()); }

  void stop();         // no request is served any more; what was enqueued runs on
  void synchronize();  // until what was enqueued is done
  void check() const;  // throws what went wrong in the thread
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

// What is wrong with a request, in words; empty: nothing.
std::string why_refused(const protocol::Request& request, uint64_t from_bytes, uint64_t to_bytes, size_t channels);

}  // namespace ark

// What kernels exchange with other nodes through (cuda/between.cuh): memory that the NIC reads and writes, counts of
// what has come, and the thread that posts the writes that kernels ask for.
//
// The memory is the GPU's, registered by dma-buf, where driver and NIC offer it (gpu_memory.hpp), else pinned memory of
// the host; each rank has its own choice. Arrivals are signals of windows of Messages, which are counted straight into
// memory that kernels read. A request that names what is not there, and a write that fails, end the thread and are told
// to `fail`; kernels then leave by the group's failure or at their time limit.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "cuda/between.cuh"
#include "cuda/device_memory.hpp"
#include "dma/rdma/gpu_memory.hpp"
#include "dma/rdma/messages.hpp"
#include "dma/request_server.hpp"

namespace ark::rdma {

class GpuWindow {
 public:
  // Alike on all ranks.
  struct Shape {
    uint32_t lanes = 8, slots = 8;
    uint64_t chunk_bytes = 128 << 10;
    // Of so many nodes: with more of them smaller chunks, so that the memory stays below 128 MB as long as it can.
    static Shape of(int nodes);
  };
  struct Setup {
    int gpu = 0;
    GpuPath path;
    Shape shape;
    std::vector<int> ranks;  // by node: whom this rank exchanges with; its own at `node`
    int node = 0;
    int32_t number = 0;                      // of the first of 2 * lanes windows, unused by others
    std::function<void(const Error&)> fail;  // on the thread that posts
  };
  // Where a rank's memory is for its peers.
  struct Remote {
    uint64_t address = 0;
    Keys keys{};
  };

  // Counts arrivals from here on. Throws Error(system) if memory is short or the NIC refuses it.
  GpuWindow(std::shared_ptr<Messages> messages, Setup setup);
  ~GpuWindow();  // no kernel may use it any more; waits a little for what was posted

  Remote own() const { return {reinterpret_cast<uint64_t>(memory_), held_.remote_keys()}; }
  // Of each node's rank; all of them have made their window. Kernels may ask from here on.
  void connect(std::vector<Remote> remotes);

  device::BetweenWindow kernels_view() const;
  const Setup& setup() const { return setup_; }
  const GpuPath& path() const { return setup_.path; }
  uint64_t bytes() const;
  uint64_t requests() const { return server_ ? server_->served() : 0; }

 private:
  // What a request has begun.
  struct Posted {
    Messages::MessagePtr message;
    bool awaited;  // its failure is the group's
  };
  int32_t window(size_t lane, bool credits) const {
    return setup_.number + static_cast<int32_t>(2 * lane + (credits ? 1 : 0));
  }
  void serve(size_t lane, const protocol::Request& request);
  void reap(std::deque<Posted>& posted);
  void reap_all();
  void told(const std::function<void()>& body);

  const std::shared_ptr<Messages> messages_;
  const Setup setup_;
  std::unique_ptr<PinnedMemory> pinned_;  // of the host's path
  DeviceMemory on_gpu_;                   // of the direct path
  char* memory_ = nullptr;
  Held held_;
  DeviceMemory state_;                     // BetweenLane by lane
  std::unique_ptr<PinnedMemory> control_;  // rings, then BetweenHeard
  std::vector<int> others_;
  std::vector<Remote> remotes_;
  std::vector<std::deque<Posted>> posted_;  // by node; only the serving thread uses it while there is one
  std::unique_ptr<RequestServer> server_;
};

}  // namespace ark::rdma

// Keeps what a captured CUDA graph uses alive as long as the graph.
//
// A graph may be replayed after the host objects that launched its work are gone (a dropped compiled function,
// torch._dynamo.reset()). So the graph itself holds what its launches use (cuGraphRetainUserObject). The driver
// releases it once the graph and all its instances are destroyed and no replay runs. Its callback may not use the
// driver or wait for threads that do, so it only queues the objects; release_ended_graphs() frees them.
#pragma once

#include <memory>

#include "cuda/driver.hpp"

namespace ark {

// The current capture of a stream, unique among all captures of the process.
struct Capture {
  uint64_t id = 0;  // 0: none
  CUgraph graph = nullptr;
};
Capture capture_of(CUstream stream);

// Keeps `what` until the graph is gone. Throws Error(system), and keeps nothing, if the driver refuses.
void keep_with_graph(const Capture& capture, std::shared_ptr<const void> what);

// Releases what was kept for graphs that are gone. From any thread, also during captures.
void release_ended_graphs();

}  // namespace ark

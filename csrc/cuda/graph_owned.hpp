// What a captured CUDA graph uses lives as long as the graph.
//
// A graph may be replayed after everything on the host that made its launches is gone: a compiled function that was
// dropped, torch._dynamo.reset(). So the graph itself holds what its launches use (cuGraphRetainUserObject): the driver
// lets go of it when the graph and all that was instantiated from it are destroyed and no replay runs any more. It does
// so by a call that may not use the driver nor wait for threads that do; the call lays what was held aside, and
// release_ended_graphs() gives it back.
#pragma once

#include <memory>

#include "cuda/driver.hpp"

namespace ark {

// The capture that is under way on the stream, told from all others of the process.
struct Capture {
  uint64_t id = 0;  // 0: none
  CUgraph graph = nullptr;
};
Capture capture_of(CUstream stream);

// Holds `what` until the graph is gone. Error(system): the driver refuses, and nothing is held.
void keep_with_graph(const Capture& capture, std::shared_ptr<const void> what);

// Lets go of what was held for graphs that are gone. Any thread, captures or not.
void release_ended_graphs();

}  // namespace ark

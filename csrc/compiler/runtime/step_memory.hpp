// The memory that steps of a loop kernel use: arena, own arenas, scratch, events, and what the host reads of failures.
//
// There is a set for every stream and for every capture: launches on one stream follow each other, launches of others
// may overlap, and a captured graph may run again at any time. A stream's set lives as long as the loop. A capture's is
// the graph's: it lives until the graph is gone, whether the loop is there or not (graph_owned.hpp).
//
// A plan with collectives has one set, whose launches follow each other: the loop's, and that of every graph which
// holds a launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "compiler/schedule/plan.hpp"
#include "cuda/device_memory.hpp"
#include "cuda/loop/launch.cuh"

namespace ark::compiler {

// One allocation: control, events, steps, then what tasks write.
struct StepMemory {
  StepMemory(const Plan& plan, int64_t scratch_bytes, int device);

  loop::Report& host_report() const { return *static_cast<loop::Report*>(report.host()); }

  // Offsets, and sizes of a worker's part.
  const size_t events, steps, own, own_stride, scratch, scratch_stride, arena;
  const DeviceMemory data;
  const PinnedMemory report;
  std::unique_ptr<PinnedMemory> stamps;  // made when asked for
};

class StepMemories {
 public:
  // `plan` outlives this. `one`: a plan with collectives.
  StepMemories(const Plan& plan, int64_t scratch_bytes, int device, bool one);
  ~StepMemories();  // waits for the device

  // For a launch on the stream, captured or not. Error(system): the device has no room.
  std::shared_ptr<StepMemory> of(CUstream stream);
  // What a step has found, if one has. Asks nothing of the driver.
  std::optional<loop::Report> failure() const;
  // The same; then its set begins anew, unless it is the one of a plan with collectives: packets of steps that were
  // counted lie with the peers.
  std::optional<loop::Report> take_failure();
  // New sets from here on. Waits for the device.
  void renew();

 private:
  std::pair<std::shared_ptr<StepMemory>, CUstream> failed() const;

  const Plan& plan_;
  const int64_t scratch_bytes_;
  const int device_;
  const bool one_;
  mutable std::mutex mutex_;                                                 // guards the next
  std::map<std::pair<CUstream, uint64_t>, std::weak_ptr<StepMemory>> sets_;  // by stream and capture; 0: none
  std::vector<std::shared_ptr<StepMemory>> own_;                             // those that are no graph's
};

}  // namespace ark::compiler

// The memory that a loop kernel's steps use: arena, own arenas, scratch, events, and the report of failures.
//
// There is one set per stream and per capture: launches on one stream follow each other, launches on different streams
// may overlap, and a captured graph may run at any time. A stream's set lives as long as the loop, a capture's as long
// as the graph, even beyond the loop (graph_owned.hpp). A plan with collectives has a single set, as its launches
// follow each other. The loop and every graph that holds a launch share it.
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
  std::unique_ptr<PinnedMemory> stamps;  // allocated when needed
};

class StepMemories {
 public:
  // `plan` must outlive this object. `one`: a single set, for a plan with collectives.
  StepMemories(const Plan& plan, int64_t scratch_bytes, int device, bool one);
  ~StepMemories();  // waits for the device

  // The set for a launch on the stream, captured or not. Throws Error(system) if the device has no room.
  std::shared_ptr<StepMemory> of(CUstream stream);
  // The failure that a step reported, if any. Makes no driver calls.
  std::optional<loop::Report> failure() const;
  // The same, and resets the set, unless it is the single set of a plan with collectives: peers hold packets of steps
  // already counted.
  std::optional<loop::Report> take_failure();
  // Uses new sets from here on. Waits for the device.
  void renew();

 private:
  std::pair<std::shared_ptr<StepMemory>, CUstream> failed() const;

  const Plan& plan_;
  const int64_t scratch_bytes_;
  const int device_;
  const bool one_;
  mutable std::mutex mutex_;                                                 // guards the members below
  std::map<std::pair<CUstream, uint64_t>, std::weak_ptr<StepMemory>> sets_;  // by stream and capture; 0: not capturing
  std::vector<std::shared_ptr<StepMemory>> own_;                             // sets that no graph owns
};

}  // namespace ark::compiler

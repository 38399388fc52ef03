// A plan: tasks in static queues, one queue per worker (a CPU thread or an SM), the events that order them, and the
// place of every temporary. Pointers, lengths and other run-time values are read at run time.
//
// The launch boundary orders steps. In multi-step (resident) plans there is none: a worker may start step s + 1 while
// another is in step s, so tasks also wait for events of the step before (Task::carried).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// Who chooses cache policies: the compiler, or one policy for all accesses; `none`: plain loads and stores.
enum class CacheChoice : uint8_t { automatic, none, all_first, all_last };

// The machine's properties that cache policies depend on.
struct CacheCosts {
  int64_t bytes = 0;       // of the cache that all workers share; 0: unknown
  int64_t kept_bytes = 0;  // parameter bytes that pay to keep across steps with evict_last; 0: none
  // In a step that fits into the cache, plain loads of parameters are faster than evict_first.
  bool plain_where_near = false;
  bool states_first = false;  // evict_first pays for non-parameters read once per step
  bool reused_last = false;   // evict_last pays for data read again soon while parameters stream
  // CPU: persistent buffers at least this large are stored past the caches; 0: none. Results are newly allocated and
  // stay plain. Figures: docs/measurements.md.
  int64_t stream_bytes = 0;
  int64_t worker_bytes = 0;  // CPU: of the second-level cache, which each worker has for itself; 0: unknown
};

// What products of many rows cost, which a GPU multiplies tile by tile (matmul_tile.hpp). Figures of an H200.
struct TileCosts {
  double half_flops_per_us = 5.5e6;  // of one worker's multiplications: 16-bit types
  double float_flops_per_us = 3e5;
  double float8_flops_per_us = 8e6;  // assumed, not measured
  double bytes_per_us = 7.4e4;       // operands that one worker brings to its tiles
  double all_bytes_per_us = 8e6;     // that all workers bring together, from the second-level cache
  double start_us = 2.3;             // filling the ring and a wait
  double element_us = 4e-5;          // storing an element
  double finished_us = 6e-5;         // additional per element with an epilogue (an activation)
};

// The machine a plan is made for.
struct Target {
  std::string name = "cpu";  // "cpu", "sm_80", "sm_90a"
  int workers = 1;
  int64_t page_bytes = 16384;
  int pages = 10;                    // in each worker's ring
  int in_flight = 2;                 // pages prefetched ahead of the tasks that read them
  bool packets = false;              // small results travel as {value, epoch} packets instead of data and a counter
  bool packets_of_rows = false;      // only those that kernels write and poll: results of products of few rows
  double flops_per_us = 2e4;         // per worker, in products
  double pointwise_per_us = 2e4;     // the same in pointwise operators, reductions and all else
  double bytes_per_us = 5e3;         // per worker with all of them busy: parameters, caches, inputs
  double cached_bytes_per_us = 2e4;  // per worker: temporaries
  double task_us = 0.2;              // overhead per task
  double wait_us = 0.5;              // from a signal to the end of the wait on another worker
  std::string costs = "assumed";     // for reports: where these figures come from
  TileCosts tiles = {};
  CacheCosts caches = {};
  CacheChoice caching = CacheChoice::automatic;
};

struct Task {
  int stage = -1;
  int64_t begin = 0, end = 0;  // of the stage's tile axis
  int worker = 0;
  bool replica = false;      // a copy of a replicated stage: its results are the worker's own
  int head = -1;             // the preceding task in the queue, if both run as one; see prologue_fusion.hpp
  std::vector<int> waits;    // events
  std::vector<int> carried;  // events of the step before; only in multi-step plans
  std::vector<int> signals;  // events
  double cost_us = 0;        // estimated
};

// Events only grow: a step raises each one `threshold` times, and step s (from 1) waits for s * threshold, for a
// carried event (s - 1) * threshold. Waits that an earlier wait or the worker's own order covers are dropped.
//
// Packets are small results that cross workers and carry their own signal: waiting for their event means polling the
// data, and implies nothing else. One stage writes such a buffer and no other buffer shares its bytes, so the epoch
// alone tells the step. Multi-step plans have none, since overwriting packets must wait for all readers, which takes
// counters.
struct Event {
  int threshold = 0;     // signals per step
  bool packets = false;  // the data itself carries the signal
};

// A part of a parameter that a task will read, at most a page: `rows` runs of `bytes`, `stride` bytes apart. A GPU's
// worker prefetches ahead of its tasks, with a bound on pages in flight; a CPU's worker does so while it waits.
struct Load {
  int task = -1;
  int value = -1;
  int64_t offset = 0, bytes = 0;  // offset in the value's buffer
  int64_t rows = 1, stride = 0;
};

struct Queue {
  std::vector<int> tasks;
  std::vector<Load> loads;
};

// The place of a temporary: `offset` in the arena, or in every worker's own one.
struct Placement {
  int64_t offset = -1;   // -1: not a temporary, or one that no stage touches
  bool own = false;      // one copy per worker (replicated stages)
  bool packets = false;  // {value, epoch} packets: twice the bytes, not shared with other buffers within the step
  Push pushed = {};      // packets of all ranks, in the memory that ranks share: no place in the arena
};

struct Plan {
  Target target;
  Graph graph;
  std::vector<Stage> stages;
  std::vector<Task> tasks;  // in a valid execution order
  std::vector<Event> events;
  std::vector<Queue> queues;
  std::vector<std::vector<Load>> prefetches;  // by queue: the loads that its worker prefetches; empty: the queue's own
                                              // (a CPU's)
  std::vector<Placement> placements;          // by buffer
  bool multi_step = false;                    // one launch runs many steps
  int64_t arena_bytes = 0;
  int64_t own_bytes = 0;         // per worker
  int64_t eager_peak_bytes = 0;  // with one buffer per result, freed after its last use
  double estimated_us = 0;
};

}  // namespace ark::compiler

// A plan: tasks in static queues, one queue a worker (a thread on the CPU, an SM on a GPU), events that order them,
// and where every temporary lies. Everything that depends on the run (pointers, lengths) is read at run time.
//
// Events only grow: a step bumps each `threshold` times, and step s (from 1) waits for s * threshold. A wait that is
// already covered (by an earlier wait or by order on the same worker) is dropped.
//
// Packets (small results that cross workers, where the target has them) carry their own signal: an event of packets
// stands for polling the data, and brings its waiter these results and nothing else. A buffer of packets is written by
// one stage and shares bytes with nobody, so that the epoch alone says which step a word is of. Multi-step plans have
// none yet: a step's packets may only be overwritten when all of their readers have read, which takes counters.
//
// Between two steps the launch boundary orders everything. Where there is none (resident mode: `multi_step`) a worker
// may start step s + 1 while another is still in step s: a task's `carried` events are waited for with (s - 1) *
// threshold.
//
// The loader: what no dependency guards (parameters) is known before the first task; `loads` lists it in the order of
// the queue, in pages of the ring. On a GPU one warp walks that list ahead of the tasks with at most `in_flight` pages
// not yet landed; on the CPU a worker that waits fetches the next pages into its cache.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// Who chooses what caches do with each access: the compiler, or one policy for all; `none`: plain loads and stores.
enum class CacheChoice : uint8_t { automatic, none, all_first, all_last };

// What of a machine cache policies hang on.
struct CacheCosts {
  int64_t bytes = 0;       // of the cache that all workers share; 0: not known
  int64_t kept_bytes = 0;  // of parameters, that evict_last brings over from one step to the next to any gain; 0: none
  // Steps that fit into the cache are faster with plain loads of parameters than where these make way first.
  bool plain_where_near = false;
  bool states_first = false;  // what is read once a step, beside parameters, makes way first to a gain
  bool reused_last = false;   // what is read again soon stays longest to a gain, while parameters stream
  // On a CPU what lasts from call to call and is that large is stored past the caches; 0: nothing is. From 8 to 256 MB
  // that was 1.05 to 1.5 times as fast (AMD EPYC, two cores, 32 MB of cache); results, which are allocated anew, were
  // 5 to 10% slower, and stay plain.
  int64_t stream_bytes = 0;
};

// What a plan is made for.
struct Target {
  std::string name = "cpu";  // "cpu", "sm_80", "sm_90a"
  int workers = 1;
  int64_t page_bytes = 16384;
  int pages = 10;                    // in the ring of each worker
  int in_flight = 2;                 // pages asked for ahead of the tasks that read them
  bool packets = false;              // small results travel as {value, epoch} packets instead of data and a counter
  bool packets_of_rows = false;      // of these only what kernels write and poll: results of products of few rows
  double flops_per_us = 2e4;         // of one worker, in products
  double pointwise_per_us = 2e4;     // the same in pointwise operators, reductions and what else there is
  double bytes_per_us = 5e3;         // of one worker, all of them at work: parameters, caches, inputs
  double cached_bytes_per_us = 2e4;  // of one worker: temporaries
  double task_us = 0.2;              // what a task costs beside its work
  double wait_us = 0.5;              // from a signal to the end of the wait on another worker
  std::string costs = "assumed";     // for people: where these figures come from
  CacheCosts caches = {};
  CacheChoice caching = CacheChoice::automatic;
};

struct Task {
  int stage = -1;
  int64_t begin = 0, end = 0;  // of the stage's tile axis
  int worker = 0;
  bool replica = false;      // one of the copies of a replicated stage: its results are the worker's own
  int head = -1;             // the task before it in its queue, where one run does both; see prologue_fusion.hpp
  std::vector<int> waits;    // events
  std::vector<int> carried;  // events of the step before; only in multi-step plans
  std::vector<int> signals;  // events
  double cost_us = 0;        // estimated
};

struct Event {
  int threshold = 0;     // signals a step
  bool packets = false;  // carried by the data itself
};

// A part of a parameter that a task will read, at most a page: `rows` pieces of `bytes`, `stride` bytes apart.
struct Load {
  int task = -1;
  int value = -1;
  int64_t offset = 0, bytes = 0;  // of the value's buffer
  int64_t rows = 1, stride = 0;
};

struct Queue {
  std::vector<int> tasks;
  std::vector<Load> loads;
};

// Where a temporary lies: at `offset` of the arena, or of every worker's own one.
struct Placement {
  int64_t offset = -1;   // -1: not a temporary, or one that no stage touches
  bool own = false;      // one copy a worker (replicated stages)
  bool packets = false;  // {value, epoch} packets: twice the bytes, shared with no other buffer in the step
  Push pushed = {};      // packets of all ranks, in the memory that they share: no place in the arena
};

struct Plan {
  Target target;
  Graph graph;
  std::vector<Stage> stages;
  std::vector<Task> tasks;  // in an order that is valid to execute
  std::vector<Event> events;
  std::vector<Queue> queues;
  std::vector<std::vector<Load>> prefetches;  // by queue: the loads that its worker asks for; empty: its own (a CPU's)
  std::vector<Placement> placements;          // by buffer
  bool multi_step = false;                    // one launch runs many steps
  int64_t arena_bytes = 0;
  int64_t own_bytes = 0;         // of each worker
  int64_t eager_peak_bytes = 0;  // what one buffer a result, freed after its last use, would take
  double estimated_us = 0;
};

}  // namespace ark::compiler

// The parts of a launch of the loop kernel: what the host fills in (Launch) and reads back (Report), and the tables of
// the generated source.
//
// Host and device include this file. Everything of a run except the caller's pointers is on the device (events, each
// worker's count of steps), so a captured launch can be replayed without the host.
#pragma once

#include "cuda/between_window.cuh"
#include "protocol/base.hpp"

#include "cuda/loop/group.cuh"

namespace ark::device {
struct GroupStatus;
}

namespace ark::loop {

inline constexpr int kEventStride = 32;  // words: one 128-byte cache line per event

enum class Failure : uint32 {
  none,
  deadline,         // a wait took too long: `task`, `event`, `worker`
  index_too_large,  // an index out of range: `stage`, `value`, `limit`, `dimension`
  peer,             // a collective gave up waiting for the part of rank `value`: `worker`, `task`, `stage`
};

// Why a launch ended early, in host memory that the device can write. The first thread to fail takes `claimed`, fills
// in the rest and releases `failure`.
struct alignas(64) Report {
  uint32 claimed;
  uint32 failure;
  int worker, task, stage, event, dimension;
  uint32 stop;  // set by the host: stop a launch of many steps
  long long value, limit;
  uint32 steps;  // steps that such a launch has done
};

// Per launch, in device memory. Initially zero.
struct alignas(128) Control {
  uint32 abort;  // all workers leave once it is not 0
  uint32 last;   // in a launch of many steps: the step after which the host stops it
};

// When a worker reached a task, began it (after its waits) and ended it, by %globaltimer.
struct Stamp {
  unsigned long long came_ns, begin_ns, end_ns;
};

// The tables of the generated source are copied 8 or 16 bytes at a time (lookahead.cuh) and aligned accordingly.

// The address of an operand.
struct alignas(16) Operand {
  enum Base : uint16 { pointer, arena, own, packets };  // packets: what peers send to this rank
  uint16 base;
  uint16 aligned;    // the task's function has a variant for an operand that is not 16-byte aligned
  uint32 index;      // among the launch's pointers
  long long offset;  // in bytes
};

struct alignas(8) WaitFor {
  int event;
  uint32 threshold;
};

struct alignas(16) TaskEntry {
  long long begin, end;
  int function, task, stage;
  int operands, operand_count;  // index of the first one in the table, and their number
  int waits, wait_count;        // the same
  int signals, signal_count;
  int loads, load_count;  // issued when the task starts
  int padding = 0;        // named, so that the host writes every byte
};
static_assert(sizeof(TaskEntry) == 64);

// A prefetch for a later task: `rows` runs of `bytes`, `stride` apart.
struct LoadEntry {
  Operand operand;
  long long rows, bytes, stride;
  long long cache;  // a value of Cache
};
static_assert(sizeof(Operand) == 16 && sizeof(LoadEntry) == 48 && sizeof(WaitFor) == 8);

inline constexpr int kMostRanks = 8;   // that exchange packets
inline constexpr int kMostNodes = 16;  // of a group with several

// The participants in the plan's collectives (collective.cuh, between.cuh); zero in a plan without any. In a group over
// several nodes `packets` and `rank` are of the node's ranks, by their places.
struct Ranks {
  char* packets[kMostRanks];  // packet memory of each rank, as mapped here
  device::GroupStatus* status;
  unsigned long long limit_ns;  // per wait on a peer
  int rank;
  int names[kMostRanks];         // the ranks of `packets` in the group
  device::BetweenWindow window;  // zero in a group that is on one node
  int outside[kMostNodes];       // by node: the rank there that this one exchanges with
};

// The head of every launch; the caller's pointers follow in the kernel's parameter.
struct LaunchHead {
  char* arena;
  char* own;  // worker w's part is at own + w * own_stride
  long long own_stride;
  char* scratch;  // the same
  long long scratch_stride;
  uint32* events;  // kEventStride words each
  uint32* steps;   // by worker, kEventStride words each: number of steps done
  Control* control;
  Report* report;
  Stamp* stamps;                  // by task; nullptr: none
  unsigned long long timeout_ns;  // per wait; 0: no limit
  uint32 most;                    // steps in this launch
  Ranks ranks;
};

template <int kPointers>
struct Launch {
  LaunchHead head;
  char* pointers[kPointers];  // inputs, then outputs
};

}  // namespace ark::loop

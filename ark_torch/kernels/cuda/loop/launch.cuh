// What a launch of the loop kernel is made of: what the host fills in (Launch) and reads back (Report), and the tables
// of the generated source.
//
// Host and device include this file. Everything of a run that is not a pointer of the caller lives on the device
// (events, how many steps each worker has done), so a captured launch can be replayed without the host.
#pragma once

#include "protocol/base.hpp"

#include "cuda/loop/group.cuh"

namespace ark::device {
struct GroupStatus;
}

namespace ark::loop {

inline constexpr int kEventStride = 32;  // words: a cache line of 128 bytes for each event

enum class Failure : uint32 {
  none,
  deadline,         // a wait took too long: `task`, `event`, `worker`
  index_too_large,  // an index out of range: `stage`, `value`, `limit`, `dimension`
  peer,             // a collective was left without the part of rank `value`: `worker`, `task`, `stage`
};

// Why a launch ended early, in host memory that the device can write. `claimed` is taken by the first to fail, who
// fills in the rest and releases `failure`.
struct alignas(64) Report {
  uint32 claimed;
  uint32 failure;
  int worker, task, stage, event, dimension;
  uint32 stop;  // the host's: no step follows; of a launch of many steps
  long long value, limit;
  uint32 steps;  // that such a launch has done
};

// Of a launch, in device memory. Zero at first.
struct alignas(128) Control {
  uint32 abort;  // everybody leaves as soon as it is not 0
  uint32 last;   // of a launch of many steps: the one that the host stopped it at
};

// When a worker came to a task, began it (after its waits) and ended it; of %globaltimer.
struct Stamp {
  unsigned long long came_ns, begin_ns, end_ns;
};

// The tables of the generated source are copied 8 or 16 bytes at a time (lookahead.cuh), and aligned for it.

// Where an operand lies.
struct alignas(16) Operand {
  enum Base : uint16 { pointer, arena, own, packets };  // packets: what peers send to this rank
  uint16 base;
  uint16 aligned;    // the task's function has another text for where it does not begin at a multiple of 16 bytes
  uint32 index;      // of the launch's pointers
  long long offset;  // in bytes
};

struct alignas(8) WaitFor {
  int event;
  uint32 threshold;
};

struct alignas(16) TaskEntry {
  long long begin, end;
  int function, task, stage;
  int operands, operand_count;  // first of them in the table, and how many
  int waits, wait_count;        // likewise
  int signals, signal_count;
  int loads, load_count;  // asked for when the task's turn comes
};
static_assert(sizeof(TaskEntry) == 64);

// Of a parameter that a task to come reads: `rows` pieces of `bytes`, `stride` apart.
struct LoadEntry {
  Operand operand;
  long long rows, bytes, stride;
  long long cache;  // of Cache
};
static_assert(sizeof(Operand) == 16 && sizeof(LoadEntry) == 48 && sizeof(WaitFor) == 8);

inline constexpr int kMostRanks = 8;

// Who takes part in the plan's collectives (collective.cuh); of a plan without any: zero.
struct Ranks {
  char* packets[kMostRanks];  // what is sent to each rank, as mapped here
  device::GroupStatus* status;
  unsigned long long limit_ns;  // for each wait on a peer
  int rank;
};

// Of every launch; the caller's pointers follow in the kernel's parameter.
struct LaunchHead {
  char* arena;
  char* own;  // worker w's begins at own + w * own_stride
  long long own_stride;
  char* scratch;  // likewise
  long long scratch_stride;
  uint32* events;  // kEventStride words each
  uint32* steps;   // by worker, kEventStride words each: how many steps it has done
  Control* control;
  Report* report;
  Stamp* stamps;                  // by task; nullptr: not asked for
  unsigned long long timeout_ns;  // for each wait; 0: none
  uint32 most;                    // steps of this launch
  Ranks ranks;
};

template <int kPointers>
struct Launch {
  LaunchHead head;
  char* pointers[kPointers];  // inputs, then outputs
};

}  // namespace ark::loop

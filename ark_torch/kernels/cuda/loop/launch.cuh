// What a launch of the loop kernel is made of: what the host fills in (Launch) and reads back (Report), the tables of
// the generated source, and what a task's function may call: an error, where an operand lies.
//
// Host and device include this file. Everything of a run that is not a pointer of the caller lives on the device
// (events, how many steps each worker has done), so a captured launch can be replayed without the host.
#pragma once

#include "protocol/base.hpp"

#include "cuda/loop/group.cuh"
#if defined(__CUDACC__)
#include "protocol/atomics.hpp"
#endif

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
  long long rows, bytes, stride, spare;
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

#if defined(__CUDACC__)

ARK_LOOP unsigned long long now_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// What a worker's tasks need beside their operands, in shared memory: read from the kernel's parameter, or from where
// the compiler keeps the tables' addresses, each would wait for the constant cache, which code passes through.
struct Worker {
  const LaunchHead* head;
  char* scratch;  // in device memory
  int* leave;     // not 0 when the launch ends early
  bool* stop;     // no step follows
  Stamp* stamps;
  uint32* events;
  const WaitFor* waits;
  const int* signals;
  const LoadEntry* loads;
  const TaskEntry* task;   // where packets are polled, for reports
  const TaskEntry* tasks;  // its queue
  int task_count;
  int number;
  uint32 before;  // steps before this launch
  uint32 step;
  uint32 looked;  // when a thread last looked at what the host writes
  int rank;       // and what is below: of plans that push sums over ranks (pushed.cuh)
  char* packets[kMostRanks];
};
ARK_LOOP Worker& worker() {
  __shared__ Worker now;
  return now;
}
// Loads and stores that the compiler does where they stand: what is read before a task's function and behind it is in
// no register meanwhile.
template <class T>
ARK_LOOP T read_now(const T& of) {
  return *const_cast<const volatile T*>(&of);
}
template <class T>
ARK_LOOP void write_now(T& to, T x) {
  *const_cast<volatile T*>(&to) = x;
}

// Of a task's function: the task, by where it lies in shared memory.
struct Context {
  uint32 at;
  ARK_LOOP const TaskEntry& task() const { return *in_shared<const TaskEntry>(at); }
  ARK_LOOP int64_t past() const { return read_now(task().end); }  // where the tile ends
};

// Where what operands refer to begins, in shared memory: read from the kernel's parameter, each would wait for the
// constant cache, which weights' pointers pass through once a step.
template <int kPointers>
struct Bases {
  char* at[Operand::packets + kPointers];  // the arena, own, packets; then the launch's pointers

  // By all threads.
  ARK_LOOP void fill(const Launch<kPointers>& launch, int worker) {
    const LaunchHead& head = launch.head;
    if (thread() == 0) {
      at[Operand::arena - 1] = head.arena;
      at[Operand::own - 1] = head.own + worker * head.own_stride;
      at[Operand::packets - 1] = head.ranks.packets[head.ranks.rank];
    }
    for (int i = thread(); i < kPointers; i += kThreads) at[Operand::packets + i] = launch.pointers[i];
  }
};

ARK_LOOP char* address_of(char* const* bases, const Operand& one) {
  return bases[one.base == Operand::pointer ? Operand::packets + one.index : one.base - 1] + one.offset;
}

// Where the operands of a task lie, all in global memory; itself in shared memory.
struct Operands {
  uint32 at;
  ARK_LOOP char* operator[](int i) const {
    char* const one = in_shared<char* const>(at)[i];
    __builtin_assume(__isGlobal(one));
    return one;
  }
};

// One of them that is asked for where it is used: no register holds it until then.
template <class T>
struct Later {
  Operands operands;
  int number;
  int64_t offset;  // in elements
  ARK_LOOP Later operator+(int64_t more) const { return {operands, number, offset + more}; }
  ARK_LOOP T* now() const { return in_global<T>(read_now(in_shared<char* const>(operands.at)[number])) + offset; }
};
template <class T>
ARK_LOOP Later<T> later(Operands operands, int number) {
  return {operands, number, 0};
}
template <class T>
ARK_LOOP T* now(T* at) {
  return at;
}
template <class T>
ARK_LOOP T* now(const Later<T>& one) {
  return one.now();
}
// What lies there, whichever of the two says where.
template <class At>
struct Pointee;
template <class T>
struct Pointee<T*> {
  using Type = T;
};
template <class T>
struct Pointee<const T*> {
  using Type = T;
};
template <class T>
struct Pointee<Later<T>> : Pointee<T*> {};

// Whether a thread that waits is the one of its block to look at what the host writes: one every 16 us. A look crosses
// the host's bus. With those of all threads of all blocks a step took 29 ms instead of 0.6 from a first long wait on:
// they keep the bus for as long as it takes the other ranks' threads to come and look, too.
ARK_LOOP bool is_to_look() {
  uint32* const looked = &worker().looked;
  const uint32 now = static_cast<uint32>(now_ns() >> 14), before = *const_cast<volatile uint32*>(looked);
  return now != before && atomicCAS(looked, before, now) == before;
}

ARK_LOOP bool aborted(const LaunchHead& head) {
  return *const_cast<const volatile uint32*>(&head.control->abort) != 0;
}

// Tells the host why this launch ends early, unless somebody else has, and makes all workers leave. By any thread.
static __device__ __noinline__ void report(const LaunchHead& head, Failure failure, int worker, int task, int stage,
                                           int event, int64_t value, int64_t limit, int dimension) {
  Report& report = *head.report;
  if (atomicCAS_system(&report.claimed, 0u, static_cast<uint32>(worker) + 1) == 0) {
    report.worker = worker;
    report.task = task;
    report.stage = stage;
    report.event = event;
    report.dimension = dimension;
    report.value = value;
    report.limit = limit;
    protocol::store_release(report.failure, static_cast<uint32>(failure));
    __threadfence_system();
  } else {
    // Whoever was first has its report out before anybody ends the context.
    const unsigned long long began = now_ns();
    while (protocol::load_acquire(report.failure) == 0 && now_ns() - began < 10'000'000) {
    }
  }
  *const_cast<volatile uint32*>(&head.control->abort) = 1;
}

// The same where nothing that was computed may be used.
static __device__ __noinline__ void fail(const LaunchHead& head, Failure failure, int worker, int task, int stage,
                                         int event, int64_t value, int64_t limit, int dimension) {
  report(head, failure, worker, task, stage, event, value, limit, dimension);
  // Ends the context as a failed assertion of an eager kernel does: results that were never computed must not be taken
  // for some. Beside a call of a function that it does not know the assembler lets groups of warps multiply one
  // instruction after the other (tile_group.cuh): kernels where they do end by a trap.
#if defined(ARK_LOOP_TRAPS)
  asm volatile("trap;");
#else
  __assertfail(
      "an index is out of range, a condition does not hold, or a wait took too long; the next call of the region says "
      "which",
      "a region compiled by ark_torch", static_cast<unsigned>(stage), "", 1);
#endif
}

// Of the task whose function calls it.
static __device__ __noinline__ void refuse(Context context, int64_t value, int64_t limit, int dimension) {
  const Worker& here = worker();
  const TaskEntry& task = context.task();
  *const_cast<volatile int*>(here.leave) = 1;
  fail(*here.head, Failure::index_too_large, here.number, task.task, task.stage, -1, value, limit, dimension);
}

// True when the index may be used for that dimension of a table. `given` is what the user wrote for it.
ARK_LOOP bool index_fits(const Context& context, int64_t index, int64_t limit, int64_t given, int dimension) {
  if (static_cast<uint64>(index) < static_cast<uint64>(limit)) return true;
  refuse(context, given, limit, dimension);
  return false;
}
ARK_LOOP bool index_fits(const Context& context, int64_t index, int64_t limit) {
  return index_fits(context, index, limit, index, 0);
}

#endif

}  // namespace ark::loop

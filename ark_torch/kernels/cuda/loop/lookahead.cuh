// Brings a worker's next tasks to shared memory ahead of their turn. Each step reads each table entry of the plan once,
// after weights have evicted it from the second-level cache, and one entry leads to the next.
//
// The last warps work ahead on three tasks at once: they copy the entry of the task three places ahead, copy what the
// entry two places ahead refers to, and compute the operands' addresses of the next one. Each warp has one of these
// errands, so the block waits only for the longest. They start before a task (ahead()) and finish at its end (landed(),
// before the sync() that publishes the copies). What does not fit into a slot is read from the tables, one entry after
// the other while the block waits: some 3 us a task, so slots have room for what models' tasks have.
#pragma once

#include "cuda/loop/task.cuh"

namespace ark::loop {

inline constexpr int kMostOperands = 64;  // per task
inline constexpr int kEntries = 8;        // kept at once; five are needed, and eight avoid a division
inline constexpr int kSlotOperands = 24, kSlotWaits = 24, kSlotSignals = 8, kSlotLoads = 16;
static_assert(kSlotOperands <= 32);  // a lane for each (resolve())

ARK_LOOP constexpr bool fits_slot(const TaskEntry& task) {
  return task.operand_count <= kSlotOperands && task.wait_count <= kSlotWaits && task.signal_count <= kSlotSignals &&
         task.load_count <= kSlotLoads;
}

#if defined(__CUDACC__)

struct TaskSlot {
  Operand operands[kSlotOperands];
  LoadEntry loads[kSlotLoads];
  WaitFor waits[kSlotWaits];
  int signals[kSlotSignals];
};

struct Lookahead {
  TaskEntry entries[kEntries];
  TaskSlot slots[4];  // the previous task's slot is still read (its signals) while one is written
  char* addresses[2][kSlotOperands];
  bool aligned[2];            // all operands that should be
  char* many[kMostOperands];  // for a task whose operands do not fit
};

// `count` of them, by the lanes of a warp, kBytes (4, 8, 16) at a time.
template <int kBytes, class T>
ARK_LOOP void copy_ahead(int lane, T* to, const T* from, int count) {
  static_assert(sizeof(T) % kBytes == 0 && alignof(T) % kBytes == 0);
  constexpr int kParts = static_cast<int>(sizeof(T)) / kBytes;
  ARK_ROLLED for (int i = lane; i < count * kParts; i += 32) {
    const uint32 at = static_cast<uint32>(__cvta_generic_to_shared(reinterpret_cast<char*>(to) + i * kBytes));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at),
                 "l"(reinterpret_cast<const char*>(from) + i * kBytes), "n"(kBytes)
                 : "memory");
  }
}

// An operand that should be aligned and is not.
ARK_LOOP bool is_misaligned(const Operand& one, const char* at) {
  return one.aligned != 0 && (reinterpret_cast<uint64>(at) & 15) != 0;
}

template <class Plan>
struct Prefetcher {
  Lookahead& to;
  char* const* bases;
  int self, count;  // the thread's number; the number of tasks in the queue

  // This warp's errand: 0 for the last warp. Warps with kErrands or more have none.
  static constexpr int kErrands = 5;
  ARK_LOOP int errand() const { return kWarps - 1 - self / 32; }
  ARK_LOOP int lane() const { return self % 32; }

  ARK_LOOP void entry(int position) const {
    if (position < count) copy_ahead<16>(lane(), &to.entries[position % kEntries], worker().tasks + position, 1);
  }
  ARK_LOOP void operands_of(int position) const {
    const TaskEntry& task = to.entries[position % kEntries];
    if (position < count)
      copy_ahead<16>(lane(), to.slots[position % 4].operands, Plan::operands() + task.operands,
                     least(task.operand_count, kSlotOperands));
  }
  ARK_LOOP void loads_of(int position) const {
    const TaskEntry& task = to.entries[position % kEntries];
    if (position < count)
      copy_ahead<16>(lane(), to.slots[position % 4].loads, Plan::loads() + task.loads,
                     least(task.load_count, kSlotLoads));
  }
  ARK_LOOP void events_of(int position) const {
    const TaskEntry& task = to.entries[position % kEntries];
    if (position >= count) return;
    copy_ahead<8>(lane(), to.slots[position % 4].waits, Plan::waits() + task.waits, least(task.wait_count, kSlotWaits));
    copy_ahead<4>(lane(), to.slots[position % 4].signals, Plan::signals() + task.signals,
                  least(task.signal_count, kSlotSignals));
  }
  ARK_LOOP void resolve(int position) const {
    if (position >= count) return;
    bool misaligned = false;
    if (lane() < least(to.entries[position % kEntries].operand_count, kSlotOperands)) {
      const Operand& one = to.slots[position % 4].operands[lane()];
      char* const at = address_of(bases, one);
      to.addresses[position % 2][lane()] = at;
      misaligned = is_misaligned(one, at);
    }
    const bool aligned = __any_sync(~0u, misaligned) == 0;
    if (lane() == 0) to.aligned[position % 2] = aligned;
  }
  // Called by all threads, before the first task.
  ARK_LOOP void begin() const {
    const int mine = errand();
    if (mine == 0) ARK_ROLLED for (int position = 0; position < 3; ++position) entry(position);
    landed();
    sync();
    ARK_ROLLED for (int position = 0; position < 2; ++position) {
      if (mine == 0) operands_of(position);
      if (mine == 1) loads_of(position);
      if (mine == 2) events_of(position);
    }
    landed();
    sync();
    if (mine == 0) resolve(0);
    sync();
  }
  // Called while the task at `position` waits and runs.
  ARK_LOOP void ahead(int position) const {
    const int mine = errand();
    if (mine >= kErrands) return;
    if (mine == 0) entry(position + 3);
    if (mine == 1) operands_of(position + 2);
    if (mine == 2) loads_of(position + 2);
    if (mine == 3) events_of(position + 2);
    if (mine == 4) resolve(position + 1);
  }
  static ARK_LOOP void landed() { asm volatile("cp.async.wait_all;" ::: "memory"); }
  // The operands' addresses of the task at `position`, and whether they are aligned as needed. Called by all threads,
  // after a sync().
  struct Found {
    Operands operands;
    bool aligned;
  };
  ARK_LOOP Found operands(int position) const {
    const TaskEntry& task = to.entries[position % kEntries];
    if (task.operand_count <= kSlotOperands)
      return {{shared_address(to.addresses[position % 2])}, to.aligned[position % 2]};
    bool misaligned = false;
    for (int i = self; i < task.operand_count; i += kThreads) {
      const Operand& one = Plan::operands()[task.operands + i];
      to.many[i] = address_of(bases, one);
      misaligned = misaligned || is_misaligned(one, to.many[i]);
    }
    return {{shared_address(to.many)}, !sync_any(misaligned)};
  }
};

// The address of a task's `count` items: in its slot if they fit.
template <class T>
ARK_LOOP const T* in_slot(const T* slot, int fitting, const T* table, int first, int count) {
  return count <= fitting ? slot : table + first;
}

#endif

}  // namespace ark::loop

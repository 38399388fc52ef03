// What a task's function is given: which task it is, where its operands lie, and the worker that runs it. All of it is
// in shared memory, and asked for where it is used, so that no register holds it through the function.
#pragma once

#include "cuda/loop/launch.cuh"

#if defined(__CUDACC__)

namespace ark::loop {

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

}  // namespace ark::loop

#endif

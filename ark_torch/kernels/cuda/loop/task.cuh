// What a task's function receives: the task, the addresses of its operands, and the worker that runs it. All of it is
// in shared memory and loaded where it is used, so that no register holds it throughout the function.
#pragma once

#include "cuda/loop/launch.cuh"

#if defined(__CUDACC__)

namespace ark::loop {

// What a worker's tasks need besides their operands. It is in shared memory because reads of the kernel's parameter, or
// of the tables' addresses, would wait for the constant cache, which instructions evict.
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
  const TaskEntry* task;   // for reports, while packets are polled
  const TaskEntry* tasks;  // its queue
  int task_count;
  int number;
  uint32 before;  // steps before this launch
  uint32 step;
  uint32 looked;  // when a thread last polled host memory
  int rank;       // this and the next: for plans that push sums over ranks (pushed.cuh)
  char* packets[kMostRanks];
};
ARK_LOOP Worker& worker() {
  __shared__ Worker now;
  return now;
}
// Loads and stores that the compiler may not move: no register keeps a value across a task's function.
template <class T>
ARK_LOOP T read_now(const T& of) {
  return *const_cast<const volatile T*>(&of);
}
template <class T>
ARK_LOOP void write_now(T& to, T x) {
  *const_cast<volatile T*>(&to) = x;
}

// For a task's function: the task, by its address in shared memory.
struct Context {
  uint32 at;
  ARK_LOOP const TaskEntry& task() const { return *in_shared<const TaskEntry>(at); }
  ARK_LOOP int64_t past() const { return read_now(task().end); }  // the end of the tile
};

// The base addresses that operands refer to. They are in shared memory because reads of the kernel's parameter would
// wait for the constant cache, through which the weights' pointers pass once per step.
template <int kPointers>
struct Bases {
  char* at[Operand::packets + kPointers];  // the arena, own, packets; then the launch's pointers

  // Called by all threads.
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

// The addresses of a task's operands, all in global memory; the list itself is in shared memory.
struct Operands {
  uint32 at;
  ARK_LOOP char* operator[](int i) const {
    char* const one = in_shared<char* const>(at)[i];
    __builtin_assume(__isGlobal(one));
    return one;
  }
};

// An operand whose address is loaded where it is used: no register holds it until then.
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
// The element type behind a pointer or a Later.
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

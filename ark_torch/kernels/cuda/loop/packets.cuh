// Packets: elements that carry their own signal, so that who needs them polls the data itself. No release, no counter
// and no second trip behind it lie between a store and its use on another SM.
//
// An element and the step's number, as far as it fits, are one word of 32 or 64 bits, written and read as one (a vector
// load is several such reads): whoever sees the number of this step sees its element. Nothing else is ordered by it,
// which is what the plan's validator reckons with. Every word is written once in every step, and nothing but packets
// ever lies there, so a word that is not of this step is of the one before, or zero, which is what memory is at first
// and after a failure; steps count from 1. Who overwrites a packet is of the next step, and that is another launch.
#pragma once

#include "cuda/loop/lanes.cuh"
#include "cuda/loop/runs.cuh"

namespace ark::loop {

#if defined(__CUDACC__)

template <class T>
struct EpochBeside {
  using Type = uint16;
};
template <>
struct EpochBeside<float> {
  using Type = uint32;
};
template <class T>
struct alignas(2 * sizeof(T)) Packet {
  using Epoch = typename EpochBeside<T>::Type;
  T value;
  Epoch epoch;
  static ARK_LOOP Epoch now() { return static_cast<Epoch>(worker().step); }
};

// 4, 8 or 16 bytes, in which each packet is read as one.
template <class Elements>
ARK_LOOP Elements load_packets(const void* from) {
  struct alignas(sizeof(Elements)) Words {
    uint32 at[sizeof(Elements) / 4];
  } words;
  if constexpr (sizeof(Elements) == 16) {
    uint64 low, high;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
    words = {static_cast<uint32>(low), static_cast<uint32>(low >> 32), static_cast<uint32>(high),
             static_cast<uint32>(high >> 32)};
  } else if constexpr (sizeof(Elements) == 8) {
    uint64 both;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
    words = {static_cast<uint32>(both), static_cast<uint32>(both >> 32)};
  } else {
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(words.at[0]) : "l"(from) : "memory");
  }
  return bits_as<Elements>(words);
}

// Whether a poll goes on that began then (0: has just begun); the launch ends early if not. By each thread alone.
static __device__ __noinline__ unsigned long long poll_on(unsigned long long began) {
  const Worker& now = worker();
  const LaunchHead& head = *now.head;
  bool late = aborted(head);
  if (began == 0) began = now_ns();
  if (!late && head.timeout_ns != 0 && now_ns() - began > head.timeout_ns) {
    const TaskEntry& task = *const_cast<const TaskEntry* const volatile&>(now.task);
    fail(head, Failure::deadline, now.number, task.task, task.stage, -1, 0, now.step, 0);
    late = true;
  }
  if (late) *const_cast<volatile int*>(now.leave) = 1;
  return late ? 0 : began;
}

// Calls `load`, which loads packets and only then looks whether all are of this step, until they are.
template <class Load>
ARK_LOOP void poll(Load load) {
  unsigned long long began = 0;
  ARK_ROLLED for (uint32 turn = 1; !load(); ++turn) if (turn % 256 == 0 && (began = poll_on(began)) == 0) break;
}

// What they hold; whether all are of this step.
template <int kCount, class... T>
ARK_LOOP bool take(float (&to)[kCount], const Packet<T>&... packet) {
  bool all = true;
  int i = 0;
  ((all = all && packet.epoch == Packet<T>::now(), to[i++] = widen(packet.value)), ...);
  return all;
}
// One from each place.
template <int kCount, class... T>
ARK_LOOP void poll_each(float (&to)[kCount], const Packet<T>*... from) {
  poll([&] { return take(to, load_packets<Packet<T>>(from)...); });
}
template <class T>
static __device__ __noinline__ float load_one(const Packet<T>* from) {
  float one[1];
  poll_each(one, from);
  return one[0];
}

// The kRun from `from` on, which lies as a run does.
template <int kRun, class T>
ARK_LOOP void poll_run(const Packet<T>* from, float (&to)[kRun]) {
  using P = Piece<Packet<T>, kRun>;
  constexpr int kPieces = kRun / P::kEach;
  typename P::Elements pieces[kPieces];
  poll([&] {
    ARK_UNROLL for (int i = 0; i < kPieces; ++i) pieces[i] = load_packets<typename P::Elements>(from + i * P::kEach);
    bool all = true;
    ARK_UNROLL for (int i = 0; i < kRun; ++i) all =
        all && pieces[i / P::kEach].at[i % P::kEach].epoch == Packet<T>::now();
    return all;
  });
  ARK_UNROLL for (int i = 0; i < kRun; ++i) to[i] = widen(pieces[i / P::kEach].at[i % P::kEach].value);
}
// The first `there` of kCount that lie anyhow; zeros behind them.
template <int kCount, class T>
ARK_LOOP void poll_apart(const Packet<T>* from, int64_t stride, int there, float (&to)[kCount]) {
  Packet<T> packets[kCount];
  poll([&] {
    bool all = true;
    ARK_UNROLL for (int i = 0; i < kCount; ++i) packets[i] =
        i < there ? load_packets<Packet<T>>(from + i * stride) : Packet<T>{T{}, Packet<T>::now()};
    ARK_UNROLL for (int i = 0; i < kCount; ++i) all = all && packets[i].epoch == Packet<T>::now();
    return all;
  });
  ARK_UNROLL for (int i = 0; i < kCount; ++i) to[i] = widen(packets[i].value);
}

// As those of plain elements in runs.cuh and lanes.cuh.
template <class Group, int kRun, class T>
ARK_LOOP void load_run(float (&to)[kRun], const Packet<T>* row, int64_t count) {
  const int64_t first = Group::rank() * kRun;
  if (first >= count) return;
  if (run_fits<kRun>(row)) {
    poll_run(row + first, to);
  } else {
    seldom();
    poll_apart(row + first, 1, kRun, to);
  }
}
template <int kCount, class T>
ARK_LOOP void load_run(const Product& s, const Packet<T>* row, int d, bool wanted, float (&to)[kCount]) {
  const Packet<T>* const from = row + d * s.a_depth;
  const int there = wanted ? static_cast<int>(least<int64_t>(s.depth - d, kCount)) : 0;
  if (s.a_depth == 1 && there == kCount && run_fits<kCount>(from))
    poll_run(from, to);
  else
    poll_apart(from, s.a_depth, there, to);
}

template <class T>
ARK_LOOP void store_one(Packet<T>* to, float x) {
  const Packet<T> packet{narrow(x, T{}), Packet<T>::now()};
  if constexpr (sizeof(packet) == 4)
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(bits_as<uint32>(packet)) : "memory");
  else
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(bits_as<uint64>(packet)) : "memory");
}

template <class Group, int kRun, class T>
ARK_LOOP void store_run(Packet<T>* row, const float (&from)[kRun], int64_t count) {
  for_runs<Group, kRun>(count, [&](int64_t column, int turn) { store_one(row + column, from[turn]); });
}

// As that of gather.cuh.
template <int64_t kTo, int64_t kFrom, bool kAligned, class T, class Place>
ARK_LOOP void copy_runs(T* to, const Packet<T>* from, uint32 runs, uint32 length, Place place) {
  for_elements(runs * length, [&](int64_t i) {
    const uint32 element = static_cast<uint32>(i), run = element / length, column = element - run * length;
    int64_t to_at, from_at;
    if (!place(run, to_at, from_at)) return;
    Packet<T> packet;
    poll([&] {
      packet = load_packets<Packet<T>>(from + from_at + column * kFrom);
      return packet.epoch == Packet<T>::now();
    });
    to[to_at + column * kTo] = packet.value;
  });
}

#endif

}  // namespace ark::loop

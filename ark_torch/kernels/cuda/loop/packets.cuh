// Packets: elements that carry their own signal, so that readers poll the data itself. Between a store and its use on
// another SM there is no release, no counter and no second trip.
//
// Where several ranks push their parts of a sum (pushed.cuh), an element is one packet per rank, kApart bytes apart. A
// reader adds them in rank order and rounds once.
#pragma once

#include "cuda/loop/failure.cuh"
#include "cuda/loop/lanes.cuh"
#include "cuda/loop/runs.cuh"

namespace ark::loop {

// An element and as much of the step's number as fits are one word of 32 or 64 bits, written and read as one (a vector
// load is several such reads): a reader that sees this step's number sees its element. Nothing else is ordered by it,
// and the plan's validator accounts for that. Every word is written once per step, and nothing but packets is ever
// stored there. So a word not of this step is from the one before, or zero, as memory is initially and after a failure;
// steps count from 1. A packet is overwritten only in the next step, which is another launch.

#if defined(__CUDACC__)

template <class T>
struct EpochBeside {
  using Type = uint16;
};
template <>
struct EpochBeside<float> {
  using Type = uint32;
};
template <class T, int kRanks = 1, int64_t kApart = 0>
struct alignas(2 * sizeof(T)) Packet {
  using Epoch = typename EpochBeside<T>::Type;
  T value;
  Epoch epoch;
  static ARK_LOOP Epoch now() { return static_cast<Epoch>(worker().step); }
  ARK_LOOP bool has_come() const { return epoch == now(); }
};

template <class T, int kRanks, int64_t kApart>
ARK_LOOP const void* of_rank(const Packet<T, kRanks, kApart>* from, int rank) {
  return reinterpret_cast<const char*>(from) + rank * kApart;
}

// 4, 8 or 16 bytes in which each packet is read as one; also from other ranks.
template <class Elements, bool kFromRanks = false>
ARK_LOOP Elements load_packets(const void* from) {
  struct alignas(sizeof(Elements)) Words {
    uint32 at[sizeof(Elements) / 4];
  } words;
  if constexpr (sizeof(Elements) == 16) {
    uint64 low, high;
    if constexpr (kFromRanks)
      asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
    else
      asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
    words = {static_cast<uint32>(low), static_cast<uint32>(low >> 32), static_cast<uint32>(high),
             static_cast<uint32>(high >> 32)};
  } else if constexpr (sizeof(Elements) == 8) {
    uint64 both;
    if constexpr (kFromRanks)
      asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
    else
      asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
    words = {static_cast<uint32>(both), static_cast<uint32>(both >> 32)};
  } else if constexpr (kFromRanks) {
    asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(words.at[0]) : "l"(from) : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(words.at[0]) : "l"(from) : "memory");
  }
  return bits_as<Elements>(words);
}

// Decides whether a poll goes on. Returns when it began (given 0: now), or 0 if the launch ends early. Each thread
// calls it on its own.
static __device__ __noinline__ unsigned long long poll_on(unsigned long long began) {
  const Worker& now = worker();
  if (*const_cast<volatile int*>(now.leave) != 0) return 0;
  if (began == 0) began = now_ns();
  if (!is_to_look()) return began;
  const LaunchHead& head = *now.head;
  bool late = aborted(head);
  if (!late && head.timeout_ns != 0 && now_ns() - began > head.timeout_ns) {
    const TaskEntry& task = *const_cast<const TaskEntry* const volatile&>(now.task);
    fail(head, Failure::deadline, now.number, task.task, task.stage, -1, 0, now.step, 0);
    late = true;
  }
  if (late) *const_cast<volatile int*>(now.leave) = 1;
  return late ? 0 : began;
}

// The number of ranks that packets come from. With several, the missing rank is passed on, and pushed.cuh decides.
template <int kRanks>
struct FromRanks {};
ARK_LOOP unsigned long long poll_on(unsigned long long began, int, FromRanks<1>) {
  return poll_on(began);
}

// Calls `load`, which loads packets and then checks that all are of this step, until it returns kAllCame; otherwise it
// returns a rank whose packets are missing, or kOwn for packets of this rank only. A longer wait pauses between polls:
// otherwise the loads of all threads would slow down the arrival of packets (docs/measurements.md).
inline constexpr int kAllCame = -1, kOwn = -2;
inline constexpr uint32 kTurns = 4, kPauseNs = 1000;
template <int kRanks, class Load>
ARK_LOOP void poll(Load load) {
  unsigned long long began = 0;
  int missing;
  ARK_ROLLED for (uint32 turn = 1; (missing = load()) != kAllCame; ++turn) {
    if (turn >= kTurns) __nanosleep(kPauseNs);
    if (turn % 256 == 0 && (began = poll_on(began, missing, FromRanks<kRanks>{})) == 0) break;
  }
}

// The packets of an element, one per rank.
template <class T, int kRanks, int64_t kApart>
struct Fetched {
  using P = Packet<T, kRanks, kApart>;
  P of[kRanks];

  ARK_LOOP explicit Fetched(const P* from) {
    ARK_UNROLL for (int rank = 0; rank < kRanks; ++rank) of[rank] = load_packets<P, (kRanks > 1)>(of_rank(from, rank));
  }
  ARK_LOOP void look(int& missing) const {
    ARK_UNROLL for (int rank = 0; rank < kRanks; ++rank) if (!of[rank].has_come()) missing = kRanks > 1 ? rank : kOwn;
  }
  ARK_LOOP float element() const {
    float sum = widen(of[0].value);
    ARK_UNROLL for (int rank = 1; rank < kRanks; ++rank) sum += widen(of[rank].value);
    return kRanks == 1 ? sum : round_to(sum, T{});
  }
};

// Extracts their elements. Returns a rank whose packets are missing.
template <int kCount, class... F>
ARK_LOOP int take(float (&to)[kCount], const F&... fetched) {
  int missing = kAllCame, i = 0;
  ((fetched.look(missing), to[i++] = fetched.element()), ...);
  return missing;
}
// One from each address.
template <int kCount, class... T, int... kRanks, int64_t... kApart>
ARK_LOOP void poll_each(float (&to)[kCount], const Packet<T, kRanks, kApart>*... from) {
  poll<((kRanks > 1) || ...) ? kMostRanks : 1>([&] { return take(to, Fetched<T, kRanks, kApart>(from)...); });
}
template <class T, int kRanks, int64_t kApart>
static __device__ __noinline__ float load_one(const Packet<T, kRanks, kApart>* from) {
  float one[1];
  poll_each(one, from);
  return one[0];
}

// The kRun packets from `from` on, contiguous like a run. Ranks from kFirst on, few at a time as registers allow.
template <int kFirst = 0, int kRun, class T, int kRanks, int64_t kApart>
ARK_LOOP void poll_run(const Packet<T, kRanks, kApart>* from, float (&to)[kRun]) {
  constexpr int kEach = Piece<Packet<T, kRanks, kApart>, kRun>::kEach;
  using Elements = typename Piece<Packet<T, kRanks, kApart>, kEach>::Elements;
  constexpr int kHere = kRanks - kFirst < 4 ? kRanks - kFirst : 4;
  Elements pieces[kHere][kRun / kEach];
  poll<kRanks>([&] {
    int missing = kAllCame;
    ARK_UNROLL for (int i = 0; i < kRun; i += kEach) ARK_UNROLL for (int r = 0; r < kHere; ++r) pieces[r][i / kEach] =
        load_packets<Elements, (kRanks > 1)>(of_rank(from + i, kFirst + r));
    ARK_UNROLL for (int i = 0; i < kRun; ++i)
        ARK_UNROLL for (int r = 0; r < kHere; ++r) if (!pieces[r][i / kEach].at[i % kEach].has_come()) missing =
            kFirst + r;
    return missing;
  });
  ARK_UNROLL for (int i = 0; i < kRun; ++i) {
    const auto part = [&](int r) { return widen(pieces[r][i / kEach].at[i % kEach].value); };
    to[i] = kFirst == 0 ? part(0) : to[i] + part(0);
    ARK_UNROLL for (int r = 1; r < kHere; ++r) to[i] += part(r);
    if constexpr (kRanks > 1 && kFirst + kHere == kRanks) to[i] = round_to(to[i], T{});
  }
  if constexpr (kFirst + kHere < kRanks) poll_run<kFirst + kHere>(from, to);
}
// The first `there` of kCount packets with any stride, one after the other; zeros after them.
template <int kCount, class T, int kRanks, int64_t kApart>
ARK_LOOP void poll_apart(const Packet<T, kRanks, kApart>* from, int64_t stride, int there, float (&to)[kCount]) {
  ARK_UNROLL for (int i = 0; i < kCount; ++i) to[i] = i < there ? load_one(from + i * stride) : 0.0f;
}

// Like the functions for plain elements in runs.cuh and lanes.cuh.
template <class Group, int kRun, class T, int kRanks, int64_t kApart>
ARK_LOOP void load_run(float (&to)[kRun], const Packet<T, kRanks, kApart>* row, int64_t count) {
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

template <class Group, int kRun, class T, int kRanks, int64_t kApart>
ARK_LOOP void store_run(Packet<T, kRanks, kApart>* row, const float (&from)[kRun], int64_t count) {
  for_runs<Group, kRun>(count, [&](int64_t column, int turn) { store_one(row + column, from[turn]); });
}

// Like the one in gather.cuh.
template <int64_t kTo, int64_t kFrom, bool kAligned, class T, class Place>
ARK_LOOP void copy_runs(T* to, const Packet<T>* from, uint32 runs, uint32 length, Place place) {
  for_elements(runs * length, [&](int64_t i) {
    const uint32 element = static_cast<uint32>(i), run = element / length, column = element - run * length;
    int64_t to_at, from_at;
    if (!place(run, to_at, from_at)) return;
    Packet<T> packet;
    poll<1>([&] {
      packet = load_packets<Packet<T>>(from + from_at + column * kFrom);
      return packet.has_come() ? kAllCame : kOwn;
    });
    to[to_at + column * kTo] = packet.value;
  });
}

#endif

}  // namespace ark::loop

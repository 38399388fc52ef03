// Indexed copies of parts of tensors: rows of a table (embeddings), rows into a table (KV caches), and sums into one.
//
// What a tile copies is one flat space, spread over the threads. Generated code computes the address of a part and
// checks its index (index_fits, failure.cuh). A thread stops at an index out of range, and the launch ends with an
// error.
#pragma once

#include "cuda/loop/failure.cuh"
#include "cuda/loop/group.cuh"
#include "cuda/loop/hinted.cuh"
#include "cuda/loop/ops.cuh"

namespace ark::loop {

// Units of 16 bytes, kTurns of a thread in flight together. place(unit, to_at, from_at) computes a unit's offsets and
// returns false if there is none. A thread without a unit loads the last one, so that no branch separates the loads.
template <int kTurns, class To, class From, class Place>
ARK_LOOP void copy_units(To* to, const From* from, uint32 count, Place place) {
  ARK_ROLLED for (int64_t first = thread(); first < count; first += kTurns * kThreads) {
    int64_t to_at[kTurns], from_at[kTurns];
    uint4 units[kTurns];
    ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t unit = least<int64_t>(first + turn * kThreads, count - 1);
      if (!place(static_cast<uint32>(unit), to_at[turn], from_at[turn])) return;
    }
    ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) units[turn] = load_bytes<uint4>(from + from_at[turn]);
    ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      if (first + turn * kThreads < count) store_whole(to + to_at[turn], units[turn]);
    }
  }
}

// `runs` runs of `length` elements with strides kTo and kFrom. place(run, to_at, from_at) computes a run's offsets and
// returns false if there is none. kAligned: runs are contiguous, and 16-byte aligned if the first one is.
template <int64_t kTo, int64_t kFrom, bool kAligned, class To, class From, class Place>
ARK_LOOP void copy_runs(To* to, const From* from, uint32 runs, uint32 length, Place place) {
  using T = Plain<To>;
  static_assert(kSame<T, Plain<From>>);
  constexpr uint32 kWide = 16 / sizeof(T);
  if (kAligned && length % kWide == 0 && ((bits_as<uint64>(to) | bits_as<uint64>(from)) & 15) == 0) {
    const uint32 units = length / kWide;
    const auto place_unit = [&](uint32 unit, int64_t& to_at, int64_t& from_at) {
      const uint32 run = unit / units, column = (unit - run * units) * kWide;
      if (!place(run, to_at, from_at)) return false;
      to_at += column;
      from_at += column;
      return true;
    };
    if (runs * units <= kThreads)
      copy_units<1>(to, from, runs * units, place_unit);
    else
      copy_units<8>(to, from, runs * units, place_unit);
    return;
  }
  ARK_ROLLED for (int64_t i = thread(); i < runs * length; i += kThreads) {
    const uint32 element = static_cast<uint32>(i), run = element / length, column = element - run * length;
    int64_t to_at = 0, from_at = 0;
    if (!place(run, to_at, from_at)) return;
    store_bytes(to + to_at + column * kTo, load_bytes<T>(from + from_at + column * kFrom));
  }
}

// Whether index(0), index(1), ... strictly increase, so that nothing is written twice.
template <class Index>
ARK_LOOP bool growing(int64_t count, Index index) {
  bool grows = true;
  for_blocks<4>(count - 1, [&](int64_t first, int64_t past) {
    for_turns<4>(first, past, [&](int64_t i, int) { grows = grows & (index(i) < index(i + 1)); });
  });
  return Block::all(grows, [](bool a, bool b) { return a && b; });
}

// Writes position after position, as sums and repeated positions require. Columns (what is not indexed) are spread over
// threads, and if they are few, so are a column's destinations, by index. place(column, position, to_at, from_at)
// returns the index; a negative one is skipped.
template <bool kAdd, class T, class Place>
ARK_LOOP void put_in_order(T* to, const T* from, uint32 columns, int64_t positions, Place place) {
  uint32 parts = 1;
  while (parts < kThreads && parts * 2 * columns <= kThreads) parts *= 2;
  for_elements(columns * parts, [&](int64_t i) {
    const uint32 element = static_cast<uint32>(i), part = element / columns, column = element - part * columns;
    for (int64_t position = 0; position < positions; ++position) {
      int64_t to_at = 0, from_at = 0;
      const int64_t index = place(column, position, to_at, from_at);
      if (index < 0 || (static_cast<uint32>(index) & (parts - 1)) != part) continue;
      if constexpr (kAdd)
        store_one(to + to_at, add(load_one(to + to_at), load_one(from + from_at)));
      else
        to[to_at] = from[from_at];
    }
  });
}

ARK_LOOP void check_holds(const Context& context, const bool* condition, bool* out) {
  if (thread() != 0) return;
  const bool holds = load_one(condition);
  *out = holds;
  if (!holds) refuse(context, 0, 0, 0);
}

}  // namespace ark::loop

// Copies of parts of tensors by index: rows of a table (embeddings), rows into a table (KV caches), and sums into one.
//
// All that a tile copies is one flat space, spread over the threads; generated code says where a part of it lies, and
// checks the index behind that (index_fits, launch.cuh). A thread stops at an index out of range: the launch ends in an
// error.
#pragma once

#include "cuda/loop/failure.cuh"
#include "cuda/loop/group.cuh"
#include "cuda/loop/hinted.cuh"
#include "cuda/loop/ops.cuh"

namespace ark::loop {

// `runs` runs of `length` elements, kTo and kFrom apart. place(run, to_at, from_at) says where one begins; false: there
// is none. kAligned: all of them begin at multiples of 16 bytes, if the first does, and are adjacent.
template <int64_t kTo, int64_t kFrom, bool kAligned, class To, class From, class Place>
ARK_LOOP void copy_runs(To* to, const From* from, uint32 runs, uint32 length, Place place) {
  using T = Plain<To>;
  static_assert(kSame<T, Plain<From>>);
  constexpr uint32 kWide = 16 / sizeof(T);
  if (kAligned && length % kWide == 0 && ((bits_as<uint64>(to) | bits_as<uint64>(from)) & 15) == 0) {
    const uint32 units = length / kWide;
    ARK_ROLLED for (int64_t i = thread(); i < runs * units; i += kThreads) {
      const uint32 unit = static_cast<uint32>(i), run = unit / units, column = (unit - run * units) * kWide;
      int64_t to_at = 0, from_at = 0;
      if (!place(run, to_at, from_at)) return;
      store_bytes(to + to_at + column, load_bytes<uint4>(from + from_at + column));
    }
    return;
  }
  ARK_ROLLED for (int64_t i = thread(); i < runs * length; i += kThreads) {
    const uint32 element = static_cast<uint32>(i), run = element / length, column = element - run * length;
    int64_t to_at = 0, from_at = 0;
    if (!place(run, to_at, from_at)) return;
    store_bytes(to + to_at + column * kTo, load_bytes<T>(from + from_at + column * kFrom));
  }
}

// Whether each of index(0), index(1), ... is greater than the one before: nothing is written twice then.
template <class Index>
ARK_LOOP bool growing(int64_t count, Index index) {
  bool grows = true;
  for_elements(count - 1, [&](int64_t i) { grows = grows && index(i) < index(i + 1); });
  return Block::all(grows, [](bool a, bool b) { return a && b; });
}

// Position after position, as sums and what is written twice need it. Columns, which differ in what is not indexed, are
// spread over threads, and where they are few, the destinations of a column as well, by their index.
// place(column, position, to_at, from_at) gives the index; below 0: it is left out.
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

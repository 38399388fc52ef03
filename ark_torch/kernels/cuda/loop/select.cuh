// The positions of the k largest elements of rows, or of all elements in order. NaN is largest; of equals, the first
// comes first.
//
// Short rows: several per warp; an element's rank is the number of elements that precede it. Long rows: one after the
// other by all threads, which sort keys in memory. If few elements of a long row are selected, those below the k-th
// largest of the threads' own maxima are dropped first: at least k elements remain.
#pragma once

#include "cuda/loop/group.cuh"
#include "cuda/loop/keys.cuh"

namespace ark::loop {

ARK_LOOP constexpr int64_t power_of_two(int64_t least) {
  int64_t power = 1;
  while (power < least) power *= 2;
  return power;
}

// The algorithm for rows of that length.
struct Selection {
  int64_t length, count;
  ARK_LOOP constexpr bool is_short() const { return length <= 256; }
  // The most elements that can pass the threshold: all of the k threads whose maxima do.
  ARK_LOOP constexpr int64_t candidates() const { return count * ((length + kThreads - 1) / kThreads); }
  ARK_LOOP constexpr bool by_threshold() const { return length >= 1024 && count <= 256 && candidates() * 2 <= length; }
  ARK_LOOP constexpr int64_t keys() const {
    const int64_t keys = power_of_two(by_threshold() ? candidates() : length);
    return keys < kThreads ? kThreads : keys;
  }
};

// place(row, to_at, from_at) returns a row's offsets.
template <bool kLargest, int64_t kTo, int64_t kFrom, Selection s, class T, class Place>
ARK_LOOP void select_short(int64_t* to, const T* from, uint32 rows, Place place) {
  constexpr int kWidth = s.length < 32 ? static_cast<int>(power_of_two(s.length)) : 32;
  constexpr int kItems = static_cast<int>((s.length + kWidth - 1) / kWidth);
  using Key = typename KeyOf<T>::type;
  const int first = thread() % kWidth;
  for (uint32 begin = 0; begin < rows; begin += kThreads / kWidth) {
    const uint32 row = begin + static_cast<uint32>(thread() / kWidth);
    int64_t to_at = 0, from_at = 0;
    const bool there = row < rows;
    if (there) place(row, to_at, from_at);
    Key keys[kItems];
    uint32 before[kItems];
    ARK_UNROLL for (int item = 0; item < kItems; ++item) {
      const int i = item * kWidth + first;
      keys[item] = there && i < s.length ? key_of<kLargest>(from[from_at + i * kFrom], static_cast<uint32>(i)) : Key{};
      before[item] = 0;
    }
    ARK_UNROLL for (int item = 0; item < kItems; ++item) {
      for (int lane = 0; lane < kWidth; ++lane) {
        const Key other = key_from<kWidth>(keys[item], lane);
        ARK_UNROLL for (int mine = 0; mine < kItems; ++mine) before[mine] += keys[mine] < other ? 1 : 0;
      }
    }
    ARK_UNROLL for (int item = 0; item < kItems; ++item) {
      const int i = item * kWidth + first;
      if (there && i < s.length && before[item] < s.count) to[to_at + before[item] * kTo] = i;
    }
  }
}

// One row by all threads; `keys` has room for s.keys().
template <bool kLargest, int64_t kTo, int64_t kFrom, Selection s, class T, class Key>
ARK_LOOP void select_long(int64_t* to, const T* from, Key* keys) {
  uint32 count = static_cast<uint32>(s.keys());
  if constexpr (s.by_threshold()) {
    __shared__ uint32 passed;
    Key best{};
    for_elements(s.length, [&](int64_t i) {
      const Key key = key_of<kLargest>(from[i * kFrom], static_cast<uint32>(i));
      if (best < key) best = key;
    });
    keys[thread()] = best;
    if (thread() == 0) passed = 0;
    sort_keys(keys, kThreads);
    const Key threshold = keys[s.count - 1];
    sync();
    // In any order, as they are sorted next.
    for_elements(s.length, [&](int64_t i) {
      const Key key = key_of<kLargest>(from[i * kFrom], static_cast<uint32>(i));
      if (!(key < threshold)) keys[atomicAdd(&passed, 1u)] = key;
    });
    sync();
    count = static_cast<uint32>(power_of_two(passed));
    for (uint32 i = passed + static_cast<uint32>(thread()); i < count; i += kThreads) keys[i] = Key{};
  } else {
    for_elements(s.keys(), [&](int64_t i) {
      keys[i] = i < s.length ? key_of<kLargest>(from[i * kFrom], static_cast<uint32>(i)) : Key{};
    });
  }
  sort_keys(keys, count);
  for_elements(s.count, [&](int64_t i) { to[i * kTo] = place_of(keys[i]); });
  sync();
}

// Writes the positions of the kCount largest (smallest) of kLength elements, for each row. `scratch` has kScratch
// bytes: room for the keys if they do not fit in shared memory.
template <bool kLargest, int64_t kLength, int64_t kCount, int64_t kTo, int64_t kFrom, int64_t kScratch, class T,
          class Place>
ARK_LOOP void select_rows(int64_t* to, const T* from, uint32 rows, char* scratch, Place place) {
  constexpr Selection s{kLength, kCount};
  if constexpr (s.is_short()) {
    select_short<kLargest, kTo, kFrom, s>(to, from, rows, place);
  } else {
    using Key = typename KeyOf<T>::type;
    constexpr int64_t kBytes = s.keys() * static_cast<int64_t>(sizeof(Key));
    constexpr bool kShared = kBytes <= kWorkspaceBytes;
    static_assert(kShared || kBytes <= kScratch);
    Key* const keys = reinterpret_cast<Key*>(kShared ? workspace() : scratch);
    for (uint32 row = 0; row < rows; ++row) {
      int64_t to_at, from_at;
      place(row, to_at, from_at);
      select_long<kLargest, kTo, kFrom, s>(to + to_at, from + from_at, keys);
    }
  }
}

}  // namespace ark::loop

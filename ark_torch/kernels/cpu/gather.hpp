// Indexed copies of parts of tensors: rows of a table (embeddings), rows into a table (KV caches), and sums into one.
// Generated code loops over the indices and checks each (index_fits, launch.hpp); these are the runs that it copies.
#pragma once

#include "cpu/launch.hpp"
#include "cpu/vector.hpp"

namespace ark::cpu {

// `count` elements; strides in elements.
template <class T>
ARK_INLINE void copy_run(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t count) {
  if (to_stride == 1 && from_stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, sizeof(T));
}

ARK_INLINE void check_holds(const Context& context, const bool* condition, bool* out) {
  *out = load_one(condition);
  if (!*out) fail(*context.launch, Failure::index_too_large, context.worker, context.task, context.stage, -1, 0, 0);
}

// to += from, each sum rounded to the type, as in PyTorch.
template <class T>
ARK_INLINE void add_run(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t count) {
  if (to_stride == 1 && from_stride == 1) {
    for_columns(0, count, [&](int64_t c, auto lanes) ARK_BODY {
      store(to + c, load(to + c, lanes) + load(from + c, lanes), lanes);
    });
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    T* const at = to + i * to_stride;
    store_one(at, load_one(at) + load_one(from + i * from_stride));
  }
}

}  // namespace ark::cpu

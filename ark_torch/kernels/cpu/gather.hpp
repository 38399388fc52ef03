// Copies of parts of tensors by index: rows of a table (embeddings), and rows into a table (KV caches).
//
// Generated code walks the indices and checks each (index_fits, loop.hpp); here are the runs that it copies.
#pragma once

#include "cpu/loop.hpp"
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

}  // namespace ark::cpu

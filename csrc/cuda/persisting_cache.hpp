// A part of a GPU's second-level cache that is set aside for accesses that a launch marks as persisting.
//
// The size is a property of the context, which the whole process shares. So it only grows while an object of this class
// lives, and the last one puts back what it found. Where the process changed it meanwhile, it is left alone.
#pragma once

#include <cstddef>

#include "cuda/cuda_types.hpp"

namespace ark {

class PersistingCache {
 public:
  // Sets aside at least `bytes` of this device's cache, or as much as the device allows (nothing under MIG).
  PersistingCache(int device, size_t bytes);
  ~PersistingCache();
  PersistingCache(const PersistingCache&) = delete;
  PersistingCache& operator=(const PersistingCache&) = delete;

  // A window over memory that shares what is set aside. One of no bytes if nothing is.
  CUaccessPolicyWindow window(void* base, size_t bytes) const;

 private:
  const int device_;
  const size_t most_window_;
  size_t bytes_;
};

}  // namespace ark

// Parameters of the probe kernels (probe.cuh), for host and device, and the pattern that the fill kernel writes and the
// sum kernel adds up.
#pragma once

#include "protocol/base.hpp"

namespace ark {

struct ProbeFill {
  void* to;       // aligned to 16 bytes
  uint64 chunks;  // of 16 bytes
  uint32 seed;
};

struct ProbeSum {
  const void* from;  // aligned to 16 bytes; may be a peer's or the host's memory
  uint64 chunks;     // of 16 bytes
  uint64* sum;       // initially 0; the sum of all 32-bit words
};

// The 32-bit word that fill writes at `index`: different at each index, so that a shifted or lost chunk is noticed.
ARK_DEVICE_INLINE constexpr uint32 probe_word(uint64 index, uint32 seed) {
  return static_cast<uint32>(index) * 2654435761u + seed;
}

}  // namespace ark

// Parameters of the probe kernels (probe.cuh), known to host and device.
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
  uint64* sum;       // 0 before; all 32-bit words added
};

// The 32-bit word that fill writes at `index`: a different one in each place, so that a shifted or lost chunk shows.
ARK_DEVICE_INLINE constexpr uint32 probe_word(uint64 index, uint32 seed) {
  return static_cast<uint32>(index) * 2654435761u + seed;
}

}  // namespace ark

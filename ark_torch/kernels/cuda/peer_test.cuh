// Writes a pattern to a peer's memory with the stores that collectives use, to test whether peer access works as the
// driver claims. The peer's host compares the values (csrc/collectives/cuda/peer_test.hpp). Nothing waits here: with
// broken peer access the awaited data would not come.
#pragma once

#include "cuda/packet.cuh"

namespace ark::device {

inline constexpr uint32 kPeerTestUnits = 256;  // of 16 bytes, from one rank to another by one way

struct PeerTestParams {
  char* to;    // in the peer's memory
  char* kept;  // in this rank's: the same pattern, for copy engines to copy
  uint32 from_rank, to_rank;
};

// Word `index` of what one rank writes to another by stores (way 0) or copies (way 1). No word is 0.
ARK_HOST_DEVICE constexpr uint64 peer_test_word(uint32 from_rank, uint32 to_rank, uint32 way, uint32 index) {
  uint64 x = (uint64{from_rank} << 40 | uint64{to_rank} << 32 | uint64{way} << 24 | index) + 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return (x ^ (x >> 31)) | 1;
}

#if defined(__CUDACC__)

__device__ __forceinline__ void peer_test(const PeerTestParams& p) {
  for (uint32 unit = threadIdx.x; unit < kPeerTestUnits; unit += blockDim.x) {
    const auto word = [&](uint32 way, uint32 half) {
      return peer_test_word(p.from_rank, p.to_rank, way, 2 * unit + half);
    };
    store_packet(p.to + 16 * unit, word(0, 0), word(0, 1));
    store_packet(p.kept + 16 * unit, word(1, 0), word(1, 1));
  }
  __threadfence_system();
}

#endif

}  // namespace ark::device

// Packets of 16 bytes: 8 of data and 8 of the epoch that tells when the data has arrived; host and device code. A place
// never holds the awaited epoch before its data: a place's epochs only grow, memory starts as zeros, and a slot is
// reused only after its message was taken.
//
// Memory order, device: the PTX memory model treats a vector access as several unordered scalar ones, but the hardware
// transfers an aligned 16-byte access as a whole, also over NVLink and PCIe (NCCL's LL128 and MSCCL++'s LL16 packets
// rely on it too). So data and epoch arrive together without a fence. Host: two words, data first, then the epoch with
// release; read in reverse order. ThreadSanitizer sees that.
#pragma once

#include "protocol/atomics.hpp"

namespace ark::protocol {

ARK_DEVICE_INLINE void store_packet(void* to, uint64 data, uint64 epoch) {
#if ARK_DEVICE_CODE
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(data), "l"(epoch) : "memory");
#else
  store_relaxed(static_cast<uint64*>(to)[0], data);
  store_release(static_cast<uint64*>(to)[1], epoch);
#endif
}

ARK_DEVICE_INLINE void load_packet(const void* from, uint64& data, uint64& epoch) {
#if ARK_DEVICE_CODE
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(data), "=l"(epoch) : "l"(from) : "memory");
#else
  epoch = load_acquire(static_cast<const uint64*>(from)[1]);
  data = load_relaxed(static_cast<const uint64*>(from)[0]);
#endif
}

// A unit of 16 bytes travels as two packets. Those of 32 consecutive units are in 32 + 32 places, so that a warp stores
// whole rows.
inline constexpr uint64 kPacketRow = 512;
ARK_HOST_DEVICE constexpr uint64 packet_place(uint64 unit) {
  return (unit / 32 * 2) * kPacketRow + unit % 32 * 16;
}
// Memory for a message of this many bytes.
ARK_HOST_DEVICE constexpr uint64 packet_bytes(uint64 bytes) {
  return (bytes + kPacketRow - 1) / kPacketRow * 2 * kPacketRow;
}

ARK_DEVICE_INLINE void store_unit_packets(char* slot, uint64 unit, uint64 low, uint64 high, uint64 epoch) {
  char* to = slot + packet_place(unit);
  store_packet(to, low, epoch);
  store_packet(to + kPacketRow, high, epoch);
}
// Returns false if the unit has not arrived yet.
ARK_DEVICE_INLINE bool load_unit_packets(const char* slot, uint64 unit, uint64& low, uint64& high, uint64 epoch) {
  const char* from = slot + packet_place(unit);
  uint64 low_epoch = 0, high_epoch = 0;
  load_packet(from, low, low_epoch);
  load_packet(from + kPacketRow, high, high_epoch);
  return low_epoch == epoch && high_epoch == epoch;
}

}  // namespace ark::protocol

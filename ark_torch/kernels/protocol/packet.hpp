// Packets of 16 bytes, 8 of data and 8 of the epoch that tells when the data is there; host and device code.
//
// Ordering, device: the PTX memory model treats a vector access as several scalar ones in no order; the hardware
// carries an aligned 16-byte access whole, over NVLink and PCIe too (NCCL's LL128 and MSCCL++'s LL16 packets rest on
// the same), so data and epoch arrive together and no fence is needed. Host: two words, the data first and the epoch
// with release, read the other way round: what the device's access does at once, and ThreadSanitizer sees.
//
// Invariant: a place never holds the epoch that is awaited before its data. Epochs of a place only grow, and memory is
// zero at first. A message's slot is written again only when the message in it was taken.
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

// Units of 16 bytes travel as two packets: those of 32 consecutive units lie in 32 + 32 places, so that a warp stores
// whole rows.
inline constexpr uint64 kPacketRow = 512;
ARK_HOST_DEVICE constexpr uint64 packet_place(uint64 unit) {
  return (unit / 32 * 2) * kPacketRow + unit % 32 * 16;
}
// Memory that a message of so many bytes takes.
ARK_HOST_DEVICE constexpr uint64 packet_bytes(uint64 bytes) {
  return (bytes + kPacketRow - 1) / kPacketRow * 2 * kPacketRow;
}

ARK_DEVICE_INLINE void store_unit_packets(char* slot, uint64 unit, uint64 low, uint64 high, uint64 epoch) {
  char* to = slot + packet_place(unit);
  store_packet(to, low, epoch);
  store_packet(to + kPacketRow, high, epoch);
}
// False: not there yet.
ARK_DEVICE_INLINE bool load_unit_packets(const char* slot, uint64 unit, uint64& low, uint64& high, uint64 epoch) {
  const char* from = slot + packet_place(unit);
  uint64 low_epoch = 0, high_epoch = 0;
  load_packet(from, low, low_epoch);
  load_packet(from + kPacketRow, high, high_epoch);
  return low_epoch == epoch && high_epoch == epoch;
}

}  // namespace ark::protocol

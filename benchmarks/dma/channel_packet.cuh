// The channel of packets: every 16 bytes that are stored hold 8 of data and the message's epoch, so that data tells
// itself one flight over the link after it was stored, without a fence, a barrier or a word. Half of the link is data.
//
// Ordering: protocol/packet.hpp. The epoch of message n is n + 1. A slot is written again behind the receiver's credit,
// which it gives when the epochs of the whole message were read, so behind loads that are over.
//
// A message is put as a whole, by one put() to its slot, of packet_bytes(bytes); the receiver knows its size.
#pragma once

#include "channel.cuh"

namespace ark::device {

#if defined(__CUDACC__)

template <class Team>
class PacketSender : public Sender<Team> {
 public:
  using Sender<Team>::Sender;

  __device__ __forceinline__ bool put(void* to, const void* from, uint64 bytes) {
    const bool aligned = (reinterpret_cast<uint64>(from) & 15) == 0;
    const uint64 units = (bytes + 15) / 16, epoch = this->sent() + 1;
#pragma unroll 2
    for (uint64 i = Team::rank(); i < units; i += Team::size()) {
      const Unit unit = load_unit(from, i, bytes, aligned);
      protocol::store_unit_packets(static_cast<char*>(to), i, unit.lo, unit.hi, epoch);
    }
    return true;
  }
  // Of what was put: it is on its way already.
  __device__ __forceinline__ bool signal() {
    this->writer_.count();
    return true;
  }
  __device__ __forceinline__ bool put_with_signal(void* to, const void* from, uint64 bytes) {
    put(to, from, bytes);
    return signal();
  }
};

template <class Team>
class PacketReceiver : public Receiver<Team> {
 public:
  using Receiver<Team>::Receiver;

  // Unpacks the next message to `room`, which is returned.
  __device__ __forceinline__ const char* wait(void* room, uint64 bytes) {
    const bool aligned = (reinterpret_cast<uint64>(room) & 15) == 0;
    const bool good =
        unpack(bytes, [&](uint64 unit, const Unit& value) { store_unit(room, unit, bytes, aligned, value); });
    return Team::all(good) ? static_cast<const char*>(room) : nullptr;
  }
  // Hands every unit of the next message to `take(unit, value)` in the thread that read it. This thread's answer.
  template <class Take>
  __device__ __forceinline__ bool unpack(uint64 bytes, Take take) {
    constexpr int kBatch = 2;  // units whose loads are under way together
    const uint64 units = (bytes + 15) / 16, step = Team::size(), epoch = this->reader_.received() + 1;
    const char* from = this->slot();
#pragma unroll 1
    for (uint64 i = Team::rank(); i < units; i += kBatch * step) {
      Unit values[kBatch];
      const bool good = await(this->end_, epoch, [&] {
        bool there = true;
        ARK_UNROLL
        for (int j = 0; j < kBatch; j++) {
          const uint64 unit = i + j * step;
          if (unit < units) there &= protocol::load_unit_packets(from, unit, values[j].lo, values[j].hi, epoch);
        }
        return there;
      });
      if (!good) return false;
      ARK_UNROLL
      for (int j = 0; j < kBatch; j++) {
        if (i + j * step < units) take(i + j * step, values[j]);
      }
    }
    return true;
  }
};

#endif

}  // namespace ark::device

// A channel of packets. Every stored 16 bytes hold 8 bytes of data and the message's epoch, so that data signals
// itself: it is usable one link latency after the store, without a fence, a barrier or a flag. Half of the bandwidth is
// data.
//
// Ordering: protocol/packet.hpp. The epoch of message n is n + 1. A slot is rewritten after the receiver's credit. The
// receiver returns it after it has read the epochs of the whole message, when all its loads are complete.
//
// A message is put as a whole, by one put() of packet_bytes(bytes) to its slot. The receiver must know its size.
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
  // Only counts: the packets are already on their way.
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

  // Unpacks the next message to `room` and returns it.
  __device__ __forceinline__ const char* wait(void* room, uint64 bytes) {
    const bool aligned = (reinterpret_cast<uint64>(room) & 15) == 0;
    const bool good =
        unpack(bytes, [&](uint64 unit, const Unit& value) { store_unit(room, unit, bytes, aligned, value); });
    return Team::all(good) ? static_cast<const char*>(room) : nullptr;
  }
  // Passes every unit of the next message to `take(unit, value)`, in the thread that read it. Returns this thread's
  // result.
  template <class Take>
  __device__ __forceinline__ bool unpack(uint64 bytes, Take take) {
    constexpr int kBatch = 2;  // units whose loads are in flight together
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

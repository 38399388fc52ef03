// The two words of a channel: who may write a slot, and which message is there; host and device code.
//
// A channel is a ring of slots in the receiver's memory. `arrived`, beside them, counts the messages that are there:
// only the sender writes it. `credit`, in the sender's memory, counts the messages taken: only the receiver writes it.
// Both only grow. Messages are numbered from 0 and lie in slot number % slots.
//
// Ordering. Bytes are written before `arrived` is stored with release, and read behind a load of it with acquire. A
// slot is written again behind an acquire of a credit that the receiver stored when it had read the slot. That store
// orders loads before it, not stores: on a device it is a relaxed one behind loads whose values were used, which cannot
// be undone by a later write (the same holds in cuda/ring.cuh); on the host it is a release, since C++ has nothing
// less.
//
// Liveness. A sender waits for messages that are a ring older than its own, and the receiver takes them in order.
#pragma once

#include "protocol/counter.hpp"

namespace ark::protocol {

// Of one end's two directions; kept in its own memory between launches, so that a graph's replay needs no host.
struct alignas(16) ChannelState {
  uint64 sent, received;
};

ARK_HOST_DEVICE inline void store_after_loads(uint64& word, uint64 value) {
#if ARK_DEVICE_CODE
  store_relaxed(word, value);
#else
  store_release(word, value);
#endif
}

// A sender that many threads drive looks for credits once in half a ring: then which message looks, and what it waits
// for, is known to all of them without asking each other. 0: message needs no look.
ARK_HOST_DEVICE inline uint64 credit_of_half(uint64 message, uint64 slots) {
  const uint64 half = slots < 2 ? 1 : slots / 2;
  if (message % half != 0) return 0;
  return needed_to_write(message + half - 1, slots);
}

class SlotWriter {
 public:
  SlotWriter() = default;
  ARK_HOST_DEVICE SlotWriter(uint64* arrived, const uint64* credit, uint64 slots, uint64 sent)
      : arrived_(arrived), credit_(credit), slots_(slots), sent_(sent) {}

  // The number of the next message, and its slot's.
  ARK_HOST_DEVICE uint64 sent() const { return sent_; }
  ARK_HOST_DEVICE uint64 slot() const { return slot_of(sent_, slots_); }

  // Whether so many messages were taken; a load only where it is not known yet.
  ARK_HOST_DEVICE bool taken(uint64 messages) {
    if (known_ < messages) known_ = load_acquire(*credit_);
    return known_ >= messages;
  }
  // Whether the next message's slot may be written.
  ARK_HOST_DEVICE bool writable() { return taken(needed_to_write(sent_, slots_)); }
  // What the next message must wait for when it looks once in half a ring.
  ARK_HOST_DEVICE uint64 due() const { return credit_of_half(sent_, slots_); }

  // One more message; seen by the receiver when the thread that has its bytes behind it tells.
  ARK_HOST_DEVICE void count() { sent_++; }
  ARK_HOST_DEVICE void tell() const { store_release(*arrived_, sent_); }

 private:
  uint64* arrived_ = nullptr;
  const uint64* credit_ = nullptr;
  uint64 slots_ = 1, sent_ = 0, known_ = 0;
};

class SlotReader {
 public:
  SlotReader() = default;
  ARK_HOST_DEVICE SlotReader(const uint64* arrived, uint64* credit, uint64 slots, uint64 received)
      : arrived_(arrived), credit_(credit), slots_(slots), received_(received) {}

  ARK_HOST_DEVICE uint64 received() const { return received_; }
  ARK_HOST_DEVICE uint64 slot() const { return slot_of(received_, slots_); }
  // Whether the next message is there; a load only where it is not known yet.
  ARK_HOST_DEVICE bool there() {
    if (known_ <= received_) known_ = load_acquire(*arrived_);
    return known_ > received_;
  }
  // How many messages are known to be there.
  ARK_HOST_DEVICE uint64 ready() const { return known_ - received_; }
  // The next messages are done with: behind all loads from their slots.
  ARK_HOST_DEVICE void count(uint64 messages = 1) { received_ += messages; }
  ARK_HOST_DEVICE void tell() const { store_after_loads(*credit_, received_); }

 private:
  const uint64* arrived_ = nullptr;
  uint64* credit_ = nullptr;
  uint64 slots_ = 1, received_ = 0, known_ = 0;
};

}  // namespace ark::protocol

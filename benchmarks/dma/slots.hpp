// The two words of a channel, which say who may write a slot and which messages have arrived. Host and device code.
//
// A channel is a ring of slots in the receiver's memory. `arrived`, next to them, counts messages that have arrived;
// only the sender writes it. `credit`, in the sender's memory, counts messages consumed; only the receiver writes it.
// Both only grow. Messages are numbered from 0 and use slot number % slots.
//
// Ordering. Bytes are written before `arrived` is stored with release, and read after it is loaded with acquire. A slot
// is rewritten after an acquire of a credit that the receiver stored when it had read the slot. That store must be
// ordered after loads, not after stores. On a device it is a relaxed store after loads whose values were used, which a
// later write cannot undo (the same holds in cuda/ring.cuh). On the host it is a release, the weakest order that C++
// offers for this.
//
// Liveness. A sender waits for messages one ring older than its own, and the receiver consumes messages in order.
#pragma once

#include "protocol/counter.hpp"

namespace ark::protocol {

// The state of one end in both directions. It stays in the end's own memory between launches, so that a graph's replay
// needs no host.
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

// A sender driven by many threads checks credits once per half ring. So all threads know, without communication, which
// message checks and what it waits for. Returns 0 if the message needs no check.
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

  // The number and the slot of the next message.
  ARK_HOST_DEVICE uint64 sent() const { return sent_; }
  ARK_HOST_DEVICE uint64 slot() const { return slot_of(sent_, slots_); }

  // Whether that many messages were consumed. Loads only if it is not known yet.
  ARK_HOST_DEVICE bool taken(uint64 messages) {
    if (known_ < messages) known_ = load_acquire(*credit_);
    return known_ >= messages;
  }
  // Whether the next message's slot may be written.
  ARK_HOST_DEVICE bool writable() { return taken(needed_to_write(sent_, slots_)); }
  // The credit that the next message must wait for, if credits are checked once per half ring.
  ARK_HOST_DEVICE uint64 due() const { return credit_of_half(sent_, slots_); }

  // Counts one more message. The receiver sees it after tell(), by the thread that has its bytes ordered before.
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
  // Whether the next message has arrived. Loads only if it is not known yet.
  ARK_HOST_DEVICE bool there() {
    if (known_ <= received_) known_ = load_acquire(*arrived_);
    return known_ > received_;
  }
  // The number of messages known to have arrived.
  ARK_HOST_DEVICE uint64 ready() const { return known_ - received_; }
  // Counts messages as consumed. Call after all loads from their slots.
  ARK_HOST_DEVICE void count(uint64 messages = 1) { received_ += messages; }
  ARK_HOST_DEVICE void tell() const { store_after_loads(*credit_, received_); }

 private:
  const uint64* arrived_ = nullptr;
  uint64* credit_ = nullptr;
  uint64 slots_ = 1, received_ = 0, known_ = 0;
};

}  // namespace ark::protocol

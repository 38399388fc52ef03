// A one-way channel over shared memory: one writer, one or more readers, `slots` slots of `slot_bytes`.
//
// Every ark channel has four operations: put (copy bytes into the current message), signal (publish it), wait (for a
// message) and flush (until all published messages are taken). Messages are numbered from 0, and message n is in slot n
// % slots. All readers share a put, so a broadcast costs one copy. Memory ordering is that of protocol/counter.hpp:
// only the writer advances `published`, only a reader its `released`, and both only grow.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "collectives/cpu/wait.hpp"
#include "protocol/counter.hpp"

namespace ark {

struct ChannelLayout {
  protocol::Counter* published = nullptr;
  struct Reader {
    protocol::Counter* released;
    int rank;
  };
  std::vector<Reader> readers;
  std::byte* data = nullptr;
  size_t slot_bytes = 0;
  uint64_t slots = 0;
  int writer = -1;
};

class Channel {
 public:
  explicit Channel(ChannelLayout layout) : layout_(std::move(layout)) {}

  size_t slot_bytes() const { return layout_.slot_bytes; }
  uint64_t slots() const { return layout_.slots; }
  int writer() const { return layout_.writer; }

  // Writer. open() waits until message n's slot is free and returns it for writing in place.
  std::byte* open(uint64_t message, Waiter& waiter) {
    const uint64_t needed = protocol::needed_to_write(message, layout_.slots);
    for (const auto& reader : layout_.readers) waiter.until(*reader.released, needed, reader.rank);
    return slot(message);
  }
  bool writable(uint64_t message) const {
    const uint64_t needed = protocol::needed_to_write(message, layout_.slots);
    for (const auto& reader : layout_.readers) {
      if (!protocol::reached(*reader.released, needed)) return false;
    }
    return true;
  }
  void put(uint64_t message, size_t offset, const void* source, size_t bytes) {
    std::memcpy(slot(message) + offset, source, bytes);
  }
  // Publishes everything put up to and including `message` to readers of the counter.
  void signal(uint64_t message) { advance_and_wake(*layout_.published, message + 1); }
  // Waits until all readers have released every message before `message`.
  void flush(uint64_t message, Waiter& waiter) {
    for (const auto& reader : layout_.readers) waiter.until(*reader.released, message, reader.rank);
  }

  // Reader.
  const std::byte* wait(uint64_t message, Waiter& waiter) {
    waiter.until(*layout_.published, message + 1, layout_.writer);
    return slot(message);
  }
  bool readable(uint64_t message) const { return protocol::reached(*layout_.published, message + 1); }
  // The counter that a channel's only reader advances.
  protocol::Counter* released_by_reader() const { return layout_.readers.front().released; }

  std::byte* slot(uint64_t message) const {
    return layout_.data + protocol::slot_of(message, layout_.slots) * layout_.slot_bytes;
  }

 private:
  ChannelLayout layout_;
};

}  // namespace ark

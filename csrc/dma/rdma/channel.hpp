// A reliable RDMA connection to one peer: put, put_with_signal, wait, flush.
//
// A put writes into the peer's memory. Puts arrive in call order. A signal is a write with immediate data: it arrives
// after all earlier puts and consumes one receive at the peer. Each side has a registered inbox of `slots` slots, which
// the peer writes to, and an outbox of the same size to write from. A failure is final: the queue pair enters its error
// state, outstanding requests are dropped and the peer can no longer write here. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "dma/rdma/queue_pair.hpp"

namespace ark::rdma {

// Credits guarantee that every signal finds a receive. Each side posts `slots` receives before it connects. A signal
// takes a credit, and release() makes the receiver owe it back. Owed credits travel with the next signal in the other
// direction, or in a signal of their own once half of them are owed. The last credit is reserved for that signal, so
// two sides that only send never deadlock.
//
// Requests are posted in linked batches, as credits and the send queue allow. The last request of a batch asks for a
// completion, and so does every kSignalEvery-th. Completions of a connection arrive in order, so one covers all
// requests before it.
class Channel final : public Sink {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t kMostValue = (1u << 24) - 1;  // of a signal

  struct Shape {
    uint32_t slots = 64, slot_bytes = 4096;
  };

  Channel(std::shared_ptr<Engine> engine, int rank, int peer, int size, Shape shape);
  ~Channel() override;

  Endpoint endpoint() const;  // the record that the peer needs to connect
  // Throws Error(invalid_argument) if the record is not this peer's, Error(system) if the NIC refuses.
  void connect(const Endpoint& peer, int mtu);

  // The engine's thread calls this without locks after signals, completions or a failure. Set it before connect().
  void on_change(std::function<void()> changed) { changed_ = std::move(changed); }

  // `from` must stay alive and registered (key) until done(returned number). `to` and remote_key are the peer's.
  uint64_t put(const void* from, uint32_t key, size_t bytes, uint64_t to, uint32_t remote_key);
  uint64_t put_with_signal(const void* from, uint32_t key, size_t bytes, uint64_t to, uint32_t remote_key,
                           uint32_t value);
  uint64_t signal(uint32_t value) { return put_with_signal(nullptr, 0, 0, 0, 0, value); }
  // Posts an empty write if nothing else is outstanding. It fails if the peer does not answer.
  void probe();

  // Returns the oldest signal's value, or nothing if none has arrived. Call release() once its slot is free again.
  std::optional<uint32_t> take();
  uint32_t wait(Clock::time_point deadline);  // throws Error(timeout) or the failure
  void release();

  bool done(uint64_t number) const;
  void flush(Clock::time_point deadline);  // waits until all puts are done; throws Error(timeout) or the failure
  std::optional<Error> failure() const;
  void fail(const Error& error);
  // After a failure, waits until the NIC has returned every request. Returns false at the deadline.
  bool drain(Clock::time_point deadline);

  // Slots of the peer's inbox, for put(); then slots of this side's memory.
  uint64_t remote_slot(uint64_t index) const { return remote_.inbox + index % shape_.slots * shape_.slot_bytes; }
  uint32_t remote_key() const { return remote_.key; }
  std::byte* inbox(uint64_t index) { return inbox_ + index % shape_.slots * shape_.slot_bytes; }
  std::byte* outbox(uint64_t index) { return outbox_ + index % shape_.slots * shape_.slot_bytes; }
  uint32_t outbox_key() const { return outbox_use_.local_key(); }
  const Shape& shape() const { return shape_; }
  int peer() const { return peer_; }

  struct Counts {
    uint64_t posted = 0, calls = 0, asked = 0;  // requests; calls of post_send; requests that asked for a completion
    uint64_t credit_signals = 0;
    uint32_t credits = 0, least_credits = 0;
  };
  Counts counts() const;

  void completions() override;
  void device_failed(const Error& error) override;

 private:
  struct Request {
    const void* from;
    uint64_t to;
    uint32_t bytes, key, remote_key, value;
    bool signals;
    uint64_t number;  // 0: a request of the channel itself
  };
  uint64_t enqueue(const void* from, uint32_t key, size_t bytes, uint64_t to, uint32_t remote_key, bool signals,
                   uint32_t value);
  void post_waiting();
  void post(std::vector<Request>& batch);
  void post_receives(uint32_t count);
  void take_one(const ibv_wc& completion);
  void fail_locked(const Error& error);
  uint64_t outstanding() const { return posted_ - completed_; }

  const std::shared_ptr<Engine> engine_;
  const int rank_, peer_, size_;
  const Shape shape_;
  std::function<void()> changed_;
  std::unique_ptr<std::byte[], void (*)(std::byte*)> memory_;
  std::byte *inbox_ = nullptr, *outbox_ = nullptr;
  Registrations::Use inbox_use_, outbox_use_;
  int send_room_ = 0;
  ibv_cq* queue_ = nullptr;
  std::unique_ptr<QueuePair> pair_;
  Endpoint remote_;

  mutable std::mutex mutex_;  // guards the members below and the queue pair
  std::condition_variable something_;
  std::deque<Request> waiting_;
  std::deque<uint32_t> arrived_;
  std::vector<uint64_t> numbers_;  // number of each posted request, by its place in the send queue
  uint64_t last_number_ = 0, done_number_ = 0;
  uint64_t posted_ = 0, completed_ = 0;  // counts of requests
  uint64_t since_asked_ = 0;
  uint32_t credits_ = 0, owed_ = 0, least_credits_ = 0, receives_ = 0;
  bool connected_ = false;
  std::optional<Error> failure_;
  Counts counts_;
};

}  // namespace ark::rdma

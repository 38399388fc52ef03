// A connection to one peer over RDMA: put, put_with_signal, wait, flush.
//
// A put writes into the peer's memory, in the order of the calls; a signal (a write with immediate data) follows what
// was put before it and takes one receive of the peer's. Credits see to it that there is one: each side posts `slots`
// receives before the other may send, a signal takes a credit, and release() gives it back, with the next signal that
// goes the other way or, when half of them are owed, with a signal of its own. The last credit is for that one alone:
// it returns at least half of the others, of which the peer's answers return it, so two that only send never stop.
//
// Requests are posted together, linked, as credits and the send queue's length allow; of those posted together the last
// asks for a completion, and every kSignalEvery-th. Completions of one connection come in order, so one stands for all
// before it. A failure is final: the queue pair is in its error state, nothing that is still outstanding will be
// carried out, and the peer can write here no more. Thread-safe. Each side has an inbox of `slots` slots that the peer
// writes to and an outbox as large to write from, both registered.
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

class Channel final : public Sink {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t kMostValue = (1u << 24) - 1;  // of a signal

  struct Shape {
    uint32_t slots = 64, slot_bytes = 4096;
  };

  Channel(std::shared_ptr<Engine> engine, int rank, int peer, int size, Shape shape);
  ~Channel() override;

  Endpoint endpoint() const;  // what the peer must know
  // Error(invalid_argument) for a record that is not this peer's; Error(system) where the NIC refuses.
  void connect(const Endpoint& peer, int mtu);

  // Called on the engine's thread, without locks, after signals, completions or a failure. To be set before connect().
  void on_change(std::function<void()> changed) { changed_ = std::move(changed); }

  // Memory that lives and is registered (key) until done(the number returned). to, remote_key: the peer's.
  uint64_t put(const void* from, uint32_t key, size_t bytes, uint64_t to, uint32_t remote_key);
  uint64_t put_with_signal(const void* from, uint32_t key, size_t bytes, uint64_t to, uint32_t remote_key,
                           uint32_t value);
  uint64_t signal(uint32_t value) { return put_with_signal(nullptr, 0, 0, 0, 0, value); }
  // A write of nothing, when nothing else is outstanding: fails where the peer does not answer.
  void probe();

  // The next signal's value, in the order in which they were sent; none yet; release() when its slot is free again.
  std::optional<uint32_t> take();
  uint32_t wait(Clock::time_point deadline);  // Error(timeout), or the failure
  void release();

  bool done(uint64_t number) const;
  void flush(Clock::time_point deadline);  // until all puts are done; Error(timeout), or the failure
  std::optional<Error> failure() const;
  void fail(const Error& error);
  // After a failure, until the NIC has given back everything that it had; false at the deadline.
  bool drain(Clock::time_point deadline);

  // Slot of the peer's inbox, for put(); slots of this side's.
  uint64_t remote_slot(uint64_t index) const { return remote_.inbox + index % shape_.slots * shape_.slot_bytes; }
  uint32_t remote_key() const { return remote_.key; }
  std::byte* inbox(uint64_t index) { return inbox_ + index % shape_.slots * shape_.slot_bytes; }
  std::byte* outbox(uint64_t index) { return outbox_ + index % shape_.slots * shape_.slot_bytes; }
  uint32_t outbox_key() const { return outbox_use_.local_key(); }
  const Shape& shape() const { return shape_; }
  int peer() const { return peer_; }

  struct Counts {
    uint64_t posted = 0, calls = 0, asked = 0;  // requests; calls of post_send; of them with a completion
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
    uint64_t number;  // 0: of the channel's own
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

  mutable std::mutex mutex_;  // of what follows, and of the queue pair
  std::condition_variable something_;
  std::deque<Request> waiting_;
  std::deque<uint32_t> arrived_;
  std::vector<uint64_t> numbers_;  // of the requests that are posted, by their place in the send queue
  uint64_t last_number_ = 0, done_number_ = 0;
  uint64_t posted_ = 0, completed_ = 0;  // requests to the NIC
  uint64_t since_asked_ = 0;
  uint32_t credits_ = 0, owed_ = 0, least_credits_ = 0, receives_ = 0;
  bool connected_ = false;
  std::optional<Error> failure_;
  Counts counts_;
};

}  // namespace ark::rdma

// Messages between the ranks of a group over RDMA: send, receive and receive from any rank. Each can be waited for or
// cancelled.
//
// Messages of one tag between two ranks match in order: the n-th send meets the n-th receive. A small message goes
// through a slot of the peer's inbox and is copied out. For a large one, the receiver registers and announces its
// memory and the sender writes straight into it. Both ends choose by the size, on which they must agree. A tag is
// received either from any rank, and then only small messages, or always from named ranks. Thread-safe.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "dma/rdma/channel.hpp"
#include "shm/key_value.hpp"

namespace ark::rdma {

class Messages;

// The state of a message that the carrying thread works on.
struct MessageState {
  enum class Stage { waiting, moving, done, failed };
  const bool sends;
  int peer;  // of a receive from any rank: the sender, once known
  const bool any;
  const int32_t tag;
  void* const data;
  const size_t bytes;
  Stage stage = Stage::waiting;
  uint64_t index = 0;   // among the messages of its tag
  uint64_t number = 0;  // of the channel's request that moves the data
  Registrations::Use use;
  std::optional<Error> error;
};

// A message in flight. The destructor cancels it.
class Message {
 public:
  using Clock = std::chrono::steady_clock;
  Message(std::shared_ptr<Messages> of, std::shared_ptr<MessageState> state)
      : of_(std::move(of)), state_(std::move(state)) {}
  ~Message() { abort(); }
  // Returns false at the deadline. Throws the message's failure.
  bool wait_until(Clock::time_point deadline);
  void abort();  // from any thread
  int source() const { return state_->peer; }

 private:
  const std::shared_ptr<Messages> of_;
  const std::shared_ptr<MessageState> state_;
};

// A peer is connected on the first message to or from it. A thread creates the channel, publishes its endpoint in the
// store and looks for the peer's, while the message waits. A rank that waits for a silent peer sends it an empty write
// from time to time, which fails if the peer is gone. A peer that closes says so, and messages awaited from it fail.
//
// Small messages that arrive before their receive are kept, as are announcements that arrive before their send. At most
// Setup::most_kept are kept per peer; then its slots stay full, its credits run out and its sends wait. A rank that
// awaits another message of that peer, or sends to it, must read past them, so it keeps up to kWhereAwaited times as
// many before the connection fails.
//
// Cancelling a message whose memory the NIC may still access ends its connection. After abort() or the destructor
// returns, that memory is no longer touched. Lock order: the engine's lock, mutex_, a channel's lock.
class Messages : public std::enable_shared_from_this<Messages> {
 public:
  using Clock = std::chrono::steady_clock;
  using MessagePtr = std::unique_ptr<Message>;

  struct Setup {
    int rank = 0, size = 0;
    int mtu = 1024;
    std::string prefix;                          // of keys in the store; unique to this start of the group
    std::chrono::milliseconds timeout{1800000};  // for a peer to connect
    std::chrono::milliseconds probe{500};        // wait before a silent peer is probed
    size_t most_kept = 1024;                     // most unexpected messages per peer, of one slot each
    Channel::Shape shape;
  };
  static constexpr size_t kWhereAwaited = 16;
  Messages(std::shared_ptr<Engine> engine, std::unique_ptr<KeyValueStore> store, Setup setup);
  ~Messages();

  // The memory must stay unchanged (for a receive: unused) until the message has completed or was cancelled.
  MessagePtr send(int peer, int32_t tag, const void* data, size_t bytes);
  MessagePtr receive(int peer, int32_t tag, void* data, size_t bytes);
  MessagePtr receive_any(int32_t tag, void* data, size_t bytes);

  void abort(const Error& error);                  // fails all waiting and all later messages
  void close(std::chrono::milliseconds patience);  // waits for sends to arrive, up to `patience`; idempotent

  size_t most_small() const { return setup_.shape.slot_bytes - sizeof(Header); }  // limit of the inbox
  int connections() const;
  size_t kept(int peer) const;  // unexpected messages of this peer
  std::optional<Channel::Counts> counts(int peer) const;
  const std::string& device() const { return engine_->device()->port().device; }

 private:
  friend class Message;
  using State = std::shared_ptr<MessageState>;
  using Place = std::pair<int32_t, uint64_t>;  // tag and index
  // The header of every slot.
  struct Header {
    enum Kind : uint32_t { small = 1, announcement = 2, written = 3, goodbye = 4 };
    uint32_t kind;
    int32_t tag;
    uint64_t index, bytes, address;
    uint32_t key, reserved;
  };
  static_assert(sizeof(Header) == 40);
  struct Peer {
    std::shared_ptr<Channel> channel;  // null until connected
    bool wanted = false, left = false;
    std::optional<Error> failure;
    std::map<int32_t, uint64_t> sent, received;  // messages begun, by tag
    std::deque<Header> controls;                 // headers that go out before ...
    std::deque<State> small_sends;               // ... these messages
    std::map<Place, State> large_sends, receives;
    std::map<Place, Header> announced;  // of receives whose sends have not begun
    std::map<Place, std::vector<std::byte>> aside;
    std::deque<State> moving;            // large sends that the NIC is writing
    std::vector<uint64_t> slot_numbers;  // the request that last used each slot of the outbox
    uint64_t slots_sent = 0, slots_taken = 0;
    size_t kept() const { return aside.size() + announced.size(); }
  };

  bool wait_until(MessageState& message, Clock::time_point deadline);
  void refuse_full(const MessageState& message);
  void give_up(const State& message);

  // These require mutex_.
  Peer& peer_of(int rank);
  State begin(bool sends, int peer, bool any, int32_t tag, void* data, size_t bytes);
  void announce(Peer& peer, const State& message);
  bool put_slot(Peer& peer, const Header& header, const void* data);
  void pump(Peer& peer);
  void begin_large(Peer& peer, const State& message, const Header& target);
  bool awaits(const Peer& peer) const;
  void take_slots(int rank, Peer& peer, bool all = false);
  bool take_slot(int rank, Peer& peer, uint32_t bytes);
  bool may_keep(int rank, Peer& peer);
  void deliver(int rank, Peer& peer, const Header& header, const std::byte* data);
  void fill(MessageState& message, int rank, const std::byte* data, size_t bytes);
  void finish(MessageState& message);
  void fail(MessageState& message, const Error& error);
  void fail_peer(Peer& peer, const Error& error);
  void leave(int rank, Peer& peer);
  Error error(ErrorKind kind, int peer, const std::string& what, const std::string& remedy) const;

  void changed(int rank);  // on the engine's thread
  void connect_peers();    // runs on the connecting thread
  std::string key(int from, int to) const;

  const std::shared_ptr<Engine> engine_;
  const std::unique_ptr<KeyValueStore> store_;  // only the connecting thread uses it
  const Setup setup_;

  mutable std::mutex mutex_;  // guards the members below and every MessageState
  std::condition_variable something_, wanted_;
  std::map<int, Peer> peers_;
  std::map<int32_t, std::deque<State>> any_;  // receives from any rank, by tag
  std::deque<int> to_connect_;
  std::optional<Error> failure_;
  bool closing_ = false;
  std::thread connecting_;
};

}  // namespace ark::rdma

// Messages between the ranks of a group over RDMA: send, receive and receive from any rank. Each can be waited for or
// cancelled.
//
// Messages of one tag between two ranks match in order: the n-th send meets the n-th receive. A small message goes
// through a slot of the peer's inbox and is copied out. For a large one, the receiver registers and announces its
// memory and the sender writes straight into it. Both ends choose by the size, on which they must agree. A tag is
// received either from any rank, and then only small messages, or always from named ranks. A put writes into memory
// whose address and keys the peer has published, without a receive; a signal after it is counted at the peer.
// Thread-safe.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
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

// Memory that is registered with every rail, and the keys with which a peer may write to it.
using Keys = std::array<uint32_t, kMostRails>;
struct Held {
  std::array<Registrations::Use, kMostRails> rails;
  Keys remote_keys() const {
    Keys keys{};
    for (size_t i = 0; i < rails.size(); ++i) keys[i] = rails[i] ? rails[i].remote_key() : 0;
    return keys;
  }
  void reset() {
    for (auto& use : rails) use.reset();
  }
  Held again() const {
    Held held;
    for (size_t i = 0; i < rails.size(); ++i) held.rails[i] = rails[i].again();
    return held;
  }
  explicit operator bool() const { return static_cast<bool>(rails[0]); }
};

// The state of a message that the carrying thread works on.
struct MessageState {
  // A write of it that is under way.
  struct Part {
    int rail;
    const void* from;
    size_t bytes;
    uint64_t to, number;  // of the channel's request
  };
  enum class Stage { waiting, moving, done, failed };
  const bool sends;
  int peer;  // of a receive from any rank: the sender, once known
  const bool any;
  const int32_t tag;
  void* const data;
  const size_t bytes;
  enum class Kind { message, put, signal };
  const Kind kind = Kind::message;
  const Where where = Where::host;
  uint64_t to = 0;  // the peer's address and keys
  Keys keys{};
  Stage stage = Stage::waiting;
  uint64_t index = 0;  // among the messages of its tag
  std::vector<Part> parts;
  Held held;
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
  // The same without words about a peer that takes nothing: who waits in steps looks at other things in between.
  bool wait_a_while(Clock::time_point until);
  bool done() const;  // or failed
  void abort();       // from any thread
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
    size_t least_striped = 256 << 10;  // bytes of a message that goes along all rails
  };
  static constexpr size_t kWhereAwaited = 16;
  // One engine a rail; as many on every rank.
  Messages(std::vector<std::shared_ptr<Engine>> rails, std::unique_ptr<KeyValueStore> store, Setup setup);
  Messages(std::shared_ptr<Engine> engine, std::unique_ptr<KeyValueStore> store, Setup setup)
      : Messages(std::vector{std::move(engine)}, std::move(store), std::move(setup)) {}
  ~Messages();

  // The memory must stay unchanged (for a receive: unused) until the message has completed or was cancelled.
  // GPU memory takes only messages of more than most_small() bytes.
  MessagePtr send(int peer, int32_t tag, const void* data, size_t bytes, Where where = Where::host);
  MessagePtr receive(int peer, int32_t tag, void* data, size_t bytes, Where where = Where::host);
  MessagePtr receive_any(int32_t tag, void* data, size_t bytes);

  // Counts signals of a window from now on and connects to its peers, which must call this too. `heard` is called with
  // a peer and its count at each signal, on any thread and under this object's lock; it must not block. A window with
  // it awaits signals all the time: what stands before one in a peer's slots is taken, however much there is.
  using Heard = std::function<void(int peer, uint64_t count)>;
  void open_window(int32_t window, const std::vector<int>& peers, Heard heard = {});
  void close_window(int32_t window);
  // Writes to the peer's memory at `to`, which the peer has registered (keys). Done once the bytes are there.
  MessagePtr put(int peer, const void* data, size_t bytes, uint64_t to, const Keys& keys, Where where = Where::host);
  MessagePtr put(int peer, const void* data, size_t bytes, uint64_t to, const Keys& keys, Held held);  // of the data
  // Signals the peer after all earlier puts. Done once the NIC has the signal.
  MessagePtr signal(int peer, int32_t window);
  uint64_t signals(int peer, int32_t window) const;  // received since the window was opened
  // Waits for that many signals. Returns false at the deadline. Throws the error of a failed connection.
  bool wait_signals(int peer, int32_t window, uint64_t count, Clock::time_point deadline);
  // Sends the peer an empty write, unless it has said goodbye. Throws the error of a failed connection, which an
  // earlier probe may have found.
  void probe(int peer);
  // Registers memory with every rail, or only with the first. Throws Error(system) if a device refuses.
  Held hold(const void* data, size_t bytes, bool every_rail = true, Where where = Where::host);
  const std::shared_ptr<Engine>& engine(int rail) const { return engines_[rail]; }

  void abort(const Error& error);                  // fails all waiting and all later messages
  void close(std::chrono::milliseconds patience);  // waits for sends to arrive, up to `patience`; idempotent

  size_t most_small() const { return setup_.shape.slot_bytes - sizeof(Header); }  // limit of the inbox
  int connections() const;
  size_t kept(int peer) const;  // unexpected messages of this peer
  std::optional<Channel::Counts> counts(int peer, int rail = 0) const;
  int rails() const { return static_cast<int>(engines_.size()); }
  std::string device() const;  // the names of all rails
  // Why a rail is no longer used with some peer; empty if all rails are used.
  std::string trouble() const;

 private:
  friend class Message;
  using State = std::shared_ptr<MessageState>;
  using Place = std::pair<int32_t, uint64_t>;  // tag and index
  // The header of every slot.
  struct Header {
    enum Kind : uint32_t {
      small = 1,
      announcement = 2,
      written = 3,
      goodbye = 4,
      signal = 5,
      rail_down = 6,
      rail_moved = 7
    };
    uint32_t kind;
    int32_t tag;
    uint64_t index, bytes, address;
    uint32_t key, reserved;
  };
  static_assert(sizeof(Header) == 40);
  // With what stands behind it where there are several rails: an announcement's further keys; else how many signals
  // have been sent on each further rail before.
  struct Control {
    Header header;
    std::array<uint32_t, kMostRails - 1> words{};
  };
  // A further one of a peer's.
  struct Rail {
    std::shared_ptr<Channel> channel;
    uint32_t sent = 0, arrived = 0;          // signals of parts
    bool proven = false;                     // the peer was heard on it
    bool down = false, peer_down = false;    // the end here, and there, is closed
    bool moved = false, peer_moved = false;  // what was on it goes, or has come, by the first
    std::string trouble;
  };
  struct Peer {
    std::shared_ptr<Channel> channel;  // null until connected
    bool wanted = false, left = false;
    std::optional<Error> failure;
    std::map<int32_t, uint64_t> sent, received;  // messages begun, by tag
    std::vector<Rail> rails;                     // all but the first
    std::deque<Control> controls;                // headers that go out before ...
    std::deque<State> small_sends;               // ... these messages
    std::deque<State> one_sided;                 // puts and signals that have not begun
    std::map<int32_t, uint64_t> signals;         // received signals, by window
    int signal_waits = 0;                        // threads that wait for a signal
    std::map<Place, State> large_sends, receives;
    std::map<Place, Control> announced;  // of receives whose sends have not begun
    std::map<Place, std::vector<std::byte>> aside;
    std::deque<Control> landing;         // headers that wait for parts on other rails, in order
    std::deque<State> moving;            // large sends that the NIC is writing
    std::vector<uint64_t> slot_numbers;  // the request that last used each slot of the outbox
    uint64_t slots_sent = 0, slots_taken = 0;
    size_t kept() const { return aside.size() + announced.size() + landing.size(); }
  };

  bool wait_until(MessageState& message, Clock::time_point deadline, bool tells_why);
  bool done(const MessageState& message) const;
  void refuse_full(const MessageState& message);
  void give_up(const State& message);

  // These require mutex_.
  Peer& peer_of(int rank);
  State begin(bool sends, int peer, bool any, int32_t tag, void* data, size_t bytes, Where where = Where::host);
  MessagePtr begin_one_sided(const State& message);
  bool pump_one_sided(Peer& peer);
  void announce(Peer& peer, const State& message);
  bool put_slot(Peer& peer, const Control& control, const void* data = nullptr);
  void pump(Peer& peer);
  void begin_large(Peer& peer, const State& message, const Control& target);
  void begin_parts(Peer& peer, const State& message);
  bool all_parts_done(const Peer& peer, const MessageState& message) const;
  size_t words_bytes() const { return (engines_.size() - 1) * sizeof(uint32_t); }
  Control with_counts(const Peer& peer, const Header& header) const;
  bool landed(const Peer& peer, const Control& control) const;
  void land(int rank, Peer& peer);
  void arrive(int rank, Peer& peer, const Header& header);
  void take_rail(int rank, Peer& peer, int rail);
  void rail_failed(Peer& peer, int rail, const std::string& why);
  void move_rail(Peer& peer, int rail);
  std::vector<std::shared_ptr<Channel>> channels_of(const Peer& peer) const;
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

  void changed(int rank, int rail);  // on the engine's thread
  void connect_peers();              // runs on the connecting thread
  std::string key(int from, int to) const;

  const std::vector<std::shared_ptr<Engine>> engines_;
  const std::unique_ptr<KeyValueStore> store_;  // only the connecting thread uses it
  const Setup setup_;

  mutable std::mutex mutex_;  // guards the members below and every MessageState
  std::condition_variable something_, wanted_;
  std::map<int, Peer> peers_;
  std::map<int32_t, std::deque<State>> any_;  // receives from any rank, by tag
  struct Window {
    std::vector<int> peers;
    Heard heard;
  };
  std::map<int32_t, Window> windows_;
  std::deque<int> to_connect_;
  std::optional<Error> failure_;
  bool closing_ = false;
  std::thread connecting_;
};

}  // namespace ark::rdma

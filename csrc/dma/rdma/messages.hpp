// Messages between the ranks of a group over RDMA: send, receive, receive from anyone; each can be waited for, given
// up.
//
// Messages of one tag between two ranks arrive in the order in which they are sent: the n-th that is sent meets the
// n-th receive. Small ones are written into the peer's inbox, a slot each, and copied out of it. Of large ones the
// receiver registers its memory and announces it, and the sender writes straight there; which it is both know from the
// size, on which they must agree. A tag is received from anyone, and then small, or from one rank each time; never
// both.
//
// A small message that nobody has asked for yet is set aside, as is the announcement of a receive whose send has not
// begun. Of one peer up to Setup::most_kept are kept; then its slots stay full, so that its credits end and its sends
// wait. Who waits for that peer's message of another tag, or sends to it, must hear what comes behind: then more are
// kept, up to kWhereAwaited times as many, beyond which the connection fails.
//
// A peer is connected to at the first message to or from it: a thread makes the channel, publishes its endpoint in the
// store and looks for the peer's, while the message waits. Who waits for a peer that stays silent sends it an empty
// write now and then, which fails when it is gone. A peer that closes says so, and what is still awaited of it ends.
//
// One-sided: a put writes into memory whose address and key the peer has told, a signal behind it is counted there, by
// window. Both go in the order of their calls (messages_one_sided.cpp).
//
// With several NICs (rails) a pair of ranks has a connection on each. All goes by the first, but for parts of large
// messages and puts, each of which ends with a signal on its rail; the word that a message is there says how many of
// those the peer must have heard, since rails keep no order between them. A rail is used once both sides have heard
// each other on it. One that fails is left out: both ends close theirs, then its parts are written once more by the
// first (messages_rails.cpp). The first rail's failure is the connection's.
//
// A message that is given up while the NIC may write to or read from its memory takes its connection with it: nothing
// is touched any more once abort() or the destructor has returned. Thread-safe. Locks: the engine's, then ours, then a
// channel's.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "dma/rdma/channel.hpp"
#include "shm/key_value.hpp"

namespace ark::rdma {

class Messages;

// Memory as it is registered with every rail, and the keys by which a peer may write to it.
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
  explicit operator bool() const { return static_cast<bool>(rails[0]); }
};

// What a message is to the thread that carries it.
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
  int peer;  // of a receive from anyone: the sender, once it has come
  const bool any;
  const int32_t tag;
  void* const data;
  const size_t bytes;
  enum class Kind { message, put, signal };
  const Kind kind = Kind::message;
  uint64_t to = 0;  // the peer's address and keys
  Keys keys{};
  Stage stage = Stage::waiting;
  uint64_t index = 0;  // among those of its tag
  std::vector<Part> parts;
  Held held;
  std::optional<Error> error;
};

// A message that was begun; gives it up when it goes.
class Message {
 public:
  using Clock = std::chrono::steady_clock;
  Message(std::shared_ptr<Messages> of, std::shared_ptr<MessageState> state)
      : of_(std::move(of)), state_(std::move(state)) {}
  ~Message() { abort(); }
  // False at the deadline. Throws what the message failed with.
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

class Messages : public std::enable_shared_from_this<Messages> {
 public:
  using Clock = std::chrono::steady_clock;
  using MessagePtr = std::unique_ptr<Message>;

  struct Setup {
    int rank = 0, size = 0;
    int mtu = 1024;
    std::string prefix;                          // of keys in the store; of this start of this group alone
    std::chrono::milliseconds timeout{1800000};  // for a peer to connect
    std::chrono::milliseconds probe{500};        // of waiting, before a silent peer is asked
    size_t most_kept = 1024;                     // unexpected messages of a peer; each of a slot's bytes at most
    Channel::Shape shape;
    size_t least_striped = 256 << 10;  // bytes of a message that goes along all rails
  };
  static constexpr size_t kWhereAwaited = 16;
  // One engine a rail; as many on every rank.
  Messages(std::vector<std::shared_ptr<Engine>> rails, std::unique_ptr<KeyValueStore> store, Setup setup);
  Messages(std::shared_ptr<Engine> engine, std::unique_ptr<KeyValueStore> store, Setup setup)
      : Messages(std::vector{std::move(engine)}, std::move(store), std::move(setup)) {}
  ~Messages();

  // The memory stays as it is (of a receive: is nobody else's) until the message has been waited for or given up.
  MessagePtr send(int peer, int32_t tag, const void* data, size_t bytes);
  MessagePtr receive(int peer, int32_t tag, void* data, size_t bytes);
  MessagePtr receive_any(int32_t tag, void* data, size_t bytes);

  // Signals of a window count from here on, and its peers, which call it too, are connected.
  void open_window(int32_t window, const std::vector<int>& peers);
  void close_window(int32_t window);
  // The peer's memory at `to` is registered by it (keys). Done: it is there.
  MessagePtr put(int peer, const void* data, size_t bytes, uint64_t to, const Keys& keys);
  // Comes behind what was put before. Done: the NIC has it.
  MessagePtr signal(int peer, int32_t window);
  uint64_t signals(int peer, int32_t window) const;  // that have come, since the window was opened
  // Until so many have come; false at the deadline. Throws what the connection failed with.
  bool wait_signals(int peer, int32_t window, uint64_t count, Clock::time_point deadline);
  // With every rail, or with the first alone. Error(system) where one refuses.
  Held hold(const void* data, size_t bytes, bool every_rail = true);

  void abort(const Error& error);                  // all that waits, and all that begins later, ends with it
  void close(std::chrono::milliseconds patience);  // what was sent arrives first, where it can; idempotent

  size_t most_small() const { return setup_.shape.slot_bytes - sizeof(Header); }  // bytes that go through the inbox
  int connections() const;
  size_t kept(int peer) const;  // unexpected messages of it
  std::optional<Channel::Counts> counts(int peer, int rail = 0) const;
  int rails() const { return static_cast<int>(engines_.size()); }
  std::string device() const;  // its name; of several rails: all names
  // Why rails are not used any more, or not by all peers; empty: all are.
  std::string trouble() const;

 private:
  friend class Message;
  using State = std::shared_ptr<MessageState>;
  using Place = std::pair<int32_t, uint64_t>;  // tag and index
  // What stands at the beginning of a slot.
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
    std::shared_ptr<Channel> channel;  // once connected
    bool wanted = false, left = false;
    std::optional<Error> failure;
    std::map<int32_t, uint64_t> sent, received;  // messages begun, by tag
    std::vector<Rail> rails;                     // the second and further ones
    std::deque<Control> controls;                // to be written into the inbox, and before ...
    std::deque<State> small_sends;               // ... these
    std::deque<State> one_sided;                 // puts and signals that have not begun
    std::map<int32_t, uint64_t> signals;         // that have come, by window
    int signal_waits = 0;                        // threads that wait for one
    std::map<Place, State> large_sends, receives;
    std::map<Place, Control> announced;  // of receives whose sends have not begun
    std::map<Place, std::vector<std::byte>> aside;
    std::deque<Control> landing;         // words of what may be under way on another rail, in their order
    std::deque<State> moving;            // large sends whose bytes are under way
    std::vector<uint64_t> slot_numbers;  // by slot of the outbox: the request that used it last
    uint64_t slots_sent = 0, slots_taken = 0;
    size_t kept() const { return aside.size() + announced.size() + landing.size(); }
  };

  bool wait_until(MessageState& message, Clock::time_point deadline, bool tells_why);
  bool done(const MessageState& message) const;
  void refuse_full(const MessageState& message);
  void give_up(const State& message);

  // Under mutex_.
  Peer& peer_of(int rank);
  State begin(bool sends, int peer, bool any, int32_t tag, void* data, size_t bytes);
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
  void connect_peers();              // the connecting thread
  std::string key(int from, int to) const;

  const std::vector<std::shared_ptr<Engine>> engines_;
  const std::unique_ptr<KeyValueStore> store_;  // the connecting thread's
  const Setup setup_;

  mutable std::mutex mutex_;  // of what follows, and of every MessageState
  std::condition_variable something_, wanted_;
  std::map<int, Peer> peers_;
  std::map<int32_t, std::deque<State>> any_;  // receives from anyone, by tag
  std::set<int32_t> windows_;
  std::deque<int> to_connect_;
  std::optional<Error> failure_;
  bool closing_ = false;
  std::thread connecting_;
};

}  // namespace ark::rdma

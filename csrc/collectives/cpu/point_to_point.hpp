// send and recv between the ranks of a group, over one shared-memory channel for each ordered pair.
//
// A channel carries messages whole and in order, each in frames of at most a slot. Matching is by (source, tag), in
// order among equal tags. send() never blocks: what does not fit into the channel now is pushed later, by whoever
// waits on any request of this group or by the background thread. A frame whose message nobody has asked for stays
// in the channel until some recv from that rank is pending; only then, to get past it, is its message set aside in
// heap memory. Any number of threads may post and wait.
//
// Everybody who waits sleeps on this rank's doorbell, which the peers ring after publishing a frame to it or
// releasing one of its own; the bytes themselves are ordered by the channel's counters.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives/cpu/channel.hpp"

namespace ark {

inline constexpr int kAnySource = -1;

struct Transfer {
  // Set by the poster.
  bool is_send = false;
  int peer = kAnySource;  // rank in the group; kAnySource: recv from whoever sends first
  int tag = 0;
  void* data = nullptr;
  size_t bytes = 0;
  OperationContext context;
  // Called once, without locks held, on some thread: null on success. For a recv, `source` then tells who sent.
  std::function<void(std::exception_ptr)> done;

  // Owned by PointToPoint.
  size_t moved = 0;
  int source = kAnySource;
  std::atomic<bool> finished{false};
};
using TransferPtr = std::shared_ptr<Transfer>;

class PointToPoint {
 public:
  // to[r] / from[r]: channels to and from rank r (own entries unused). `commit(r)` makes the slots of the channel to r
  // real memory, or throws. doorbell_of[r]: rank r's doorbell.
  PointToPoint(GroupHealth& health, std::vector<Channel> to, std::vector<Channel> from,
               std::vector<protocol::Counter*> doorbell_of, SpinPolicy policy, std::function<void(int)> commit);
  ~PointToPoint();

  void post(TransferPtr transfer);
  // Makes progress until the transfer is finished or `until` has passed; true when finished.
  bool wait(const Transfer& transfer, Clock::time_point until);
  // Fails everything pending with the group's error (after abort or at shutdown).
  void fail_all();
  void stop();  // joins the background thread; idempotent

 private:
  struct Unexpected {
    int tag;
    std::vector<std::byte> bytes;
    size_t arrived = 0;
    TransferPtr claimed;
  };
  struct Peer {
    std::deque<TransferPtr> sends;
    uint64_t next_out = 0, next_in = 0;
    bool committed = false;
    TransferPtr incoming;                     // the recv that the message being read goes to, or
    std::list<Unexpected>::iterator aside{};  // ... the place it is set aside in
    bool reading = false;
    bool discarding = false;
    size_t in_bytes = 0, in_moved = 0;
    std::list<Unexpected> unexpected;
  };
  using Finished = std::vector<std::pair<TransferPtr, std::exception_ptr>>;

  bool progress(Finished& finished);
  bool push(int peer, Finished& finished);
  bool pull(int peer, Finished& finished);
  bool wants_from(int peer) const;
  TransferPtr take_recv(int peer, int tag);
  bool match_unexpected(const TransferPtr& transfer, Finished& finished);
  void check_pending(Finished& finished);
  void finish(Finished& finished);
  void background();

  GroupHealth& health_;
  std::vector<Channel> to_, from_;
  std::vector<protocol::Counter*> doorbells_;
  SpinPolicy policy_;
  std::function<void(int)> commit_;

  std::mutex mutex_;
  std::vector<Peer> peers_;
  std::list<TransferPtr> recvs_;
  size_t pending_ = 0;
  std::atomic<int> waiters_{0};

  std::condition_variable wake_background_;
  std::thread background_;
  bool stopping_ = false;
};

}  // namespace ark

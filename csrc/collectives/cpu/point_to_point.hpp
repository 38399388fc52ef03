// send and recv between the ranks of a group, over one shared-memory channel per ordered pair of ranks.
//
// A channel carries whole messages in order, in frames of at most one slot. Messages match by (source, tag), in order
// for equal tags. send() never blocks: a waiter or the background thread later pushes what does not fit. A frame
// without a matching recv stays in the channel; once a recv from that rank needs to pass it, its message moves to the
// heap. Any number of threads may post and wait. Waiters sleep on this rank's doorbell, which peers ring after they
// publish or release a frame. The channel's counters order the data.
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
  int peer = kAnySource;  // rank in the group; kAnySource: receive from any rank
  int tag = 0;
  void* data = nullptr;
  size_t bytes = 0;
  OperationContext context;
  // Called once, on any thread, without locks; null on success. A recv's `source` then names the sender.
  std::function<void(std::exception_ptr)> done;

  // Owned by PointToPoint.
  size_t moved = 0;
  int source = kAnySource;
  std::atomic<bool> finished{false};
};
using TransferPtr = std::shared_ptr<Transfer>;

class PointToPoint {
 public:
  // to[r] / from[r]: channels to and from rank r (own entries unused). commit(r) commits memory for the slots of the
  // channel to r, or throws. doorbell_of[r]: rank r's doorbell.
  PointToPoint(GroupHealth& health, std::vector<Channel> to, std::vector<Channel> from,
               std::vector<protocol::Counter*> doorbell_of, SpinPolicy policy, std::function<void(int)> commit);
  ~PointToPoint();

  void post(TransferPtr transfer);
  // Makes progress until the transfer is finished (returns true) or `until` has passed (false).
  bool wait(const Transfer& transfer, Clock::time_point until);
  // Fails everything pending with the group's error, after abort or at shutdown.
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
    TransferPtr incoming;                     // the recv that the current message goes to, or
    std::list<Unexpected>::iterator aside{};  // ... the heap entry that it goes to
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

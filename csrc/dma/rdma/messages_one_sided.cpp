// Puts and signals: one-sided, in the order of their calls, without a receive on the other side.
//
// A put waits for the connection alone; a signal takes a slot of the peer's inbox, as a small message does. RC carries
// out requests in order, so whoever counts a signal finds all bytes that were put before it.
#include <algorithm>

#include "dma/rdma/messages.hpp"

namespace ark::rdma {

void Messages::open_window(int32_t window, const std::vector<int>& peers, Heard heard) {
  const std::lock_guard lock(mutex_);
  const bool hears = static_cast<bool>(heard);
  windows_.insert_or_assign(window, Window{peers, std::move(heard)});
  for (const int rank : peers) {
    Peer& peer = peer_of(rank);
    if (!hears) continue;
    ++peer.signal_waits;
    take_slots(rank, peer);
  }
}

void Messages::close_window(int32_t window) {
  const std::lock_guard lock(mutex_);
  const auto found = windows_.find(window);
  if (found == windows_.end()) return;
  if (found->second.heard)
    for (const int rank : found->second.peers) --peer_of(rank).signal_waits;
  windows_.erase(found);
  for (auto& [rank, peer] : peers_) peer.signals.erase(window);
}

Messages::MessagePtr Messages::put(int rank, const void* data, size_t bytes, uint64_t to, const Keys& keys,
                                   Where where) {
  // On the caller's thread: what is refused is its error.
  return put(rank, data, bytes, to, keys, hold(data, bytes, bytes >= setup_.least_striped, where));
}

Messages::MessagePtr Messages::put(int rank, const void* data, size_t bytes, uint64_t to, const Keys& keys, Held held) {
  const State message(new MessageState{.sends = true,
                                       .peer = rank,
                                       .any = false,
                                       .tag = 0,
                                       .data = const_cast<void*>(data),
                                       .bytes = bytes,
                                       .kind = MessageState::Kind::put,
                                       .to = to,
                                       .keys = keys});
  message->held = std::move(held);
  return begin_one_sided(message);
}

Messages::MessagePtr Messages::signal(int rank, int32_t window) {
  return begin_one_sided(State(new MessageState{.sends = true,
                                                .peer = rank,
                                                .any = false,
                                                .tag = window,
                                                .data = nullptr,
                                                .bytes = 0,
                                                .kind = MessageState::Kind::signal}));
}

Messages::MessagePtr Messages::begin_one_sided(const State& message) {
  const std::lock_guard lock(mutex_);
  auto handle = std::make_unique<Message>(shared_from_this(), message);
  if (failure_) return fail(*message, *failure_), std::move(handle);
  Peer& peer = peer_of(message->peer);
  if (!peer.failure && peer.left) leave(message->peer, peer);
  if (peer.failure) return fail(*message, *peer.failure), std::move(handle);
  peer.one_sided.push_back(message);
  pump(peer);
  return handle;
}

// False: a signal waits for a slot, and what is behind it waits with it.
bool Messages::pump_one_sided(Peer& peer) {
  while (!peer.one_sided.empty()) {
    const State message = peer.one_sided.front();
    if (message->kind == MessageState::Kind::put) {
      begin_parts(peer, message);
    } else {
      if (!put_slot(peer, with_counts(peer, {Header::signal, message->tag, 0, 0, 0, 0, 0}))) return false;
      finish(*message);
    }
    peer.one_sided.pop_front();
  }
  return true;
}

uint64_t Messages::signals(int rank, int32_t window) const {
  const std::lock_guard lock(mutex_);
  const auto peer = peers_.find(rank);
  if (peer == peers_.end()) return 0;
  const auto found = peer->second.signals.find(window);
  return found == peer->second.signals.end() ? 0 : found->second;
}

bool Messages::wait_signals(int rank, int32_t window, uint64_t count, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  Peer& peer = peer_of(rank);
  const auto came = [&] {
    const auto found = peer.signals.find(window);
    return found != peer.signals.end() && found->second >= count;
  };
  const auto ended = [&] { return came() || failure_ || peer.failure; };
  ++peer.signal_waits;  // what stands before the signal in its slots is taken, however much there is
  take_slots(rank, peer);
  while (!ended()) {
    const auto until = std::min(deadline, Clock::now() + setup_.probe);
    if (something_.wait_until(lock, until, ended)) break;
    if (peer.channel && !peer.failure) peer.channel->probe();
    if (until == deadline) break;
  }
  --peer.signal_waits;
  if (came()) return true;
  if (peer.failure) throw *peer.failure;
  if (failure_) throw *failure_;
  return false;
}

void Messages::probe(int rank) {
  const std::lock_guard lock(mutex_);
  const Peer& peer = peer_of(rank);
  if (failure_) throw *failure_;
  if (peer.left) return;
  if (peer.failure) throw *peer.failure;
  if (peer.channel) peer.channel->probe();
}

}  // namespace ark::rdma

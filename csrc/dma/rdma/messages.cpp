// Matches sends with receives, keeps unexpected messages and cancels messages.
#include "dma/rdma/messages.hpp"

#include "util/start_thread.hpp"

#include <algorithm>
#include <cstring>

namespace ark::rdma {

namespace {

constexpr auto kForFlushes = std::chrono::seconds(1);  // how long the NIC may take to return outstanding requests

template <class Queue, class Value>
bool erase_from(Queue& queue, const Value& value) {
  const auto found = std::find(queue.begin(), queue.end(), value);
  if (found == queue.end()) return false;
  queue.erase(found);
  return true;
}

}  // namespace

bool Message::wait_until(Clock::time_point deadline) {
  return of_->wait_until(*state_, deadline, true);
}

bool Message::wait_a_while(Clock::time_point until) {
  return of_->wait_until(*state_, until, false);
}

bool Message::done() const {
  return of_->done(*state_);
}

void Message::abort() {
  of_->give_up(state_);
}

Messages::Messages(std::vector<std::shared_ptr<Engine>> rails, std::unique_ptr<KeyValueStore> store, Setup setup)
    : engines_(std::move(rails)), store_(std::move(store)), setup_(std::move(setup)) {}

Messages::~Messages() {
  close(std::chrono::milliseconds(0));
}

Error Messages::error(ErrorKind kind, int peer, const std::string& what, const std::string& remedy) const {
  return Error(kind, what, ErrorContext{setup_.rank, peer, "rdma", 0, remedy});
}

Messages::Peer& Messages::peer_of(int rank) {
  Peer& peer = peers_[rank];
  if (!peer.wanted && !peer.failure && !closing_) {
    peer.wanted = true;
    to_connect_.push_back(rank);
    // Start the thread on first use: a group that stays on one node never needs it.
    if (!connecting_.joinable())
      connecting_ = start_thread("the thread that connects RDMA's peers", [this] { connect_peers(); });
    wanted_.notify_all();
  }
  return peer;
}

Messages::State Messages::begin(bool sends, int peer, bool any, int32_t tag, void* data, size_t bytes, Where where) {
  if (where == Where::gpu && bytes <= most_small())
    throw error(ErrorKind::invalid_argument, peer,
                "a message of " + std::to_string(bytes) + " bytes in GPU memory is too small to be written directly",
                "Copy it to the host first.");
  return State(new MessageState{
      .sends = sends, .peer = peer, .any = any, .tag = tag, .data = data, .bytes = bytes, .where = where});
}

Messages::MessagePtr Messages::send(int rank, int32_t tag, const void* data, size_t bytes, Where where) {
  const std::lock_guard lock(mutex_);
  const State message = begin(true, rank, false, tag, const_cast<void*>(data), bytes, where);
  auto handle = std::make_unique<Message>(shared_from_this(), message);
  if (failure_) return fail(*message, *failure_), std::move(handle);
  Peer& peer = peer_of(rank);
  message->index = peer.sent[tag]++;
  if (peer.failure) return fail(*message, *peer.failure), std::move(handle);
  if (peer.left) return leave(rank, peer), fail(*message, *peer.failure), std::move(handle);
  if (bytes <= most_small()) {
    peer.small_sends.push_back(message);
    pump(peer);
  } else {
    const Place place{tag, message->index};
    peer.large_sends[place] = message;
    if (const auto found = peer.announced.find(place); found != peer.announced.end()) {
      const Control target = found->second;
      peer.announced.erase(found);
      begin_large(peer, message, target);
    }
    take_slots(rank, peer);
  }
  return handle;
}

Messages::MessagePtr Messages::receive(int rank, int32_t tag, void* data, size_t bytes, Where where) {
  const std::lock_guard lock(mutex_);
  const State message = begin(false, rank, false, tag, data, bytes, where);
  auto handle = std::make_unique<Message>(shared_from_this(), message);
  if (failure_) return fail(*message, *failure_), std::move(handle);
  Peer& peer = peer_of(rank);
  const Place place{tag, message->index = peer.received[tag]++};
  if (const auto found = peer.aside.find(place); found != peer.aside.end()) {
    fill(*message, rank, found->second.data(), found->second.size());
    peer.aside.erase(found);
    take_slots(rank, peer);
  } else if (peer.failure) {
    fail(*message, *peer.failure);
  } else if (peer.left) {
    leave(rank, peer);
    fail(*message, *peer.failure);
  } else {
    peer.receives[place] = message;
    if (bytes > most_small()) announce(peer, message);
    take_slots(rank, peer);
  }
  return handle;
}

Messages::MessagePtr Messages::receive_any(int32_t tag, void* data, size_t bytes) {
  const std::lock_guard lock(mutex_);
  const State message = begin(false, -1, true, tag, data, bytes);
  auto handle = std::make_unique<Message>(shared_from_this(), message);
  if (failure_) return fail(*message, *failure_), std::move(handle);
  if (bytes > most_small()) {
    fail(*message, error(ErrorKind::invalid_argument, -1,
                         "a message of " + std::to_string(bytes) + " bytes is too large to be received from anyone",
                         "Receive at most " + std::to_string(most_small()) + " bytes from anyone."));
    return handle;
  }
  for (auto& [rank, peer] : peers_) {
    const auto found = peer.aside.lower_bound({tag, 0});
    if (found == peer.aside.end() || found->first.first != tag) continue;
    fill(*message, rank, found->second.data(), found->second.size());
    peer.aside.erase(found);
    take_slots(rank, peer);
    return handle;
  }
  any_[tag].push_back(message);
  for (auto& [rank, peer] : peers_) take_slots(rank, peer);
  return handle;
}

// Registers the memory on the receiving thread, so that a refused registration fails the receive itself.
void Messages::announce(Peer& peer, const State& message) {
  try {
    message->held = hold(message->data, message->bytes, message->bytes >= setup_.least_striped, message->where);
  } catch (const Error& refused) {
    peer.receives.erase({message->tag, message->index});
    return fail(*message, refused.at(setup_.rank, "rdma receive"));
  }
  const Keys keys = message->held.remote_keys();
  Control control{{Header::announcement, message->tag, message->index, message->bytes,
                   reinterpret_cast<uint64_t>(message->data), keys[0], 0}};
  std::copy(keys.begin() + 1, keys.end(), control.words.begin());
  peer.controls.push_back(control);
  pump(peer);
}

// Returns false if no slot is free yet; a later completion calls pump() again.
bool Messages::put_slot(Peer& peer, const Control& control, const void* data) {
  const Header& header = control.header;
  Channel& channel = *peer.channel;
  uint64_t& last_use = peer.slot_numbers[peer.slots_sent % peer.slot_numbers.size()];
  if (!channel.done(last_use)) return false;
  std::byte* slot = channel.outbox(peer.slots_sent);
  std::memcpy(slot, &header, sizeof header);
  const bool small = header.kind == Header::small;
  const size_t bytes = small ? header.bytes : words_bytes();
  if (bytes > 0) std::memcpy(slot + sizeof header, small ? data : control.words.data(), bytes);
  last_use =
      channel.put_with_signal(slot, channel.outbox_key(), sizeof header + bytes, channel.remote_slot(peer.slots_sent),
                              channel.remote_key(), static_cast<uint32_t>(sizeof header + bytes));
  ++peer.slots_sent;
  return true;
}

void Messages::pump(Peer& peer) {
  if (!peer.channel || peer.failure) return;
  while (!peer.controls.empty()) {
    if (!put_slot(peer, peer.controls.front())) return;
    peer.controls.pop_front();
  }
  if (!pump_one_sided(peer)) return;
  while (!peer.small_sends.empty()) {
    MessageState& message = *peer.small_sends.front();
    if (!put_slot(peer, {{Header::small, message.tag, message.index, message.bytes, 0, 0, 0}}, message.data)) return;
    finish(message);  // the data was copied into the slot
    peer.small_sends.pop_front();
  }
}

// Writes the bytes, then a message that they are there. A reliable connection keeps the order.
void Messages::begin_large(Peer& peer, const State& message, const Control& target) {
  const Place place{message->tag, message->index};
  peer.large_sends.erase(place);
  if (target.header.bytes != message->bytes) {
    fail(*message, error(ErrorKind::mismatch, message->peer,
                         "this rank sends " + std::to_string(message->bytes) + " bytes to rank " +
                             std::to_string(message->peer) + ", which expects " + std::to_string(target.header.bytes),
                         "Give both ends the same size."));
    return;
  }
  try {
    message->held = hold(message->data, message->bytes, message->bytes >= setup_.least_striped, message->where);
  } catch (const Error& refused) {
    return fail(*message, refused.at(setup_.rank, "rdma send"));
  }
  message->to = target.header.address;
  message->keys[0] = target.header.key;
  std::copy(target.words.begin(), target.words.end(), message->keys.begin() + 1);
  begin_parts(peer, message);
  peer.controls.push_back(with_counts(peer, {Header::written, message->tag, message->index, message->bytes, 0, 0, 0}));
  pump(peer);
}

// Returns true if a message that this rank has begun may need the peer's next slots.
bool Messages::awaits(const Peer& peer) const {
  const auto waits = [](const auto& one) { return !one.second.empty(); };
  return !peer.receives.empty() || !peer.large_sends.empty() || peer.signal_waits > 0 ||
         std::any_of(any_.begin(), any_.end(), waits);
}

// Takes arrived slots while there is room for unexpected messages. all: the connection has ended, so at most its slots
// remain.
void Messages::take_slots(int rank, Peer& peer, bool all) {
  const std::shared_ptr<Channel> channel = peer.channel;
  while (channel && (all || peer.kept() < setup_.most_kept || awaits(peer))) {
    const auto bytes = channel->take();
    if (!bytes) return;
    if (!take_slot(rank, peer, *bytes)) {
      fail_peer(peer, error(ErrorKind::system, rank, "rank " + std::to_string(rank) + " sent what is no message",
                            "Run the same ark_torch on all ranks."));
      return;
    }
    channel->release();
  }
}

// Returns false, and fails the connection, if the peer has sent more unexpected messages than even a waiting rank
// keeps.
bool Messages::may_keep(int rank, Peer& peer) {
  const size_t most = setup_.most_kept * kWhereAwaited;
  if (peer.kept() < most) return true;
  if (peer.failure) return false;
  fail_peer(peer, error(ErrorKind::mismatch, rank,
                        "rank " + std::to_string(rank) + " has sent " + std::to_string(most) +
                            " messages that this rank has not received, while this rank waits for another of it",
                        "Receive messages in about the order in which they are sent, or let rank " +
                            std::to_string(rank) + " wait for an answer now and then."));
  return false;
}

// Returns false if the slot holds no valid message.
bool Messages::take_slot(int rank, Peer& peer, uint32_t bytes) {
  const std::byte* slot = peer.channel->inbox(peer.slots_taken++);
  Header header;
  if (bytes < sizeof header || bytes > setup_.shape.slot_bytes) return false;
  std::memcpy(&header, slot, sizeof header);
  if (header.kind < Header::small || header.kind > Header::rail_moved) return false;
  if (bytes != sizeof header + (header.kind == Header::small ? header.bytes : words_bytes())) return false;
  deliver(rank, peer, header, slot + sizeof header);
  return true;
}

void Messages::deliver(int rank, Peer& peer, const Header& header, const std::byte* data) {
  const Place place{header.tag, header.index};
  const auto receive = peer.receives.find(place);
  switch (header.kind) {
    case Header::small: {
      if (receive != peer.receives.end()) {
        const State message = receive->second;
        peer.receives.erase(receive);
        return fill(*message, rank, data, header.bytes);
      }
      if (const auto found = peer.received.find(header.tag);
          found != peer.received.end() && header.index < found->second)
        return;  // its receive was cancelled
      if (const auto any = any_.find(header.tag); any != any_.end() && !any->second.empty()) {
        const State message = any->second.front();
        any->second.pop_front();
        return fill(*message, rank, data, header.bytes);
      }
      if (may_keep(rank, peer)) peer.aside[place].assign(data, data + header.bytes);
      return;
    }
    case Header::announcement: {
      Control target{header};
      std::memcpy(target.words.data(), data, words_bytes());
      if (const auto found = peer.large_sends.find(place); found != peer.large_sends.end()) {
        const State message = found->second;
        return begin_large(peer, message, target);
      }
      // Ignore the announcement if the send was cancelled, or if it is small and will find the receive too large.
      if (header.index >= peer.sent[header.tag] && may_keep(rank, peer)) peer.announced[place] = target;
      return;
    }
    case Header::rail_down:
    case Header::rail_moved: {
      const auto rail = static_cast<size_t>(header.tag);
      if (rail == 0 || rail > peer.rails.size()) return;
      Rail& one = peer.rails[rail - 1];
      if (header.kind == Header::rail_moved) {
        one.peer_moved = true;
        return land(rank, peer);
      }
      one.peer_down = true;
      rail_failed(peer, header.tag, "rank " + std::to_string(rank) + " closed its end");
      return move_rail(peer, header.tag);
    }
    default: {  // what may have to wait for another rail
      Control control{header};
      std::memcpy(control.words.data(), data, words_bytes());
      if (!peer.landing.empty() && !may_keep(rank, peer)) return;
      peer.landing.push_back(control);
      return land(rank, peer);
    }
  }
}

// What the peer told behind bytes of its, now that they are here.
void Messages::arrive(int rank, Peer& peer, const Header& header) {
  if (header.kind == Header::goodbye) return leave(rank, peer);
  if (header.kind == Header::signal) {
    if (const auto window = windows_.find(header.tag); window != windows_.end()) {
      const uint64_t count = ++peer.signals[header.tag];
      if (window->second.heard) window->second.heard(rank, count);
    }
    something_.notify_all();
    return;
  }
  const auto receive = peer.receives.find({header.tag, header.index});
  if (receive == peer.receives.end() || receive->second->bytes != header.bytes) return;
  const State message = receive->second;
  peer.receives.erase(receive);
  finish(*message);
}

void Messages::fill(MessageState& message, int rank, const std::byte* data, size_t bytes) {
  if (bytes != message.bytes && !(message.any && bytes < message.bytes)) {
    return fail(message, error(ErrorKind::mismatch, rank,
                               "rank " + std::to_string(rank) + " sends " + std::to_string(bytes) +
                                   " bytes, and this rank expects " + std::to_string(message.bytes),
                               "Give both ends the same size."));
  }
  if (bytes > 0) std::memcpy(message.data, data, bytes);
  message.peer = rank;
  finish(message);
}

void Messages::finish(MessageState& message) {
  message.stage = MessageState::Stage::done;
  message.held.reset();
  something_.notify_all();
}

void Messages::fail(MessageState& message, const Error& error) {
  message.stage = MessageState::Stage::failed;
  message.error = error;
  message.held.reset();
  something_.notify_all();
}

// Fails the channel first: after that the NIC neither writes nor reads the memory of its messages.
void Messages::fail_peer(Peer& peer, const Error& why) {
  if (!peer.failure) peer.failure = why;
  for (const auto& channel : channels_of(peer)) channel->fail(*peer.failure);
  const auto end_all = [&](auto&& messages) {
    for (auto& one : messages) fail(*one, *peer.failure);
    messages.clear();
  };
  const auto end_map = [&](auto& messages) {
    for (auto& [place, one] : messages) fail(*one, *peer.failure);
    messages.clear();
  };
  end_all(peer.small_sends);
  end_all(peer.one_sided);
  end_all(peer.moving);
  end_map(peer.large_sends);
  end_map(peer.receives);
  peer.controls.clear();
  peer.landing.clear();
  something_.notify_all();
}

// Keeps what the peer sent earlier. Only messages that are still awaited fail.
void Messages::leave(int rank, Peer& peer) {
  peer.left = true;
  fail_peer(peer, error(ErrorKind::peer_lost, rank, "rank " + std::to_string(rank) + " has left the group",
                        "Let all ranks call the same collectives before they destroy the process group."));
}

void Messages::changed(int rank, int rail) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[rank];
  if (!peer.channel) return;  // still connecting; connect_peers() calls this again
  const std::shared_ptr<Channel> channel = peer.channel;
  if (rail > 0) {
    take_rail(rank, peer, rail);
  } else {
    take_slots(rank, peer);
  }
  while (!peer.moving.empty() && all_parts_done(peer, *peer.moving.front())) {
    finish(*peer.moving.front());
    peer.moving.pop_front();
  }
  if (const auto why = channel->failure()) {
    take_slots(rank, peer, true);  // keeps what the peer sent before the failure
    fail_peer(peer, *why);
  }
  pump(peer);
  something_.notify_all();
}

// Explains the timeout of a small send that still waits for a slot.
void Messages::refuse_full(const MessageState& message) {
  const bool takes_a_slot = message.kind != MessageState::Kind::put && message.bytes <= most_small();
  if (!message.sends || !takes_a_slot || !peers_[message.peer].channel) return;
  throw error(ErrorKind::timeout, message.peer,
              "rank " + std::to_string(message.peer) + " takes no more messages: its " +
                  std::to_string(setup_.shape.slots) + " slots are full, as when it has " +
                  std::to_string(setup_.most_kept) + " that it has not received",
              "See whether rank " + std::to_string(message.peer) +
                  " is stopped, slow, or does not receive what is sent to it.");
}

bool Messages::done(const MessageState& message) const {
  const std::lock_guard lock(mutex_);
  return message.stage == MessageState::Stage::done || message.stage == MessageState::Stage::failed;
}

bool Messages::wait_until(MessageState& message, Clock::time_point deadline, bool tells_why) {
  using Stage = MessageState::Stage;
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return message.stage == Stage::done || message.stage == Stage::failed; };
  while (!ended()) {
    const auto now = Clock::now();
    if (now >= deadline) {
      if (tells_why) refuse_full(message);
      return false;
    }
    if (something_.wait_until(lock, std::min(deadline, now + setup_.probe), ended)) break;
    if (message.any) continue;
    // If the probe fails, it ends the message.
    if (const Peer& peer = peers_[message.peer]; peer.channel && !peer.failure) peer.channel->probe();
  }
  if (message.stage == Stage::failed) throw *message.error;
  return true;
}

void Messages::give_up(const State& message) {
  using Stage = MessageState::Stage;
  std::unique_lock lock(mutex_);
  if (message->stage == Stage::done || message->stage == Stage::failed) return;
  const Error given_up = error(ErrorKind::aborted, message->peer, "the message was given up", "");
  if (message->any) {
    erase_from(any_[message->tag], message);
    return fail(*message, given_up);
  }
  Peer& peer = peers_[message->peer];
  const Place place{message->tag, message->index};
  bool at_work = message->stage == Stage::moving;
  if (message->sends) {
    erase_from(peer.small_sends, message);
    erase_from(peer.one_sided, message);
    peer.large_sends.erase(place);
  } else {
    peer.receives.erase(place);
    // The peer may write to announced memory at any time, unless the announcement has not left yet.
    const auto same = [&](const Control& waiting) {
      const Header& one = waiting.header;
      return one.kind == Header::announcement && one.tag == message->tag && one.index == message->index;
    };
    const auto waiting = std::find_if(peer.controls.begin(), peer.controls.end(), same);
    if (waiting != peer.controls.end()) {
      peer.controls.erase(waiting);
    } else if (message->bytes > most_small()) {
      at_work = true;
    }
  }
  fail(*message, given_up);
  if (!at_work || !peer.channel) return;
  fail_peer(peer, error(ErrorKind::aborted, message->peer,
                        "a message between this rank and rank " + std::to_string(message->peer) +
                            " was given up while it was under way, and the connection with it",
                        "Destroy the process group on every rank (or restart the job) before going on."));
  const auto channels = channels_of(peer);
  lock.unlock();
  const auto deadline = Clock::now() + kForFlushes;
  for (const auto& channel : channels) channel->drain(deadline);
}

}  // namespace ark::rdma

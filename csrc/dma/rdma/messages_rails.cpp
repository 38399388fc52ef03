// Several NICs a rank: parts of large messages on each, and what becomes of a rail that fails.
//
// A part that was on a rail when it failed may have come or not, and may still come as long as the peer's end is open.
// So each side closes its end and says so by the first rail (rail_down); once both have, parts that are not known to be
// done are written again by the first, and behind them goes the word that nothing on that rail is awaited any more
// (rail_moved).
#include <algorithm>

#include "dma/rdma/messages.hpp"

namespace ark::rdma {

namespace {

constexpr size_t kPartUnit = 4096;  // parts begin at multiples of it

}  // namespace

Held Messages::hold(const void* data, size_t bytes, bool every_rail, Where where) {
  Held held;
  for (int rail = 0; rail < (every_rail ? rails() : 1); ++rail)
    held.rails[rail] = engines_[rail]->memory().hold(data, bytes, where);
  return held;
}

std::string Messages::device() const {
  std::string names;
  for (const auto& engine : engines_) names += (names.empty() ? "" : ", ") + engine->device()->port().device;
  return names;
}

std::string Messages::trouble() const {
  const std::lock_guard lock(mutex_);
  std::string all;
  for (const auto& [rank, peer] : peers_)
    for (size_t i = 0; i < peer.rails.size(); ++i) {
      const Rail& rail = peer.rails[i];
      if (!rail.down) continue;
      all += (all.empty() ? "" : "; ") + engines_[i + 1]->device()->port().device + " is not used with rank " +
             std::to_string(rank) + ": " + rail.trouble;
    }
  return all;
}

std::vector<std::shared_ptr<Channel>> Messages::channels_of(const Peer& peer) const {
  std::vector<std::shared_ptr<Channel>> channels;
  if (!peer.channel) return channels;
  channels.push_back(peer.channel);
  for (const Rail& rail : peer.rails) channels.push_back(rail.channel);
  return channels;
}

// Along all rails that are there, where it is large; equal parts.
void Messages::begin_parts(Peer& peer, const State& message) {
  std::vector<int> along{0};
  for (size_t i = 0; i < peer.rails.size() && message->bytes >= setup_.least_striped; ++i) {
    const Rail& rail = peer.rails[i];
    if (rail.proven && !rail.down && !rail.peer_down && message->held.rails[i + 1] && message->keys[i + 1] != 0)
      along.push_back(static_cast<int>(i) + 1);
  }
  const size_t share = (message->bytes + along.size() - 1) / along.size();
  const size_t part = along.size() == 1 ? message->bytes : (share + kPartUnit - 1) / kPartUnit * kPartUnit;
  size_t begin = 0;
  for (const int rail : along) {
    if (begin >= message->bytes && rail > 0) break;
    const size_t bytes = std::min(part, message->bytes - begin);
    const auto* from = static_cast<const std::byte*>(message->data) + begin;
    const uint64_t to = message->to + begin;
    const uint32_t own = message->held.rails[rail].local_key(), theirs = message->keys[rail];
    uint64_t number;
    if (rail == 0) {
      number = peer.channel->put(from, own, bytes, to, theirs);
    } else {
      Rail& one = peer.rails[rail - 1];
      ++one.sent;
      number = one.channel->put_with_signal(from, own, bytes, to, theirs, 1);
    }
    message->parts.push_back({rail, from, bytes, to, number});
    begin += bytes;
  }
  message->stage = MessageState::Stage::moving;
  peer.moving.push_back(message);
}

bool Messages::all_parts_done(const Peer& peer, const MessageState& message) const {
  return std::all_of(message.parts.begin(), message.parts.end(), [&](const MessageState::Part& part) {
    const Channel& channel = part.rail == 0 ? *peer.channel : *peer.rails[part.rail - 1].channel;
    return channel.done(part.number);
  });
}

Messages::Control Messages::with_counts(const Peer& peer, const Header& header) const {
  Control control{header};
  for (size_t i = 0; i < peer.rails.size(); ++i) control.words[i] = peer.rails[i].sent;
  return control;
}

// Counts may wrap around.
bool Messages::landed(const Peer& peer, const Control& control) const {
  for (size_t i = 0; i < peer.rails.size(); ++i) {
    const Rail& rail = peer.rails[i];
    if (!rail.peer_moved && static_cast<int32_t>(rail.arrived - control.words[i]) < 0) return false;
  }
  return true;
}

void Messages::land(int rank, Peer& peer) {
  while (!peer.landing.empty() && landed(peer, peer.landing.front())) {
    const Header header = peer.landing.front().header;
    peer.landing.pop_front();
    arrive(rank, peer, header);
  }
}

// The first signal says that the peer is there; each further one that a part has come.
void Messages::take_rail(int rank, Peer& peer, int rail) {
  Rail& one = peer.rails[rail - 1];
  while (one.channel->take()) {
    one.channel->release();
    if (one.proven) {
      ++one.arrived;
    } else {
      one.proven = true;
    }
  }
  if (const auto why = one.channel->failure(); why && !peer.failure) rail_failed(peer, rail, why->message());
  land(rank, peer);
}

void Messages::rail_failed(Peer& peer, int rail, const std::string& why) {
  Rail& one = peer.rails[rail - 1];
  if (one.down || peer.failure) return;
  one.down = true;
  one.trouble = why;
  one.channel->fail(error(ErrorKind::system, -1, why, ""));  // nothing comes in any more
  peer.controls.push_back(with_counts(peer, {Header::rail_down, rail, 0, 0, 0, 0, 0}));
  move_rail(peer, rail);
  pump(peer);
}

void Messages::move_rail(Peer& peer, int rail) {
  Rail& one = peer.rails[rail - 1];
  if (!one.down || !one.peer_down || one.moved || peer.failure) return;
  one.moved = true;
  for (const State& message : peer.moving) {
    for (MessageState::Part& part : message->parts) {
      if (part.rail != rail || one.channel->done(part.number)) continue;
      part.rail = 0;
      part.number =
          peer.channel->put(part.from, message->held.rails[0].local_key(), part.bytes, part.to, message->keys[0]);
    }
  }
  peer.controls.push_back(with_counts(peer, {Header::rail_moved, rail, 0, 0, 0, 0, 0}));
  pump(peer);
}

}  // namespace ark::rdma

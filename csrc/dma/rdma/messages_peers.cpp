// Connects the peers of a group's messages and shuts the group down.
#include <algorithm>

#include "dma/rdma/messages.hpp"

namespace ark::rdma {

namespace {

// Time for a goodbye to a peer that was sent nothing else: it may already be gone without notice.
constexpr auto kForGoodbye = std::chrono::milliseconds(250);
constexpr const char* kReady = "/ready";      // suffix of an endpoint's key
constexpr const char* kRefused = "/refused";  // the same, with the reason: this side does not connect
constexpr Channel::Shape kRailShape{64, 64};  // of all rails but the first, whose signals carry no messages

}  // namespace

void Messages::abort(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = why;
  for (auto& [rank, peer] : peers_) fail_peer(peer, *failure_);
  for (auto& [tag, messages] : any_) {
    for (const State& message : messages) fail(*message, *failure_);
    messages.clear();
  }
}

void Messages::close(std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  std::vector<std::shared_ptr<Channel>> channels, quiet;
  {
    std::unique_lock lock(mutex_);
    if (closing_) return;
    closing_ = true;
    wanted_.notify_all();
    lock.unlock();
    if (connecting_.joinable()) connecting_.join();
    lock.lock();
    for (auto& [rank, peer] : peers_) {
      if (!peer.channel || peer.failure) continue;
      (peer.slots_sent > 0 ? channels : quiet).push_back(peer.channel);
      peer.controls.push_back(with_counts(peer, {Header::goodbye, 0, 0, 0, 0, 0, 0}));
      pump(peer);
    }
    something_.wait_until(lock, deadline, [this] {
      return std::all_of(peers_.begin(), peers_.end(), [](const auto& one) {
        const Peer& peer = one.second;
        return !peer.channel || peer.failure ||
               (peer.controls.empty() && peer.small_sends.empty() && peer.one_sided.empty() && peer.moving.empty());
      });
    });
  }
  const auto flush = [](const std::shared_ptr<Channel>& channel, Clock::time_point until) {
    try {
      channel->flush(until);
    } catch (const Error&) {  // the peer has already gone
    }
  };
  for (const auto& channel : channels) flush(channel, deadline);
  for (const auto& channel : quiet) flush(channel, std::min(deadline, Clock::now() + kForGoodbye));
  abort(error(ErrorKind::closed, -1, "the process group was shut down", "Create it again."));
  {
    const std::lock_guard lock(mutex_);
    for (auto& [rank, peer] : peers_) {
      for (auto& channel : channels_of(peer)) channels.push_back(std::move(channel));
      peer.channel.reset();
      for (Rail& rail : peer.rails) rail.channel.reset();
    }
  }
  // Channel destructors wait for the engine's thread, which may be waiting for mutex_, so it must be free here.
  channels.clear();
  quiet.clear();
}

std::string Messages::key(int from, int to) const {
  return setup_.prefix + "/" + std::to_string(from) + "/" + std::to_string(to);
}

void Messages::connect_peers() {
  struct Connecting {
    int rank;
    std::vector<std::shared_ptr<Channel>> channels;  // by rail
    Clock::time_point deadline;
    bool ready = false;  // this side can receive; the peer may not be able to yet
  };
  std::vector<Connecting> connecting;
  auto pause = std::chrono::milliseconds(1);
  std::unique_lock lock(mutex_);
  const auto called = [this] { return closing_ || !to_connect_.empty(); };
  while (true) {
    if (connecting.empty()) {
      wanted_.wait(lock, called);
    } else if (!wanted_.wait_for(lock, pause, called)) {
      pause = std::min(pause * 2, std::chrono::milliseconds(50));
    }
    if (closing_) break;
    std::deque<int> fresh;
    fresh.swap(to_connect_);
    lock.unlock();
    const auto refuse = [this](int rank, const Error& why) {
      try {  // so that the peer does not wait for its timeout
        const std::string& text = why.message();
        store_->set(key(setup_.rank, rank) + kRefused, {text.begin(), text.end()});
      } catch (const Error&) {  // without the store it hears of nothing
      }
      const std::lock_guard relock(mutex_);
      fail_peer(peers_[rank], Error(why.kind(), why.message(),
                                    ErrorContext{setup_.rank, rank, "rdma connect", 0, why.context().remedy}));
    };
    for (const int rank : fresh) {
      pause = std::chrono::milliseconds(1);
      try {
        std::vector<std::shared_ptr<Channel>> channels;
        std::vector<uint8_t> record;
        for (int rail = 0; rail < rails(); ++rail) {
          channels.push_back(std::make_shared<Channel>(engines_[rail], setup_.rank, rank, setup_.size,
                                                       rail == 0 ? setup_.shape : kRailShape));
          channels.back()->on_change([this, rank, rail] { changed(rank, rail); });
          const auto endpoint = channels.back()->endpoint().encode();
          record.insert(record.end(), endpoint.begin(), endpoint.end());
        }
        store_->set(key(setup_.rank, rank), record);
        connecting.push_back({rank, std::move(channels), Clock::now() + setup_.timeout});
      } catch (const Error& why) {
        refuse(rank, why);
      }
    }
    std::erase_if(connecting, [&](Connecting& one) {
      try {
        const auto record = store_->find(key(one.rank, setup_.rank) + (one.ready ? kReady : ""));
        if (!record) {
          if (const auto refused = store_->find(key(one.rank, setup_.rank) + kRefused))
            throw Error(ErrorKind::system,
                        "rank " + std::to_string(one.rank) +
                            " does not connect: " + std::string(refused->begin(), refused->end()),
                        ErrorContext{-1, -1, "", 0, "Look at that rank's output."});
          if (Clock::now() < one.deadline) return false;
          throw Error(ErrorKind::timeout,
                      "rank " + std::to_string(one.rank) + " did not connect within " +
                          std::to_string(setup_.timeout.count()) + " ms",
                      ErrorContext{-1, -1, "", 0, "Look at that rank's output."});
        }
        if (one.ready) {
          {
            const std::lock_guard relock(mutex_);
            Peer& peer = peers_[one.rank];
            peer.slot_numbers.assign(setup_.shape.slots, 0);
            peer.channel = one.channels[0];
            peer.rails.resize(one.channels.size() - 1);
            for (size_t rail = 1; rail < one.channels.size(); ++rail) peer.rails[rail - 1].channel = one.channels[rail];
            if (peer.failure)
              for (const auto& channel : one.channels) channel->fail(*peer.failure);
          }
          for (size_t rail = 1; rail < one.channels.size(); ++rail) one.channels[rail]->signal(0);
          for (size_t rail = 0; rail < one.channels.size(); ++rail) changed(one.rank, static_cast<int>(rail));
          return true;
        }
        std::vector<Endpoint> endpoints;
        try {
          const std::span<const uint8_t> all(*record);
          if (all.size() != one.channels.size() * Endpoint::kEncodedBytes)
            throw Error(ErrorKind::mismatch,
                        "RDMA handle record rejected: " + std::to_string(all.size()) + " bytes where " +
                            std::to_string(one.channels.size() * Endpoint::kEncodedBytes) + " belong");
          for (size_t rail = 0; rail < one.channels.size(); ++rail)
            endpoints.push_back(Endpoint::decode(all.subspan(rail * Endpoint::kEncodedBytes, Endpoint::kEncodedBytes)));
        } catch (const Error& malformed) {
          throw Error(malformed.kind(), "of rank " + std::to_string(one.rank) + ": " + malformed.message(),
                      ErrorContext{-1, -1, "", 0,
                                   "Run the same ark_torch on all ranks, and let nothing else write to the store."});
        }
        for (size_t rail = 0; rail < one.channels.size(); ++rail)
          one.channels[rail]->connect(endpoints[rail], setup_.mtu);
        // A NIC drops packets for a queue pair that cannot receive yet, which uses up the sender's retries. So tell the
        // peer.
        store_->set(key(setup_.rank, one.rank) + kReady, {1});
        one.ready = true;
        pause = std::chrono::milliseconds(1);
        return false;
      } catch (const Error& why) {
        refuse(one.rank, why);
      }
      return true;
    });
    lock.lock();
  }
  lock.unlock();
  connecting.clear();
}

int Messages::connections() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(
      std::count_if(peers_.begin(), peers_.end(), [](const auto& one) { return one.second.channel; }));
}

size_t Messages::kept(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(rank);
  return found == peers_.end() ? 0 : found->second.kept();
}

std::optional<Channel::Counts> Messages::counts(int rank, int rail) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(rank);
  if (found == peers_.end() || !found->second.channel) return std::nullopt;
  return channels_of(found->second)[rail]->counts();
}

}  // namespace ark::rdma

// Adapts RDMA messages to the carrier interface, and runs the agreement: gather all offers through the store, decide,
// exchange trial messages with the data peers, and gather the outcomes.
#include "process_group/carriers/rdma_carrier.hpp"

#include <algorithm>

#include "shm/store_gather.hpp"

namespace ark {

namespace {

constexpr auto kForTrying = std::chrono::seconds(30);      // for the trial messages, once all ranks have arrived
constexpr int kTrialTag = -1;                              // users and collectives use no negative tags
constexpr auto kForWhatWasSent = std::chrono::seconds(5);  // for sends to arrive before this rank leaves

class RdmaMessage : public Carrier::Message {
 public:
  explicit RdmaMessage(rdma::Messages::MessagePtr message) : message_(std::move(message)) {}
  bool wait(std::chrono::milliseconds patience) override {
    return message_->wait_until(rdma::Messages::Clock::now() + patience);
  }
  void abort() override { message_->abort(); }

 private:
  const rdma::Messages::MessagePtr message_;
};

// Records hold printable ASCII of bounded length.
std::string printable(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text.substr(0, rdma::Offer::kMaxReasonBytes);
}

}  // namespace

Carrier::MessagePtr RdmaCarrier::send(int peer, int tag, const void* data, size_t bytes) {
  return std::make_shared<RdmaMessage>(messages_->send(peer, tag, data, bytes));
}

Carrier::MessagePtr RdmaCarrier::receive(int peer, int tag, void* data, size_t bytes) {
  return std::make_shared<RdmaMessage>(messages_->receive(peer, tag, data, bytes));
}

Carrier::MessagePtr RdmaCarrier::receive_any(int tag, void* data, size_t bytes) {
  return std::make_shared<RdmaMessage>(messages_->receive_any(tag, data, bytes));
}

void RdmaCarrier::close(bool failed) {
  messages_->close(failed ? std::chrono::milliseconds(0) : kForWhatWasSent);
}

namespace {

// What a rank tells the others of its trial messages: one of these, and why. Never empty, because some stores reject
// empty values.
constexpr char kReached = '+', kUnreached = '-', kMalformed = '!';

std::string try_peers(rdma::Messages& messages, const RdmaQuestion& question) {
  const auto deadline =
      rdma::Messages::Clock::now() + std::min<std::chrono::milliseconds>(kForTrying, question.timeout);
  const std::vector<int>& peers = question.peers;
  std::vector<uint64_t> sent(peers.size()), received(peers.size());
  std::vector<rdma::Messages::MessagePtr> all;
  for (size_t i = 0; i < peers.size(); ++i) {
    all.push_back(messages.receive(peers[i], kTrialTag, &received[i], sizeof received[i]));
    all.push_back(messages.send(peers[i], kTrialTag, &sent[i], sizeof sent[i]));
  }
  for (size_t i = 0; i < all.size(); ++i) {
    try {
      if (!all[i]->wait_until(deadline))
        return kUnreached + ("rank " + std::to_string(peers[i / 2]) + " does not answer over RDMA");
    } catch (const Error& error) {
      const bool malformed = error.kind() == ErrorKind::mismatch || error.kind() == ErrorKind::invalid_argument;
      return (malformed ? kMalformed : kUnreached) + error.message();
    }
  }
  return {kReached};
}

}  // namespace

RdmaAgreement agree_on_rdma(const RdmaQuestion& question, KeyValueStore& store,
                            const std::function<std::unique_ptr<KeyValueStore>()>& own_store) {
  const std::string prefix = "rdma/" + question.start;
  rdma::Offer offer;
  offer.rank = static_cast<uint32_t>(question.rank);
  offer.size = static_cast<uint32_t>(question.size);
  offer.wish = question.wish;
  offer.mtu_asked = static_cast<uint32_t>(question.options.mtu);
  std::vector<std::shared_ptr<rdma::Engine>> rails;
  std::string left_out;
  if (question.wish == rdma::Wish::gloo) {
    offer.reason = "ARK_NET=gloo";
  } else {
    try {
      rails = rdma::Engine::rails_of(question.options, left_out);
      const rdma::PortInfo& port = rails[0]->device()->port();
      offer.ethernet = port.ethernet;
      offer.mtu = static_cast<uint32_t>(port.mtu);
      for (const auto& rail : rails) {
        const rdma::PortInfo& other = rail->device()->port();
        offer.mtu = std::min(offer.mtu, static_cast<uint32_t>(other.mtu));
        if (other.ethernet != port.ethernet)
          throw Error(ErrorKind::invalid_argument,
                      port.device + " and " + other.device + " are RoCE and InfiniBand (ARK_RDMA_DEVICE)",
                      ErrorContext{-1, -1, "init", 0, "Name devices of one kind."});
      }
      offer.rails = static_cast<uint32_t>(rails.size());
      offer.device = port.device;
      offer.usable = true;
    } catch (const Error& error) {
      const std::string& remedy = error.context().remedy;
      offer.ethernet = false;
      offer.mtu = 0;
      offer.reason = printable(error.message() + (remedy.empty() ? "" : ". " + remedy));
    }
  }
  const auto gather = [&](const char* what, const std::vector<uint8_t>& own) {
    return store_all_gather(store, prefix + what, question.rank, question.size, own, question.timeout);
  };
  const auto records = gather("/offer", offer.encode());
  std::vector<rdma::Offer> offers;
  for (int rank = 0; rank < question.size; ++rank) {
    try {
      offers.push_back(rdma::Offer::decode(records[rank]));
      const rdma::Offer& found = offers.back();
      if (static_cast<int>(found.rank) == rank && static_cast<int>(found.size) == question.size) continue;
      throw Error(ErrorKind::mismatch, "RDMA offer rejected: it is of rank " + std::to_string(found.rank) + " of " +
                                           std::to_string(found.size));
    } catch (const Error& error) {
      throw Error(ErrorKind::mismatch, "of rank " + std::to_string(rank) + ": " + error.message(),
                  ErrorContext{question.rank, rank, "init", 0,
                               "Run the same version of ark_torch on all ranks, and let nothing else write to the "
                               "store."});
    }
  }
  const rdma::Decision decision = rdma::decide(offers, question.rank);
  if (!decision.rdma) return {nullptr, decision.reason};
  rdma::Messages::Setup setup;
  setup.rank = question.rank;
  setup.size = question.size;
  setup.mtu = decision.mtu;
  setup.prefix = prefix + "/endpoint";
  setup.timeout = question.timeout;
  std::string text = decision.reason + "; here ";
  rails.resize(decision.rails);
  for (const auto& rail : rails) text += (rail == rails[0] ? "" : " and ") + rail->device()->text();
  if (!left_out.empty()) text += "; left out here: " + left_out;
  auto messages = std::make_shared<rdma::Messages>(std::move(rails), own_store(), std::move(setup));
  const std::string told = printable(try_peers(*messages, question));
  const auto outcomes = gather("/outcome", {told.begin(), told.end()});
  std::string failed;
  bool malformed = false;
  for (int rank = 0; rank < question.size; ++rank) {
    const auto& found = outcomes[rank];
    if (!failed.empty() || (!found.empty() && found[0] == kReached)) continue;
    malformed = !found.empty() && found[0] == kMalformed;
    failed = "rank " + std::to_string(rank) +
             (malformed ? " was told what is no address: " : " was refused by the network: ") +
             printable(std::string(found.begin() + (found.empty() ? 0 : 1), found.end()));
  }
  if (failed.empty()) return {std::make_shared<RdmaCarrier>(std::move(messages)), text};
  messages->close(std::chrono::milliseconds(0));
  for (const rdma::Offer& one : offers) {
    if (one.wish != rdma::Wish::rdma) continue;
    throw Error(
        ErrorKind::invalid_argument,
        "rank " + std::to_string(one.rank) + " asks for RDMA between nodes (ARK_NET=rdma), and " + failed,
        ErrorContext{question.rank, -1, "init", 0,
                     malformed ? "Run the same version of ark_torch on all ranks, and let nothing else write to "
                                 "the store."
                               : "See docs/rdma.md's first run (`ping` between the NICs' addresses, "
                                 "`ib_write_bw`); ARK_NET=auto takes Gloo where RDMA cannot be."});
  }
  return {nullptr, failed};
}

}  // namespace ark

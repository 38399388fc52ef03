#include "process_group/carriers/rdma_carrier.hpp"

namespace ark {

namespace {

constexpr auto kForWhatWasSent = std::chrono::seconds(5);  // to arrive, before this rank leaves

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

// Records take printable ASCII of a bounded length.
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

RdmaAgreement agree_on_rdma(const RdmaQuestion& question, KeyValueStore& store,
                            const std::function<std::unique_ptr<KeyValueStore>()>& own_store) {
  const std::string prefix = "rdma/" + question.start;
  const auto key = [&](int rank) { return prefix + "/offer/" + std::to_string(rank); };
  rdma::Offer offer;
  offer.rank = static_cast<uint32_t>(question.rank);
  offer.size = static_cast<uint32_t>(question.size);
  offer.wish = question.wish;
  offer.mtu_asked = static_cast<uint32_t>(question.options.mtu);
  std::shared_ptr<rdma::Engine> engine;
  if (question.wish == rdma::Wish::gloo) {
    offer.reason = "ARK_NET=gloo";
  } else {
    try {
      engine = rdma::Engine::of(question.options);
      const rdma::PortInfo& port = engine->device()->port();
      offer.usable = true;
      offer.ethernet = port.ethernet;
      offer.mtu = static_cast<uint32_t>(port.mtu);
      offer.device = port.device;
    } catch (const Error& error) {
      const std::string& remedy = error.context().remedy;
      offer.reason = printable(error.message() + (remedy.empty() ? "" : ". " + remedy));
    }
  }
  store.set(key(question.rank), offer.encode());
  std::vector<rdma::Offer> offers;
  for (int rank = 0; rank < question.size; ++rank) {
    const auto record = store.get(key(rank), question.timeout);
    try {
      offers.push_back(rdma::Offer::decode(record));
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
  const std::string text = decision.reason + "; here " + engine->device()->text();
  return {
      std::make_shared<RdmaCarrier>(std::make_shared<rdma::Messages>(std::move(engine), own_store(), std::move(setup))),
      text};
}

}  // namespace ark

// RDMA as a carrier (dma/rdma/messages.hpp), and the agreement of a group's ranks on whether to use it.
//
// Each rank publishes what it could use or why it cannot. All ranks read all offers and decide the same way
// (rdma::decide). Then each rank exchanges a message with its data peers and reports the outcome, which catches a NIC
// whose network reaches no peer. So a group uses RDMA as a whole or not at all, and a rank without it never blocks the
// others.
#pragma once

#include <functional>

#include "dma/rdma/messages.hpp"
#include "process_group/carriers/carrier.hpp"

namespace ark {

class RdmaCarrier : public Carrier {
 public:
  explicit RdmaCarrier(std::shared_ptr<rdma::Messages> messages) : messages_(std::move(messages)) {}
  ~RdmaCarrier() override { close(true); }
  std::string name() const override { return "RDMA (" + messages_->device() + ")"; }
  MessagePtr send(int peer, int tag, const void* data, size_t bytes) override;
  MessagePtr receive(int peer, int tag, void* data, size_t bytes) override;
  MessagePtr receive_any(int tag, void* data, size_t bytes) override;
  void close(bool failed) override;
  const std::shared_ptr<rdma::Messages>& messages() const { return messages_; }

 private:
  const std::shared_ptr<rdma::Messages> messages_;
};

struct RdmaAgreement {
  std::shared_ptr<RdmaCarrier> carrier;  // null: RDMA is not used
  std::string reason;                    // for people: the network in use, or why not RDMA
};

struct RdmaQuestion {
  int rank = 0, size = 0;
  std::string start;  // identifies this start of the group
  rdma::Wish wish = rdma::Wish::automatic;
  rdma::Options options;
  std::chrono::milliseconds timeout{0};
  std::vector<int> peers;  // ranks that exchange data with this rank
};
// Collective over the group's ranks. own_store: makes a store that only the carrier uses. Throws
// Error(invalid_argument) on all ranks if one requires RDMA and it cannot be used, Error(mismatch) if ranks run
// different versions of ark_torch.
RdmaAgreement agree_on_rdma(const RdmaQuestion& question, KeyValueStore& store,
                            const std::function<std::unique_ptr<KeyValueStore>()>& own_store);

}  // namespace ark

// RDMA as a carrier (dma/rdma/messages.hpp), and the agreement of a group's ranks whether it is theirs.
//
// Each rank offers what it could use, or says why nothing; all read all offers and conclude alike (rdma::decide). Then
// each exchanges a message with those that it will exchange data with, and says whether they came: a NIC whose network
// reaches nobody is no use. So a group goes by RDMA as a whole or not at all, and a rank without it never keeps the
// others waiting.
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
  std::shared_ptr<RdmaCarrier> carrier;  // null: not by RDMA
  std::string reason;                    // for people: by what, or why not
};

struct RdmaQuestion {
  int rank = 0, size = 0;
  std::string start;  // of this start of the group
  rdma::Wish wish = rdma::Wish::automatic;
  rdma::Options options;
  std::chrono::milliseconds timeout{0};
  std::vector<int> peers;  // with whom this rank will exchange data, as they with it
};
// Collective over the group's ranks. own_store: makes one that the carrier keeps and nobody else waits in.
// Error(invalid_argument) on all ranks where one insists on RDMA and it cannot be; Error(mismatch) for ranks of another
// ark_torch.
RdmaAgreement agree_on_rdma(const RdmaQuestion& question, KeyValueStore& store,
                            const std::function<std::unique_ptr<KeyValueStore>()>& own_store);

}  // namespace ark

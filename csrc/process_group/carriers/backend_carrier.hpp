// Uses a PyTorch backend (Gloo) as a carrier, through its send, recv and recvAnysource.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "process_group/carriers/carrier.hpp"

namespace ark {

class BackendCarrier : public Carrier {
 public:
  explicit BackendCarrier(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}
  std::string name() const override { return backend_->getBackendName(); }
  MessagePtr send(int peer, int tag, const void* data, size_t bytes) override;
  MessagePtr receive(int peer, int tag, void* data, size_t bytes) override;
  MessagePtr receive_any(int tag, void* data, size_t bytes) override;

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace ark

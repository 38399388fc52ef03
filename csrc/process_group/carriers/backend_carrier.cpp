// Forwards messages to a PyTorch backend as byte tensors over the caller's memory, because a backend such as Gloo
// supports fewer dtypes than ark.
#include "process_group/carriers/backend_carrier.hpp"

namespace ark {

namespace {

// Passes the data as bytes, because the backend supports fewer dtypes than ark.
std::vector<at::Tensor> bytes_at(void* data, size_t bytes) {
  return {at::from_blob(data, {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte))};
}

class BackendMessage : public Carrier::Message {
 public:
  explicit BackendMessage(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  bool wait(std::chrono::milliseconds patience) override { return work_->wait(patience); }
  void abort() override { work_->abort(); }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

Carrier::MessagePtr BackendCarrier::send(int peer, int tag, const void* data, size_t bytes) {
  auto memory = bytes_at(const_cast<void*>(data), bytes);
  return std::make_shared<BackendMessage>(backend_->send(memory, peer, tag));
}

Carrier::MessagePtr BackendCarrier::receive(int peer, int tag, void* data, size_t bytes) {
  auto memory = bytes_at(data, bytes);
  return std::make_shared<BackendMessage>(backend_->recv(memory, peer, tag));
}

Carrier::MessagePtr BackendCarrier::receive_any(int tag, void* data, size_t bytes) {
  auto memory = bytes_at(data, bytes);
  return std::make_shared<BackendMessage>(backend_->recvAnysource(memory, tag));
}

}  // namespace ark

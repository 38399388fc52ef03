// Interface for messages between nodes, implemented by PyTorch's Gloo (backend_carrier.hpp) and RDMA
// (rdma_carrier.hpp).
//
// Messages of one tag between two ranks arrive in send order and must have the size of their posted receive. A tag is
// received either from named ranks or from any rank, never both.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

namespace ark {

class Carrier {
 public:
  // A message in flight. Its memory must stay unchanged until it has been waited for or cancelled. The destructor
  // cancels it.
  class Message {
   public:
    virtual ~Message() = default;
    // Returns false when `patience` is over. Throws the message's failure.
    virtual bool wait(std::chrono::milliseconds patience) = 0;
    virtual void abort() = 0;  // from any thread
  };
  using MessagePtr = std::shared_ptr<Message>;

  virtual ~Carrier() = default;
  virtual std::string name() const = 0;  // for messages to people
  virtual MessagePtr send(int peer, int tag, const void* data, size_t bytes) = 0;
  virtual MessagePtr receive(int peer, int tag, void* data, size_t bytes) = 0;
  virtual MessagePtr receive_any(int tag, void* data, size_t bytes) = 0;
  // No message may begin after this. Earlier sends arrive first, unless the group has failed.
  virtual void close(bool /*failed*/) {}
};

}  // namespace ark

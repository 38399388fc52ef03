// What carries messages between nodes: PyTorch's Gloo (backend_carrier.hpp), or RDMA (rdma_carrier.hpp).
//
// Messages of one tag between two ranks arrive in the order in which they are sent, and have the size that was posted
// for them. A tag is received from one rank at a time or from anyone, never both.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

namespace ark {

class Carrier {
 public:
  // A message that was begun. Its memory stays as it is until the message has been waited for or is given up, which it
  // is when it goes.
  class Message {
   public:
    virtual ~Message() = default;
    // False where the time is over; throws what the message failed with.
    virtual bool wait(std::chrono::milliseconds patience) = 0;
    virtual void abort() = 0;  // from any thread
  };
  using MessagePtr = std::shared_ptr<Message>;

  virtual ~Carrier() = default;
  virtual std::string name() const = 0;  // for messages to people
  virtual MessagePtr send(int peer, int tag, const void* data, size_t bytes) = 0;
  virtual MessagePtr receive(int peer, int tag, void* data, size_t bytes) = 0;
  virtual MessagePtr receive_any(int tag, void* data, size_t bytes) = 0;
  // Nothing will begin any more. What was sent arrives first, unless the group has failed.
  virtual void close(bool /*failed*/) {}
};

}  // namespace ark

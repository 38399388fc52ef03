// One reliable connection's queue pair, through its states: reset, initialised, ready to receive, ready to send, error.
//
// States are entered in this order alone; anything else is a fault of the caller and told as one. The owner serialises
// calls. Ending it takes it out of the NIC: nothing of the peer's is written any more once the error state is reached.
#pragma once

#include "dma/rdma/endpoint.hpp"
#include "dma/rdma/engine.hpp"

namespace ark::rdma {

class QueuePair {
 public:
  enum class State { initialised, ready_to_receive, ready_to_send, failed };

  // Initialised: receives may be posted. Error(system) where the device has no more.
  QueuePair(Engine& engine, ibv_cq* queue, int rank, int peer, int sends, int receives);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  void connect(const Endpoint& peer, int mtu);  // to ready_to_send
  void fail();                                  // from any state

  State state() const { return state_; }
  ibv_qp* get() const { return pair_; }
  uint32_t number() const { return pair_->qp_num; }
  uint32_t first_packet() const { return first_packet_; }
  uint32_t most_inline() const { return most_inline_; }

 private:
  void change(ibv_qp_attr& attributes, int mask, const char* to, const std::string& remedy);

  Engine& engine_;
  const int rank_, peer_;
  uint32_t first_packet_ = 0, most_inline_ = 0;
  ibv_qp* pair_ = nullptr;
  State state_ = State::initialised;
};

}  // namespace ark::rdma

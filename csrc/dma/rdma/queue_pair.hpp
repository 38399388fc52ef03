// The queue pair of one reliable connection and its states: reset, initialised, ready to receive, ready to send, error.
//
// States follow this order only; any other transition throws, because it is a bug of the caller. The owner serialises
// calls. Once the error state is reached, or the queue pair is destroyed, the peer can no longer write here.
#pragma once

#include "dma/rdma/endpoint.hpp"
#include "dma/rdma/engine.hpp"

namespace ark::rdma {

class QueuePair {
 public:
  enum class State { initialised, ready_to_receive, ready_to_send, failed };

  // Creates the queue pair as initialised, so receives may be posted. Throws Error(system) if the device has none left.
  QueuePair(Engine& engine, ibv_cq* queue, int rank, int peer, int sends, int receives);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  void connect(const Endpoint& peer, int mtu);  // moves to ready_to_send
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

// Creates a queue pair and moves it through its states with the attributes that each transition needs. The first packet
// number is random, as usual for reliable connections, so that late packets of an earlier one are not accepted.
#include "dma/rdma/queue_pair.hpp"

#include <cerrno>
#include <cstring>
#include <random>

namespace ark::rdma {

namespace {

constexpr uint32_t kInline = 220;          // in bytes; fits a doorbell of today's NICs
constexpr uint8_t kReceiverNotReady = 12;  // 0.64 ms, in case a receiver is ever not ready
constexpr uint8_t kHops = 64;

ibv_mtu code_of(int bytes) {
  ibv_mtu code = IBV_MTU_256;
  while (code < IBV_MTU_4096 && 128 << (code + 1) <= bytes) code = static_cast<ibv_mtu>(code + 1);
  return code;
}

}  // namespace

QueuePair::QueuePair(Engine& engine, ibv_cq* queue, int rank, int peer, int sends, int receives)
    : engine_(engine), rank_(rank), peer_(peer), first_packet_(std::random_device()() & 0xffffff) {
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = queue;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = static_cast<uint32_t>(sends);
  wanted.cap.max_recv_wr = static_cast<uint32_t>(receives);
  wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
  for (const uint32_t bytes : {kInline, 64u, 0u}) {  // some NICs reject a large value instead of lowering it
    ibv_qp_init_attr attributes = wanted;
    attributes.cap.max_inline_data = bytes;
    pair_ = engine.verbs().create_qp(engine.device()->domain(), &attributes);
    most_inline_ = std::min(attributes.cap.max_inline_data, kInline);
    if (pair_) break;
  }
  if (!pair_) {
    Error error =
        system_error("no queue pair for rank " + std::to_string(peer) + " on " + engine.device()->port().device, errno,
                     "See the device's limits (`ibv_devinfo -v`: max_qp, max_qp_wr) and `ulimit -l`.");
    throw error.at(rank, "init");
  }
  ibv_qp_attr attributes;
  std::memset(&attributes, 0, sizeof attributes);
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = static_cast<uint8_t>(engine.device()->port().port);
  attributes.pkey_index = static_cast<uint16_t>(engine.device()->options().pkey_index);
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  try {
    change(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "initialised",
           "See ARK_RDMA_PORT and ARK_RDMA_PKEY_INDEX.");
  } catch (...) {
    engine_.verbs().destroy_qp(pair_);
    throw;
  }
}

QueuePair::~QueuePair() {
  engine_.verbs().destroy_qp(pair_);
}

void QueuePair::change(ibv_qp_attr& attributes, int mask, const char* to, const std::string& remedy) {
  const int error = engine_.verbs().modify_qp(pair_, &attributes, mask);
  if (error == 0) return;
  throw Error(ErrorKind::system,
              "the connection to rank " + std::to_string(peer_) + " cannot become " + to + " on " +
                  engine_.device()->text() + ": " + std::strerror(error < 0 ? errno : error),
              ErrorContext{rank_, peer_, "init", 0, remedy});
}

void QueuePair::connect(const Endpoint& peer, int mtu) {
  if (state_ != State::initialised)
    throw Error(ErrorKind::system, "a queue pair was to be connected twice, or after it failed",
                ErrorContext{rank_, peer_, "init", 0, "Report this as a fault of ark_torch."});
  const Device& device = *engine_.device();
  const Options& options = device.options();
  ibv_qp_attr attributes;
  std::memset(&attributes, 0, sizeof attributes);
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = code_of(mtu);
  attributes.dest_qp_num = peer.pair;
  attributes.rq_psn = peer.first_packet;
  attributes.max_dest_rd_atomic = 1;  // no rank issues RDMA reads
  attributes.min_rnr_timer = kReceiverNotReady;
  ibv_ah_attr& path = attributes.ah_attr;
  path.port_num = static_cast<uint8_t>(device.port().port);
  path.dlid = static_cast<uint16_t>(peer.lid);
  path.sl = static_cast<uint8_t>(options.service_level);
  if (device.port().ethernet || options.gid_index >= 0) {
    path.is_global = 1;
    std::memcpy(path.grh.dgid.raw, peer.gid.data(), sizeof path.grh.dgid.raw);
    path.grh.sgid_index = static_cast<uint8_t>(device.port().gid_index);
    path.grh.hop_limit = kHops;
    path.grh.traffic_class = static_cast<uint8_t>(options.traffic_class);
  }
  ibv_gid there;
  std::memcpy(there.raw, peer.gid.data(), sizeof there.raw);
  change(attributes,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER,
         "ready to receive",
         "See whether that machine can be reached from this one (`ping` " + text_of(there) +
             " from the NIC's interface), and whether ARK_RDMA_GID_INDEX chooses GIDs of one network.");
  state_ = State::ready_to_receive;
  std::memset(&attributes, 0, sizeof attributes);
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = first_packet_;
  attributes.timeout = static_cast<uint8_t>(options.timeout);
  attributes.retry_cnt = static_cast<uint8_t>(options.retry_count);
  attributes.rnr_retry = static_cast<uint8_t>(options.rnr_retry);
  attributes.max_rd_atomic = 1;
  change(attributes,
         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
         "ready to send", "See ARK_RDMA_TIMEOUT and ARK_RDMA_RETRY_COUNT.");
  state_ = State::ready_to_send;
}

void QueuePair::fail() {
  if (state_ == State::failed) return;
  state_ = State::failed;
  ibv_qp_attr attributes;
  std::memset(&attributes, 0, sizeof attributes);
  attributes.qp_state = IBV_QPS_ERR;
  engine_.verbs().modify_qp(pair_, &attributes, IBV_QP_STATE);  // if this fails too, the device has failed
}

}  // namespace ark::rdma

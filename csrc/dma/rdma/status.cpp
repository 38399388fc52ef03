// The texts and remedies of work completion statuses. Statuses that only a bug can cause ask for a report; those of
// links and peers name what the user can check or change.
#include "dma/rdma/status.hpp"

#include <cmath>
#include <cstdio>

namespace ark::rdma {

namespace {

constexpr const char* kRestart = "Destroy the process group on every rank (or restart the job) before going on.";
constexpr const char* kReport = "This is a fault of ark_torch or of the NIC's driver: report it with `ark doctor`.";
constexpr const char* kLink =
    "See whether that rank's process lives, and the link and the switches between (`ibv_devinfo`, `ip -s link`, for "
    "RoCE a lossless or ECN configuration); ARK_RDMA_TIMEOUT and ARK_RDMA_RETRY_COUNT give it longer.";

}  // namespace

StatusText text_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS: return {ErrorKind::system, "success", ""};
    case IBV_WC_LOC_LEN_ERR: return {ErrorKind::system, "a message is longer than its receive buffer", kReport};
    case IBV_WC_LOC_QP_OP_ERR: return {ErrorKind::system, "the NIC refused the request as malformed", kReport};
    case IBV_WC_LOC_EEC_OP_ERR: return {ErrorKind::system, "an end-to-end context failed", kReport};
    case IBV_WC_LOC_PROT_ERR:
      return {ErrorKind::system, "memory of this rank is not registered, or no longer",
              "Leave tensors alone while a collective uses them; where ARK_RDMA_CACHE_MB is set, unset it."};
    case IBV_WC_WR_FLUSH_ERR:
      return {ErrorKind::aborted, "the connection had failed before this request was carried out", kRestart};
    case IBV_WC_MW_BIND_ERR: return {ErrorKind::system, "a memory window could not be bound", kReport};
    case IBV_WC_BAD_RESP_ERR:
      return {ErrorKind::system, "the peer's NIC answered with something that makes no sense", kReport};
    case IBV_WC_LOC_ACCESS_ERR: return {ErrorKind::system, "this rank's memory may not be written", kReport};
    case IBV_WC_REM_INV_REQ_ERR:
      return {ErrorKind::system, "the peer's NIC refused the request as malformed",
              "See that all ranks have the same ark_torch and the same ARK_RDMA_MTU."};
    case IBV_WC_REM_ACCESS_ERR:
      return {ErrorKind::system, "the peer's NIC refused access to that memory (wrong key, or no longer registered)",
              "See whether that rank has failed before; where ARK_RDMA_CACHE_MB is set, unset it."};
    case IBV_WC_REM_OP_ERR: return {ErrorKind::system, "the peer's NIC failed to carry out the request", kLink};
    case IBV_WC_RETRY_EXC_ERR:
      return {ErrorKind::peer_lost, "the peer's NIC did not answer, however often a packet was sent again", kLink};
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return {ErrorKind::system, "the peer was not ready to receive, in spite of its credits", kReport};
    case IBV_WC_LOC_RDD_VIOL_ERR: return {ErrorKind::system, "a reliable datagram domain was violated", kReport};
    case IBV_WC_REM_INV_RD_REQ_ERR: return {ErrorKind::system, "the peer refused a reliable datagram", kReport};
    case IBV_WC_REM_ABORT_ERR: return {ErrorKind::aborted, "the peer's NIC gave the request up", kRestart};
    case IBV_WC_INV_EECN_ERR: return {ErrorKind::system, "an end-to-end context has no such number", kReport};
    case IBV_WC_INV_EEC_STATE_ERR: return {ErrorKind::system, "an end-to-end context is in a wrong state", kReport};
    case IBV_WC_FATAL_ERR:
      return {ErrorKind::system, "the NIC failed", "See the kernel's log (dmesg) for the NIC, and restart the job."};
    case IBV_WC_RESP_TIMEOUT_ERR: return {ErrorKind::peer_lost, "the peer did not answer in time", kLink};
    case IBV_WC_GENERAL_ERR:
      return {ErrorKind::system, "the transport failed", "See the kernel's log (dmesg) for the NIC."};
  }
  return {ErrorKind::system, "the NIC reported a status that is not known", kReport};
}

Error error_of(const ibv_wc& completion, int rank, int peer, const char* operation, const std::string& device) {
  const StatusText text = text_of(completion.status);
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, " (status %u, vendor's code %#x)", static_cast<unsigned>(completion.status),
                completion.vendor_err);
  return Error(text.kind,
               "RDMA with rank " + std::to_string(peer) + " over " + device + " failed: " + text.what + numbers,
               ErrorContext{rank, peer, std::string("rdma ") + operation, 0, text.remedy});
}

std::string retry_budget(int timeout, int retry_count) {
  const double seconds = timeout == 0 ? 0 : 4.096e-6 * std::ldexp(1.0, timeout) * (retry_count + 1);
  char text[64];
  std::snprintf(text, sizeof text, timeout == 0 ? "for ever" : "%.3g s", seconds);
  return text;
}

}  // namespace ark::rdma

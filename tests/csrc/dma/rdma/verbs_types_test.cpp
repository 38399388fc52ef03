// Compares our declarations of libibverbs' ABI with the real <infiniband/verbs.h>, at compile time. CMake builds it
// only if it finds that header (Debian: libibverbs-dev).
#include "dma/rdma/verbs_types.hpp"

#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <cstddef>

namespace {

#define SAME_TYPE(type) \
  static_assert(sizeof(ark::type) == sizeof(::type) && alignof(ark::type) == alignof(::type), #type)
#define SAME_FIELD(type, field)                                                                                      \
  static_assert(offsetof(ark::type, field) == offsetof(::type, field) &&                                             \
                    sizeof(static_cast<ark::type*>(nullptr)->field) == sizeof(static_cast<::type*>(nullptr)->field), \
                #type "." #field)
#define SAME_VALUE(name) static_assert(static_cast<long>(ark::name) == static_cast<long>(::name), #name)

SAME_TYPE(ibv_gid);
SAME_TYPE(ibv_gid_entry);
SAME_FIELD(ibv_gid_entry, gid_index);
SAME_FIELD(ibv_gid_entry, gid_type);
SAME_TYPE(ibv_port_attr);
SAME_FIELD(ibv_port_attr, state);
SAME_FIELD(ibv_port_attr, active_mtu);
SAME_FIELD(ibv_port_attr, gid_tbl_len);
SAME_FIELD(ibv_port_attr, max_msg_sz);
SAME_FIELD(ibv_port_attr, pkey_tbl_len);
SAME_FIELD(ibv_port_attr, lid);
SAME_FIELD(ibv_port_attr, link_layer);
SAME_FIELD(ibv_port_attr, port_cap_flags2);
SAME_TYPE(ibv_device_attr);
SAME_FIELD(ibv_device_attr, max_mr_size);
SAME_FIELD(ibv_device_attr, max_qp);
SAME_FIELD(ibv_device_attr, max_qp_wr);
SAME_FIELD(ibv_device_attr, max_cqe);
SAME_FIELD(ibv_device_attr, max_qp_rd_atom);
SAME_FIELD(ibv_device_attr, phys_port_cnt);
SAME_TYPE(ibv_mr);
SAME_FIELD(ibv_mr, lkey);
SAME_FIELD(ibv_mr, rkey);
SAME_TYPE(ibv_sge);
SAME_FIELD(ibv_sge, lkey);
SAME_TYPE(ibv_send_wr);
SAME_FIELD(ibv_send_wr, sg_list);
SAME_FIELD(ibv_send_wr, opcode);
SAME_FIELD(ibv_send_wr, send_flags);
SAME_FIELD(ibv_send_wr, imm_data);
SAME_FIELD(ibv_send_wr, wr.rdma.remote_addr);
SAME_FIELD(ibv_send_wr, wr.rdma.rkey);
SAME_TYPE(ibv_recv_wr);
SAME_FIELD(ibv_recv_wr, num_sge);
SAME_TYPE(ibv_wc);
SAME_FIELD(ibv_wc, status);
SAME_FIELD(ibv_wc, opcode);
SAME_FIELD(ibv_wc, vendor_err);
SAME_FIELD(ibv_wc, byte_len);
SAME_FIELD(ibv_wc, imm_data);
SAME_FIELD(ibv_wc, qp_num);
SAME_FIELD(ibv_wc, wc_flags);
SAME_TYPE(ibv_comp_channel);
SAME_FIELD(ibv_comp_channel, fd);
SAME_TYPE(ibv_cq);
SAME_FIELD(ibv_cq, cqe);
SAME_TYPE(ibv_qp);
SAME_FIELD(ibv_qp, qp_num);
SAME_FIELD(ibv_qp, state);
SAME_TYPE(ibv_qp_cap);
SAME_FIELD(ibv_qp_cap, max_inline_data);
SAME_TYPE(ibv_qp_init_attr);
SAME_FIELD(ibv_qp_init_attr, cap);
SAME_FIELD(ibv_qp_init_attr, qp_type);
SAME_FIELD(ibv_qp_init_attr, sq_sig_all);
SAME_TYPE(ibv_global_route);
SAME_FIELD(ibv_global_route, sgid_index);
SAME_FIELD(ibv_global_route, traffic_class);
SAME_TYPE(ibv_ah_attr);
SAME_FIELD(ibv_ah_attr, dlid);
SAME_FIELD(ibv_ah_attr, is_global);
SAME_FIELD(ibv_ah_attr, port_num);
SAME_TYPE(ibv_qp_attr);
SAME_FIELD(ibv_qp_attr, path_mtu);
SAME_FIELD(ibv_qp_attr, rq_psn);
SAME_FIELD(ibv_qp_attr, sq_psn);
SAME_FIELD(ibv_qp_attr, dest_qp_num);
SAME_FIELD(ibv_qp_attr, qp_access_flags);
SAME_FIELD(ibv_qp_attr, ah_attr);
SAME_FIELD(ibv_qp_attr, pkey_index);
SAME_FIELD(ibv_qp_attr, max_rd_atomic);
SAME_FIELD(ibv_qp_attr, max_dest_rd_atomic);
SAME_FIELD(ibv_qp_attr, min_rnr_timer);
SAME_FIELD(ibv_qp_attr, port_num);
SAME_FIELD(ibv_qp_attr, timeout);
SAME_FIELD(ibv_qp_attr, retry_cnt);
SAME_FIELD(ibv_qp_attr, rnr_retry);
SAME_TYPE(ibv_async_event);
SAME_FIELD(ibv_async_event, event_type);
SAME_TYPE(ibv_context_ops);
SAME_FIELD(ibv_context_ops, poll_cq);
SAME_FIELD(ibv_context_ops, req_notify_cq);
SAME_FIELD(ibv_context_ops, post_send);
SAME_FIELD(ibv_context_ops, post_recv);
SAME_TYPE(ibv_context);
SAME_FIELD(ibv_context, ops);
SAME_FIELD(ibv_context, async_fd);

SAME_VALUE(IBV_GID_TYPE_IB);
SAME_VALUE(IBV_GID_TYPE_ROCE_V1);
SAME_VALUE(IBV_GID_TYPE_ROCE_V2);
SAME_VALUE(IBV_PORT_DOWN);
SAME_VALUE(IBV_PORT_ACTIVE);
SAME_VALUE(IBV_MTU_256);
SAME_VALUE(IBV_MTU_4096);
SAME_VALUE(IBV_LINK_LAYER_INFINIBAND);
SAME_VALUE(IBV_LINK_LAYER_ETHERNET);
SAME_VALUE(IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(IBV_ACCESS_REMOTE_READ);
SAME_VALUE(IBV_WR_RDMA_WRITE);
SAME_VALUE(IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(IBV_SEND_SIGNALED);
SAME_VALUE(IBV_SEND_INLINE);
SAME_VALUE(IBV_WC_SUCCESS);
SAME_VALUE(IBV_WC_LOC_LEN_ERR);
SAME_VALUE(IBV_WC_LOC_QP_OP_ERR);
SAME_VALUE(IBV_WC_LOC_PROT_ERR);
SAME_VALUE(IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(IBV_WC_BAD_RESP_ERR);
SAME_VALUE(IBV_WC_LOC_ACCESS_ERR);
SAME_VALUE(IBV_WC_REM_INV_REQ_ERR);
SAME_VALUE(IBV_WC_REM_ACCESS_ERR);
SAME_VALUE(IBV_WC_REM_OP_ERR);
SAME_VALUE(IBV_WC_RETRY_EXC_ERR);
SAME_VALUE(IBV_WC_RNR_RETRY_EXC_ERR);
SAME_VALUE(IBV_WC_REM_ABORT_ERR);
SAME_VALUE(IBV_WC_FATAL_ERR);
SAME_VALUE(IBV_WC_RESP_TIMEOUT_ERR);
SAME_VALUE(IBV_WC_GENERAL_ERR);
SAME_VALUE(IBV_WC_RDMA_WRITE);
SAME_VALUE(IBV_WC_RECV);
SAME_VALUE(IBV_WC_RECV_RDMA_WITH_IMM);
SAME_VALUE(IBV_WC_WITH_IMM);
SAME_VALUE(IBV_QPT_RC);
SAME_VALUE(IBV_QPS_RESET);
SAME_VALUE(IBV_QPS_INIT);
SAME_VALUE(IBV_QPS_RTR);
SAME_VALUE(IBV_QPS_RTS);
SAME_VALUE(IBV_QPS_ERR);
SAME_VALUE(IBV_QP_STATE);
SAME_VALUE(IBV_QP_ACCESS_FLAGS);
SAME_VALUE(IBV_QP_PKEY_INDEX);
SAME_VALUE(IBV_QP_PORT);
SAME_VALUE(IBV_QP_AV);
SAME_VALUE(IBV_QP_PATH_MTU);
SAME_VALUE(IBV_QP_TIMEOUT);
SAME_VALUE(IBV_QP_RETRY_CNT);
SAME_VALUE(IBV_QP_RNR_RETRY);
SAME_VALUE(IBV_QP_RQ_PSN);
SAME_VALUE(IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(IBV_QP_SQ_PSN);
SAME_VALUE(IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(IBV_QP_DEST_QPN);
SAME_VALUE(IBV_EVENT_QP_FATAL);
SAME_VALUE(IBV_EVENT_DEVICE_FATAL);
SAME_VALUE(IBV_EVENT_PORT_ACTIVE);
SAME_VALUE(IBV_EVENT_PORT_ERR);

TEST(VerbsTypesTest, AreThoseOfTheRealHeader) {
  ark::ibv_send_wr ours{};
  ours.wr.rdma.rkey = 7;
  EXPECT_EQ(reinterpret_cast<const ::ibv_send_wr&>(ours).wr.rdma.rkey, 7u);
}

}  // namespace

// libibverbs, loaded at run time. Without it everything else still works, and `ark doctor` shows the reason.
//
// The functions form a table so that tests can substitute a fake library. The library is never closed, because NIC
// drivers keep threads and atexit handlers that do not survive dlclose().
#pragma once

#include <memory>
#include <string>

#include "dma/rdma/verbs_types.hpp"
#include "util/dynamic_library.hpp"

namespace ark::rdma {

struct Verbs {
  ibv_device** (*get_device_list)(int* count);
  void (*free_device_list)(ibv_device** list);
  const char* (*get_device_name)(ibv_device* device);
  ibv_context* (*open_device)(ibv_device* device);
  int (*close_device)(ibv_context* context);
  int (*query_device)(ibv_context* context, ibv_device_attr* attributes);
  int (*query_port)(ibv_context* context, uint8_t port, ibv_port_attr* attributes);
  int (*query_gid)(ibv_context* context, uint8_t port, int index, ibv_gid* gid);
  ibv_pd* (*alloc_pd)(ibv_context* context);
  int (*dealloc_pd)(ibv_pd* domain);
  ibv_mr* (*reg_mr)(ibv_pd* domain, void* address, size_t bytes, int access);
  int (*dereg_mr)(ibv_mr* region);
  ibv_comp_channel* (*create_comp_channel)(ibv_context* context);
  int (*destroy_comp_channel)(ibv_comp_channel* channel);
  ibv_cq* (*create_cq)(ibv_context* context, int entries, void* user, ibv_comp_channel* channel, int vector);
  int (*destroy_cq)(ibv_cq* queue);
  int (*get_cq_event)(ibv_comp_channel* channel, ibv_cq** queue, void** user);
  void (*ack_cq_events)(ibv_cq* queue, unsigned int count);
  ibv_qp* (*create_qp)(ibv_pd* domain, ibv_qp_init_attr* attributes);
  int (*modify_qp)(ibv_qp* pair, ibv_qp_attr* attributes, int mask);
  int (*destroy_qp)(ibv_qp* pair);
  int (*get_async_event)(ibv_context* context, ibv_async_event* event);
  void (*ack_async_event)(ibv_async_event* event);
  // Optional; null if the library does not have it.
  int (*query_gid_ex)(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry, uint32_t flags,
                      size_t entry_bytes);
  int (*fork_init)();
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* domain, uint64_t offset, size_t bytes, uint64_t address, int fd, int access);

  static int poll_cq(ibv_cq* queue, int count, ibv_wc* completions) {
    return queue->context->ops.poll_cq(queue, count, completions);
  }
  static int req_notify_cq(ibv_cq* queue) { return queue->context->ops.req_notify_cq(queue, 0); }
  static int post_send(ibv_qp* pair, ibv_send_wr* requests, ibv_send_wr** bad) {
    return pair->context->ops.post_send(pair, requests, bad);
  }
  static int post_recv(ibv_qp* pair, ibv_recv_wr* requests, ibv_recv_wr** bad) {
    return pair->context->ops.post_recv(pair, requests, bad);
  }

  // path: of the library; empty: the system's. Returns null and sets `why_not` on failure.
  static std::shared_ptr<const Verbs> load(const std::string& path, std::string& why_not,
                                           const jit::LibraryOpener& opener = jit::LibraryOpener::system());
};

}  // namespace ark::rdma

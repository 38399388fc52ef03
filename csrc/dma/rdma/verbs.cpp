// Opens libibverbs and looks up its functions. A missing library or function gives a text, not an error, because RDMA
// is optional. Functions that only newer versions have are optional, too.
#include "dma/rdma/verbs.hpp"

namespace ark::rdma {

std::shared_ptr<const Verbs> Verbs::load(const std::string& path, std::string& why_not,
                                         const jit::LibraryOpener& opener) {
  const std::string name = path.empty() ? "libibverbs.so.1" : path;
  std::string reason;
  void* library = opener.open(name, reason);
  if (!library) {
    why_not = "no libibverbs (" + reason + "): install rdma-core's (Debian: libibverbs1, ibverbs-providers)";
    return nullptr;
  }
  auto verbs = std::make_shared<Verbs>();
  std::string missing;
  const auto find = [&](auto& function, const char* symbol, bool needed = true) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(opener.symbol(library, symbol));
    if (!function && needed && missing.empty()) missing = symbol;
  };
  find(verbs->get_device_list, "ibv_get_device_list");
  find(verbs->free_device_list, "ibv_free_device_list");
  find(verbs->get_device_name, "ibv_get_device_name");
  find(verbs->open_device, "ibv_open_device");
  find(verbs->close_device, "ibv_close_device");
  find(verbs->query_device, "ibv_query_device");
  find(verbs->query_port, "ibv_query_port");
  find(verbs->query_gid, "ibv_query_gid");
  find(verbs->alloc_pd, "ibv_alloc_pd");
  find(verbs->dealloc_pd, "ibv_dealloc_pd");
  find(verbs->reg_mr, "ibv_reg_mr");
  find(verbs->dereg_mr, "ibv_dereg_mr");
  find(verbs->create_comp_channel, "ibv_create_comp_channel");
  find(verbs->destroy_comp_channel, "ibv_destroy_comp_channel");
  find(verbs->create_cq, "ibv_create_cq");
  find(verbs->destroy_cq, "ibv_destroy_cq");
  find(verbs->get_cq_event, "ibv_get_cq_event");
  find(verbs->ack_cq_events, "ibv_ack_cq_events");
  find(verbs->create_qp, "ibv_create_qp");
  find(verbs->modify_qp, "ibv_modify_qp");
  find(verbs->destroy_qp, "ibv_destroy_qp");
  find(verbs->get_async_event, "ibv_get_async_event");
  find(verbs->ack_async_event, "ibv_ack_async_event");
  find(verbs->query_gid_ex, "_ibv_query_gid_ex", false);
  find(verbs->fork_init, "ibv_fork_init", false);
  find(verbs->reg_dmabuf_mr, "ibv_reg_dmabuf_mr", false);
  if (!missing.empty()) {
    why_not = name + " has no " + missing + ": install rdma-core 28 or newer";
    return nullptr;
  }
  // Registered memory must not move when this process forks (a DataLoader's workers). Kernels since 5.12 ensure that
  // anyway. The call fails if another library has registered memory before; then that library has decided.
  if (verbs->fork_init) verbs->fork_init();
  return verbs;
}

}  // namespace ark::rdma

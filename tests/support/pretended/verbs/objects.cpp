// The objects and entry points of the pretended libibverbs. nic.hpp describes them.
//
// There are two devices with one port each. A port lists its GIDs as Linux does: RoCE v1 and v2 of a link-local
// address, then of an IPv4 address. So the wanted GID is number 3.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <set>

#include "nic.hpp"

namespace pretended {

using namespace ark;

namespace {

struct Device {
  char name[16];
  int number;
} devices[] = {{"pretend0", 0}, {"pretend1", 1}};

std::mutex registry_mutex;
std::set<Context*> registry;

Control* map_control() {
  const char* path = std::getenv("ARK_TEST_VERBS_CONTROL");
  const int file = path ? ::open(path, O_RDWR | O_CLOEXEC) : -1;
  void* memory =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file, 0);
  if (file >= 0) ::close(file);
  return static_cast<Control*>(memory == MAP_FAILED ? nullptr : memory);
}

void count_up(int descriptor) {
  const uint64_t one = 1;
  (void)!::write(descriptor, &one, sizeof one);
}

bool gid_at(int device, int index, ibv_gid& gid, uint32_t& type) {
  if (index < 0 || index > 3 || (index > 1 && pretend_control()->only_ipv6.load())) return false;
  std::memset(&gid, 0, sizeof gid);
  type = index % 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
  if (index < 2) {
    gid.raw[0] = 0xfe;
    gid.raw[1] = 0x80;
    gid.raw[15] = static_cast<uint8_t>(1 + device);
  } else {
    gid.raw[10] = gid.raw[11] = 0xff;
    gid.raw[12] = 10;
    gid.raw[13] = 77;
    gid.raw[15] = static_cast<uint8_t>(1 + device);
  }
  return true;
}

}  // namespace

Context* of(ibv_context* context) {
  return reinterpret_cast<Context*>(context);
}
Pair* of(ibv_qp* pair) {
  return reinterpret_cast<Pair*>(pair);
}

void wake(Context& context) {
  count_up(context.wake);
}

void complete(Queue& queue, const ibv_wc& entry) {
  auto& entries = queue.entries;
  entries.push_back(entry);
  const auto swaps = [](const ibv_wc& one) { return one.opcode == IBV_WC_RDMA_WRITE && one.status == IBV_WC_SUCCESS; };
  const size_t count = entries.size();
  if (pretend_control()->swap_completions.load() && count > 1 && swaps(entry) && swaps(entries[count - 2]))
    std::swap(entries[count - 1], entries[count - 2]);
  if (!queue.armed) return;
  queue.armed = false;
  auto* channel = reinterpret_cast<Channel*>(queue.base.channel);
  channel->events.push_back(&queue);
  count_up(channel->base.fd);
}

// Fails the first outstanding request with the status, and flushes all others.
void fail_pair(Pair& pair, ibv_wc_status first) {
  pair.base.state = IBV_QPS_ERR;
  ibv_wc entry{};
  entry.qp_num = pair.base.qp_num;
  entry.status = first;
  entry.vendor_err = 0x81;
  while (!pair.sends.empty()) {
    entry.wr_id = pair.sends.front().request.wr_id;
    pair.sends.pop_front();
    complete(*pair.sends_to, entry);
    entry.status = IBV_WC_WR_FLUSH_ERR;
  }
  pair.acknowledged = pair.next = pair.end;
  entry.status = IBV_WC_WR_FLUSH_ERR;
  while (!pair.receives.empty()) {
    entry.wr_id = pair.receives.front();
    pair.receives.pop_front();
    complete(*pair.receives_to, entry);
  }
}

int post_recv(ibv_qp* base, ibv_recv_wr* requests, ibv_recv_wr** bad) {
  Pair& pair = *of(base);
  const std::lock_guard lock(pair.context->mutex);
  for (ibv_recv_wr* one = requests; one; one = one->next) {
    if (pair.base.state == IBV_QPS_RESET || pair.receives.size() >= pair.cap.max_recv_wr) {
      *bad = one;
      return pair.base.state == IBV_QPS_RESET ? EINVAL : ENOMEM;
    }
    pair.receives.push_back(one->wr_id);
  }
  if (pair.base.state == IBV_QPS_ERR) fail_pair(pair, IBV_WC_WR_FLUSH_ERR);
  return 0;
}

int poll_cq(ibv_cq* base, int count, ibv_wc* entries) {
  auto& queue = *reinterpret_cast<Queue*>(base);
  const std::lock_guard lock(queue.context->mutex);
  int taken = 0;
  for (; taken < count && !queue.entries.empty(); ++taken) {
    entries[taken] = queue.entries.front();
    queue.entries.pop_front();
  }
  return taken;
}

int req_notify_cq(ibv_cq* base, int) {
  auto& queue = *reinterpret_cast<Queue*>(base);
  const std::lock_guard lock(queue.context->mutex);
  queue.armed = true;
  return 0;
}

}  // namespace pretended

using namespace pretended;
using namespace ark;

namespace {

ibv_mr* add_region(ibv_pd* domain, void* address, uint64_t begin, size_t bytes, int access) {
  Context* context = of(*reinterpret_cast<ibv_context**>(domain));
  const std::lock_guard lock(context->mutex);
  size_t registered = bytes;
  for (const auto& [key, region] : context->regions) registered += region->base.length;
  const uint32_t most = pretend_control()->most_memory.load();
  if (most > 0 && registered > size_t{most} << 10) {
    errno = ENOMEM;
    return nullptr;
  }
  auto* region = new Region;
  region->base = {&context->base, domain, address, bytes, 0, context->next_key, context->next_key};
  region->begin = begin;
  region->access = access;
  context->regions[context->next_key] = region;
  context->next_key += 0x100;
  ++pretend_counts()->regions;
  return &region->base;
}

}  // namespace

extern "C" {

Control* pretend_control() {
  static Control* control = map_control();
  return control;
}

Given* pretend_given() {
  static Given given;
  return &given;
}
Counts* pretend_counts() {
  static Counts counts;
  return &counts;
}

void pretend_break_pairs() {
  const std::lock_guard lock(registry_mutex);
  for (Context* context : registry) {
    const std::lock_guard inner(context->mutex);
    for (auto& [number, pair] : context->pairs) fail_pair(*pair, IBV_WC_WR_FLUSH_ERR);
  }
}

void pretend_device_fatal() {
  const std::lock_guard lock(registry_mutex);
  for (Context* context : registry) {
    const std::lock_guard inner(context->mutex);
    ibv_async_event event{};
    event.event_type = IBV_EVENT_DEVICE_FATAL;
    context->events.push_back(event);
    count_up(context->base.async_fd);
  }
}

ibv_device** ibv_get_device_list(int* count) {
  *count = pretend_control()->no_devices.load() ? 0 : 2;
  auto** list = static_cast<ibv_device**>(std::calloc(3, sizeof(ibv_device*)));
  for (int i = 0; i < *count; ++i) list[i] = reinterpret_cast<ibv_device*>(&devices[i]);
  return list;
}

void ibv_free_device_list(ibv_device** list) {
  std::free(list);
}

const char* ibv_get_device_name(ibv_device* device) {
  return reinterpret_cast<Device*>(device)->name;
}

ibv_context* ibv_open_device(ibv_device* device) {
  auto* context = new Context;
  context->base.device = device;
  context->number = reinterpret_cast<Device*>(device)->number;
  context->next_key += 8 * context->number;  // no device takes another's keys
  context->base.ops.poll_cq = poll_cq;
  context->base.ops.req_notify_cq = req_notify_cq;
  context->base.ops.post_send = post_send;
  context->base.ops.post_recv = post_recv;
  context->base.async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  context->base.cmd_fd = -1;
  context->wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  context->thread = std::thread([context] { run(*context); });
  ++pretend_counts()->contexts;
  const std::lock_guard lock(registry_mutex);
  registry.insert(context);
  return &context->base;
}

int ibv_close_device(ibv_context* base) {
  Context* context = of(base);
  {
    const std::lock_guard lock(registry_mutex);
    registry.erase(context);
  }
  {
    const std::lock_guard lock(context->mutex);
    context->ends = true;
    wake(*context);
  }
  context->thread.join();
  ::close(context->wake);
  ::close(context->base.async_fd);
  delete context;
  --pretend_counts()->contexts;
  return 0;
}

int ibv_query_device(ibv_context*, ibv_device_attr* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->max_mr_size = UINT64_MAX;
  attributes->max_qp = 1 << 16;
  attributes->max_qp_wr = 1 << 12;
  attributes->max_cqe = 1 << 16;
  attributes->max_qp_rd_atom = 16;
  attributes->phys_port_cnt = 1;
  return 0;
}

int ibv_query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes) {
  if (port != 1) return EINVAL;
  const int device = reinterpret_cast<Device*>(context->device)->number;
  std::memset(attributes, 0, offsetof(ibv_port_attr, flags));
  const bool down = pretend_control()->port_down.load() || (device == 1 && pretend_control()->port_down_1.load());
  attributes->state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  attributes->max_mtu = IBV_MTU_4096;
  attributes->active_mtu = device == 1 && pretend_control()->small_mtu.load() ? IBV_MTU_1024 : IBV_MTU_4096;
  attributes->gid_tbl_len = 8;
  attributes->max_msg_sz = 1 << 20;
  attributes->pkey_tbl_len = 2;
  attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

int ibv_query_gid(ibv_context* context, uint8_t, int index, ibv_gid* gid) {
  uint32_t type;
  if (index < 0 || index >= 8) return -1;
  std::memset(gid, 0, sizeof *gid);
  gid_at(reinterpret_cast<Device*>(context->device)->number, index, *gid, type);
  return 0;
}

int _ibv_query_gid_ex(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry, uint32_t, size_t) {
  std::memset(entry, 0, sizeof *entry);
  if (!gid_at(reinterpret_cast<Device*>(context->device)->number, static_cast<int>(index), entry->gid, entry->gid_type))
    return ENODATA;
  entry->gid_index = index;
  entry->port_num = port;
  return 0;
}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  ++pretend_counts()->domains;
  return reinterpret_cast<ibv_pd*>(new ibv_context*(context));
}

int ibv_dealloc_pd(ibv_pd* domain) {
  --pretend_counts()->domains;
  delete reinterpret_cast<ibv_context**>(domain);
  return 0;
}

ibv_mr* ibv_reg_mr(ibv_pd* domain, void* address, size_t bytes, int access) {
  return add_region(domain, address, reinterpret_cast<uint64_t>(address), bytes, access);
}

// A pretended dma-buf holds the magic number, the address and the bytes of the memory (pretended_memory.cpp).
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, uint64_t offset, size_t bytes, uint64_t address, int fd, int access) {
  uint64_t words[3] = {};
  const bool is_one = ::pread(fd, words, sizeof words, 0) == sizeof words && words[0] == 0x6675'626d'6164;
  if (!is_one || offset + bytes > words[2] || words[1] + offset != address) {
    errno = EINVAL;
    return nullptr;
  }
  if (pretend_control()->refuse_dma_buf.load()) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  ++pretend_counts()->dma_bufs;
  // As rdma-core does, the region names the offset in place of an address.
  return add_region(domain, reinterpret_cast<void*>(offset), address, bytes, access);
}

int ibv_dereg_mr(ibv_mr* base) {
  auto* region = reinterpret_cast<Region*>(base);
  Context* context = of(base->context);
  const std::lock_guard lock(context->mutex);
  context->regions.erase(base->lkey);
  delete region;
  --pretend_counts()->regions;
  return 0;
}

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  auto* channel = new pretended::Channel;
  channel->base.context = context;
  channel->base.fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  ++pretend_counts()->channels;
  return &channel->base;
}

int ibv_destroy_comp_channel(ibv_comp_channel* base) {
  if (base->refcnt > 0) return EBUSY;
  ::close(base->fd);
  delete reinterpret_cast<pretended::Channel*>(base);
  --pretend_counts()->channels;
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* user, ibv_comp_channel* channel, int) {
  auto* queue = new Queue;
  queue->base.context = context;
  queue->base.channel = channel;
  queue->base.cq_context = user;
  queue->base.cqe = entries;
  queue->context = of(context);
  const std::lock_guard lock(queue->context->mutex);
  ++channel->refcnt;
  ++pretend_counts()->queues;
  return &queue->base;
}

int ibv_destroy_cq(ibv_cq* base) {
  auto* queue = reinterpret_cast<Queue*>(base);
  const std::lock_guard lock(queue->context->mutex);
  for (const auto& [number, pair] : queue->context->pairs)
    if (pair->sends_to == queue || pair->receives_to == queue) return EBUSY;
  auto& events = reinterpret_cast<pretended::Channel*>(base->channel)->events;
  std::erase(events, queue);
  --base->channel->refcnt;
  delete queue;
  --pretend_counts()->queues;
  return 0;
}

int ibv_get_cq_event(ibv_comp_channel* base, ibv_cq** queue, void** user) {
  auto* channel = reinterpret_cast<pretended::Channel*>(base);
  uint64_t count;
  if (::read(base->fd, &count, sizeof count) < 0) return -1;
  const std::lock_guard lock(of(base->context)->mutex);
  if (channel->events.empty()) {  // of a destroyed queue
    errno = EAGAIN;
    return -1;
  }
  *queue = &channel->events.front()->base;
  *user = (*queue)->cq_context;
  channel->events.pop_front();
  return 0;
}

void ibv_ack_cq_events(ibv_cq*, unsigned int) {}

ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  if (pretend_control()->refuse_pairs.load()) {
    errno = ENOMEM;
    return nullptr;
  }
  ibv_context* context = *reinterpret_cast<ibv_context**>(domain);
  auto* pair = new Pair;
  pair->context = of(context);
  pair->sends_to = reinterpret_cast<Queue*>(attributes->send_cq);
  pair->receives_to = reinterpret_cast<Queue*>(attributes->recv_cq);
  pair->cap = attributes->cap;
  pair->signal_all = attributes->sq_sig_all;
  pair->base.context = context;
  pair->base.pd = domain;
  pair->base.qp_type = attributes->qp_type;
  pair->base.state = IBV_QPS_RESET;
  if (!open_socket(*pair)) {
    if (pair->socket >= 0) ::close(pair->socket);
    delete pair;
    return nullptr;
  }
  const std::lock_guard lock(pair->context->mutex);
  pair->context->pairs[pair->base.qp_num] = pair;
  wake(*pair->context);
  ++pretend_counts()->pairs;
  return &pair->base;
}

// Checks what each state requires, and from which state it can be entered, as the standard defines.
int ibv_modify_qp(ibv_qp* base, ibv_qp_attr* attributes, int mask) {
  Pair& pair = *of(base);
  const std::lock_guard lock(pair.context->mutex);
  const auto needs = [&](ibv_qp_state from, int bits) {
    return pair.base.state == from && (mask & bits) == bits ? 0 : EINVAL;
  };
  ibv_qp_attr& kept = pair.attributes;
  Given& given = *pretend_given();
  switch (attributes->qp_state) {
    case IBV_QPS_INIT:
      if (const int error = needs(IBV_QPS_RESET, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) return error;
      given.pkey_index = attributes->pkey_index, given.port = attributes->port_num;
      break;
    case IBV_QPS_RTR:
      if (const int error = needs(IBV_QPS_INIT, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        return error;
      if (attributes->path_mtu < IBV_MTU_256 || attributes->path_mtu > IBV_MTU_4096) return EINVAL;
      if (!attributes->ah_attr.is_global) return EINVAL;  // required by every RoCE device
      if (pretend_control()->unreachable.load()) return ETIMEDOUT;
      given.mtu = 128 << attributes->path_mtu, given.service_level = attributes->ah_attr.sl;
      given.gid_index = attributes->ah_attr.grh.sgid_index, given.traffic_class = attributes->ah_attr.grh.traffic_class;
      kept.dest_qp_num = attributes->dest_qp_num;
      pair.expected = attributes->rq_psn;
      break;
    case IBV_QPS_RTS:
      if (const int error = needs(IBV_QPS_RTR, IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                                   IBV_QP_MAX_QP_RD_ATOMIC))
        return error;
      kept.timeout = attributes->timeout;
      kept.retry_cnt = attributes->retry_cnt;
      kept.rnr_retry = attributes->rnr_retry;
      given.timeout = kept.timeout, given.retry_count = kept.retry_cnt, given.rnr_retry = kept.rnr_retry;
      pair.acknowledged = pair.next = pair.end = attributes->sq_psn;
      break;
    case IBV_QPS_ERR: fail_pair(pair, IBV_WC_WR_FLUSH_ERR); return 0;
    default: return EINVAL;
  }
  pair.base.state = attributes->qp_state;
  wake(*pair.context);
  return 0;
}

int ibv_destroy_qp(ibv_qp* base) {
  Pair* pair = of(base);
  {
    const std::lock_guard lock(pair->context->mutex);
    pair->context->pairs.erase(base->qp_num);
    ::close(pair->socket);
  }
  delete pair;
  --pretend_counts()->pairs;
  return 0;
}

int ibv_get_async_event(ibv_context* base, ibv_async_event* event) {
  uint64_t count;
  if (::read(base->async_fd, &count, sizeof count) < 0) return -1;
  Context* context = of(base);
  const std::lock_guard lock(context->mutex);
  if (context->events.empty()) return -1;
  *event = context->events.front();
  context->events.pop_front();
  return 0;
}

void ibv_ack_async_event(ibv_async_event*) {}

}  // extern "C"

// The packets of the pretended NIC: from send queues, over sockets, into memory and completion queues.
#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>

#include "nic.hpp"

namespace pretended {

using namespace ark;

namespace {

constexpr uint32_t kPacketBytes = 32 << 10;
constexpr uint64_t kWindow = 8;  // packets in flight
constexpr auto kNotReadyPause = std::chrono::microseconds(640);
constexpr auto kBusy = std::chrono::milliseconds(1);  // until a full socket is retried

socklen_t address_of(uint32_t number, sockaddr_un& address) {
  std::memset(&address, 0, sizeof address);
  address.sun_family = AF_UNIX;
  const int length = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "pretended-pair-%u-%06x",
                                   static_cast<unsigned>(::getuid()), number);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
}

enum class Sent { yes, busy };

Sent send_packet(Pair& pair, Packet packet, const std::byte* payload) {
  packet.from = pair.base.qp_num;
  Context& context = *pair.context;
  ++pretend_counts()->packets;
  const Control& control = *pretend_control();
  const uint32_t loss = control.loss.load(std::memory_order_relaxed);
  const bool down = control.link_down.load(std::memory_order_relaxed) ||
                    (context.number == 1 && control.link_down_1.load(std::memory_order_relaxed));
  if (down || (loss > 0 && context.random() % 10000 < loss)) {
    ++pretend_counts()->lost;
    return Sent::yes;
  }
  sockaddr_un address;
  iovec parts[2] = {{&packet, sizeof packet}, {const_cast<std::byte*>(payload), packet.bytes}};
  msghdr message{};
  message.msg_name = &address;
  message.msg_namelen = address_of(pair.attributes.dest_qp_num, address);
  message.msg_iov = parts;
  message.msg_iovlen = packet.kind == Packet::data && packet.bytes > 0 ? 2 : 1;
  if (::sendmsg(pair.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return Sent::yes;
  return errno == EAGAIN || errno == ENOBUFS ? Sent::busy : Sent::yes;  // no receiver: lost
}

std::chrono::nanoseconds patience_of(const Pair& pair) {
  if (pair.attributes.timeout == 0) return std::chrono::hours(1000);
  return std::chrono::nanoseconds(4096ll << pair.attributes.timeout);
}

Send* send_of(Pair& pair, uint64_t number) {
  for (Send& send : pair.sends)
    if (number <= send.last) return &send;
  return nullptr;
}

void acknowledged(Pair& pair, uint64_t expected) {
  if (expected <= pair.acknowledged || expected > pair.end) return;
  pair.acknowledged = expected;
  pair.next = std::max(pair.next, expected);
  pair.progress = Clock::now();
  pair.attempts = pair.not_ready = 0;
  while (!pair.sends.empty() && pair.sends.front().last < expected) {
    const Send& send = pair.sends.front();
    if (pair.signal_all || send.request.send_flags & IBV_SEND_SIGNALED) {
      ibv_wc entry{};
      entry.wr_id = send.request.wr_id;
      entry.opcode = IBV_WC_RDMA_WRITE;
      entry.qp_num = pair.base.qp_num;
      const uint32_t lose = pretend_control()->lose_completions.load(std::memory_order_relaxed);
      const bool last = pair.sends.size() == 1;
      if (lose == 0 || last || ++pair.completed % lose != 0) complete(*pair.sends_to, entry);
    }
    pair.sends.pop_front();
  }
}

void take_data(Pair& pair, const Packet& packet, const std::byte* payload) {
  Context& context = *pair.context;
  if (packet.number < pair.expected) {
    pair.acknowledge = true;
    return;
  }
  Packet answer{};
  answer.number = pair.expected;
  if (packet.number > pair.expected) {
    answer.kind = Packet::missing;
    send_packet(pair, answer, nullptr);
    return;
  }
  if (packet.bytes > 0) {
    const auto found = context.regions.find(packet.key);
    const auto* region = found == context.regions.end() ? nullptr : found->second;
    const uint64_t begin = region ? region->begin : 0;
    const bool inside = region && packet.to >= begin && packet.to - begin <= region->base.length &&
                        packet.bytes <= region->base.length - (packet.to - begin);
    if (!inside || !(region->access & IBV_ACCESS_REMOTE_WRITE)) {
      answer.kind = Packet::access_error;
      send_packet(pair, answer, nullptr);
      fail_pair(pair, IBV_WC_WR_FLUSH_ERR);
      return;
    }
  }
  if (packet.last && packet.with_imm) {
    auto& forced = pretend_control()->receiver_not_ready;
    uint32_t left = forced.load();
    while (left > 0 && !forced.compare_exchange_weak(left, left - 1)) {
    }
    if (left > 0 || pair.receives.empty()) {
      ++pretend_counts()->not_ready;
      answer.kind = Packet::not_ready;
      send_packet(pair, answer, nullptr);
      return;
    }
  }
  if (packet.bytes > 0) std::memcpy(reinterpret_cast<void*>(packet.to), payload, packet.bytes);
  if (packet.last && packet.with_imm) {
    ibv_wc entry{};
    entry.wr_id = pair.receives.front();
    entry.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    entry.qp_num = pair.base.qp_num;
    entry.byte_len = packet.total;
    entry.imm_data = packet.imm;
    entry.wc_flags = IBV_WC_WITH_IMM;
    pair.receives.pop_front();
    complete(*pair.receives_to, entry);
  }
  ++pair.expected;
  pair.acknowledge = true;
}

void take_packet(Pair& pair, const Packet& packet, const std::byte* payload) {
  if (pair.base.state != IBV_QPS_RTR && pair.base.state != IBV_QPS_RTS) return;
  if (packet.from != pair.attributes.dest_qp_num) return;
  switch (packet.kind) {
    case Packet::data: return take_data(pair, packet, payload);
    case Packet::acknowledgement: return acknowledged(pair, packet.number);
    case Packet::missing:
      acknowledged(pair, packet.number);
      if (packet.number == pair.acknowledged && pair.next > pair.acknowledged) pair.next = pair.acknowledged;
      return;
    case Packet::not_ready:
      acknowledged(pair, packet.number);
      if (packet.number != pair.acknowledged || pair.sends.empty()) return;
      pair.next = pair.acknowledged;
      pair.hold = pair.progress = Clock::now() + kNotReadyPause;
      if (pair.attributes.rnr_retry < 7 && ++pair.not_ready > pair.attributes.rnr_retry)
        fail_pair(pair, IBV_WC_RNR_RETRY_EXC_ERR);
      return;
    case Packet::access_error:
      acknowledged(pair, packet.number);
      fail_pair(pair, IBV_WC_REM_ACCESS_ERR);
      return;
  }
}

bool receive_all(Pair& pair) {
  static thread_local std::vector<std::byte> buffer(sizeof(Packet) + kPacketBytes);
  bool any = false;
  while (pair.socket >= 0) {
    const ssize_t bytes = ::recv(pair.socket, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (bytes < static_cast<ssize_t>(sizeof(Packet))) return any;
    Packet packet;
    std::memcpy(&packet, buffer.data(), sizeof packet);
    any = true;
    take_packet(pair, packet, buffer.data() + sizeof packet);
  }
  return any;
}

}  // namespace

bool open_socket(Pair& pair) {
  static std::random_device random;
  pair.socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  for (int attempt = 0; attempt < 100 && pair.socket >= 0; ++attempt) {
    pair.base.qp_num = 1 + random() % 0xfffffe;
    sockaddr_un address;
    const socklen_t length = address_of(pair.base.qp_num, address);
    if (::bind(pair.socket, reinterpret_cast<sockaddr*>(&address), length) == 0) return true;
  }
  return false;
}

void transmit(Pair& pair) {
  if (pair.base.state == IBV_QPS_RTR || pair.base.state == IBV_QPS_RTS) {
    if (pair.acknowledge) {
      Packet answer{};
      answer.kind = Packet::acknowledgement;
      answer.number = pair.expected;
      if (send_packet(pair, answer, nullptr) == Sent::yes) pair.acknowledge = false;
    }
  }
  if (pair.base.state != IBV_QPS_RTS || Clock::now() < pair.hold) return;
  while (pair.next < pair.end && pair.next < pair.acknowledged + kWindow) {
    Send* send = send_of(pair, pair.next);
    if (!send) return;
    const uint64_t piece = pair.next - send->first;
    Packet packet{};
    packet.kind = Packet::data;
    packet.bytes = static_cast<uint32_t>(std::min<uint64_t>(kPacketBytes, send->bytes - piece * kPacketBytes));
    packet.total = send->bytes;
    packet.key = send->request.wr.rdma.rkey;
    packet.to = send->request.wr.rdma.remote_addr + piece * kPacketBytes;
    packet.imm = send->request.imm_data;
    packet.with_imm = send->request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    packet.last = pair.next == send->last;
    packet.number = pair.next;
    if (send_packet(pair, packet, send->from + piece * kPacketBytes) == Sent::busy) return;
    if (pair.next == pair.acknowledged) pair.progress = std::max(pair.progress, Clock::now());
    ++pair.next;
  }
}

void run(Context& context) {
  std::vector<pollfd> watched;
  while (true) {
    auto until = Clock::time_point::max();
    {
      const std::lock_guard lock(context.mutex);
      if (context.ends) return;
      watched.assign(1, {context.wake, POLLIN, 0});
      const auto now = Clock::now();
      for (auto& [number, pair] : context.pairs) {
        receive_all(*pair);
        const bool waits = pair->base.state == IBV_QPS_RTS && pair->next > pair->acknowledged;
        if (waits && now >= pair->progress + patience_of(*pair)) {
          ++pretend_counts()->sent_again;
          pair->progress = now;
          pair->next = pair->acknowledged;
          if (++pair->attempts > pair->attributes.retry_cnt) fail_pair(*pair, IBV_WC_RETRY_EXC_ERR);
        }
        transmit(*pair);
        const bool more = pair->base.state == IBV_QPS_RTS && pair->next < pair->end;
        if (pair->acknowledge || (more && pair->next < pair->acknowledged + kWindow))
          until = std::min(until, now + kBusy);
        if (pair->base.state == IBV_QPS_RTS && pair->next > pair->acknowledged && pair->attributes.timeout > 0)
          until = std::min(until, pair->progress + patience_of(*pair));
        watched.push_back({pair->socket, POLLIN, 0});
      }
    }
    timespec pause{};
    if (until != Clock::time_point::max()) {
      const auto left = std::max<std::chrono::nanoseconds>(until - Clock::now(), std::chrono::microseconds(10));
      pause.tv_sec = static_cast<time_t>(left.count() / 1'000'000'000);
      pause.tv_nsec = static_cast<long>(left.count() % 1'000'000'000);
    }
    ::ppoll(watched.data(), watched.size(), until == Clock::time_point::max() ? nullptr : &pause, nullptr);
    uint64_t count;
    if (watched[0].revents) (void)!::read(context.wake, &count, sizeof count);
  }
}

int post_send(ibv_qp* base, ibv_send_wr* requests, ibv_send_wr** bad) {
  Pair& pair = *of(base);
  Context& context = *pair.context;
  const std::lock_guard lock(context.mutex);
  for (ibv_send_wr* one = requests; one; one = one->next) {
    const bool failed = pair.base.state == IBV_QPS_ERR;
    if ((pair.base.state != IBV_QPS_RTS && !failed) || pair.sends.size() >= pair.cap.max_send_wr) {
      *bad = one;
      return pair.sends.size() >= pair.cap.max_send_wr ? ENOMEM : EINVAL;
    }
    Send send;
    send.request = *one;
    if (one->num_sge > 0) {
      send.from = reinterpret_cast<const std::byte*>(one->sg_list[0].addr);
      send.bytes = one->sg_list[0].length;
      send.key = one->sg_list[0].lkey;
    }
    if (one->send_flags & IBV_SEND_INLINE) {
      if (send.bytes > pair.cap.max_inline_data) {
        *bad = one;
        return EINVAL;
      }
      send.held.assign(send.from, send.from + send.bytes);
    }
    uint32_t wrong = pretend_control()->wrong_keys.load();
    if (wrong > 0 && send.bytes > 0 && pretend_control()->wrong_keys.compare_exchange_strong(wrong, wrong - 1))
      send.request.wr.rdma.rkey ^= 0x5a5a00;
    pretend_counts()->bytes_of[context.number] += send.bytes;
    send.first = pair.end;
    send.last = pair.end + (send.bytes == 0 ? 0 : (send.bytes - 1) / kPacketBytes);
    pair.end = send.last + 1;
    pair.sends.push_back(std::move(send));
    Send& kept = pair.sends.back();
    if (kept.request.send_flags & IBV_SEND_INLINE) {
      kept.from = kept.held.data();
    } else if (kept.bytes > 0) {
      const auto region = context.regions.find(kept.key);
      const auto address = reinterpret_cast<uint64_t>(kept.from);
      if (region == context.regions.end() || address < region->second->begin ||
          address + kept.bytes > region->second->begin + region->second->base.length)
        fail_pair(pair, IBV_WC_LOC_PROT_ERR);
    }
    if (failed) fail_pair(pair, IBV_WC_WR_FLUSH_ERR);
  }
  transmit(pair);
  wake(context);
  return 0;
}

}  // namespace pretended

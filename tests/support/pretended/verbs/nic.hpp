// A pretended NIC with reliable connections: the verbs' objects, and a thread that carries packets.
//
// A queue pair is a Unix datagram socket named after its number, so that pairs of any processes of this machine can
// connect. Packets have sequence numbers. The receiver accepts them in order and acknowledges them; the sender goes
// back to the first missing one and counts its attempts, as a NIC does. Only registered memory is read and written.
#pragma once

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "control.hpp"
#include "dma/rdma/verbs_types.hpp"

namespace pretended {

using Clock = std::chrono::steady_clock;
struct Context;

struct Queue {
  ark::ibv_cq base{};
  Context* context = nullptr;
  std::deque<ark::ibv_wc> entries;
  bool armed = false;
};

struct Channel {
  ark::ibv_comp_channel base{};
  std::deque<Queue*> events;
};

struct Send {
  ark::ibv_send_wr request{};
  const std::byte* from = nullptr;
  uint32_t bytes = 0, key = 0;
  std::vector<std::byte> held;   // inline data
  uint64_t first = 0, last = 0;  // sequence numbers of its packets
};

struct Pair {
  ark::ibv_qp base{};
  Context* context = nullptr;
  Queue *sends_to = nullptr, *receives_to = nullptr;
  ark::ibv_qp_cap cap{};
  bool signal_all = false;
  int socket = -1;
  ark::ibv_qp_attr attributes{};
  std::deque<Send> sends;
  std::deque<uint64_t> receives;
  uint64_t end = 0;                     // sequence number after the last requested packet
  uint64_t acknowledged = 0, next = 0;  // packets: received by the peer, and next to send
  uint64_t expected = 0;                // the peer's next packet
  bool acknowledge = false;
  int attempts = 0, not_ready = 0;
  Clock::time_point progress{}, hold{};  // since when the first one waits; when sending may resume
  uint64_t completed = 0;
};

struct Packet {
  enum Kind : uint32_t { data = 1, acknowledgement, not_ready, access_error, missing };
  uint32_t kind, bytes, key, imm;
  uint32_t last, with_imm, total, from;
  uint64_t number, to;
};

struct Region {
  ark::ibv_mr base{};
  uint64_t begin = 0;  // base.addr is an offset for a dma-buf
  int access = 0;
};

struct Context {
  ark::ibv_context base{};
  int number = 0;  // of the device
  std::mutex mutex;
  std::map<uint32_t, Pair*> pairs;
  std::map<uint32_t, Region*> regions;
  std::deque<ark::ibv_async_event> events;
  std::minstd_rand random{1};
  uint32_t next_key = 0x1000;
  int wake = -1;
  bool ends = false;
  std::thread thread;
};

Context* of(ark::ibv_context* context);
Pair* of(ark::ibv_qp* pair);

// Callers hold the context's mutex.
bool open_socket(Pair& pair);
void complete(Queue& queue, const ark::ibv_wc& entry);
void fail_pair(Pair& pair, ark::ibv_wc_status first);
void transmit(Pair& pair);
void run(Context& context);  // locks the mutex itself
void wake(Context& context);

int post_send(ark::ibv_qp* pair, ark::ibv_send_wr* requests, ark::ibv_send_wr** bad);
int post_recv(ark::ibv_qp* pair, ark::ibv_recv_wr* requests, ark::ibv_recv_wr** bad);
int poll_cq(ark::ibv_cq* queue, int count, ark::ibv_wc* entries);
int req_notify_cq(ark::ibv_cq* queue, int solicited_only);

}  // namespace pretended

// The controls and counters of the pretended libibverbs. The block can be in a file that several processes map.
//
// ARK_TEST_VERBS_CONTROL names that file (one page, initially zero). Without it the block is private to the process.
// Python ranks write to the file: the fields are 32-bit words in this order.
#pragma once

#include <atomic>
#include <cstdint>

namespace pretended {

struct Control {
  std::atomic<uint32_t> link_down;           // no packet passes
  std::atomic<uint32_t> loss;                // lost packets per 10,000
  std::atomic<uint32_t> lose_completions;    // every n-th of successful sends, but never a queue's last
  std::atomic<uint32_t> swap_completions;    // swap two successful sends, if two are waiting
  std::atomic<uint32_t> receiver_not_ready;  // this many signals find no receive
  std::atomic<uint32_t> wrong_keys;          // this many writes use a wrong key
  std::atomic<uint32_t> port_down;           // ports report that they are down
  std::atomic<uint32_t> no_devices;
  std::atomic<uint32_t> most_memory;   // KiB that can be registered; 0: no limit
  std::atomic<uint32_t> small_mtu;     // of device 1: 1024 instead of 4096
  std::atomic<uint32_t> only_ipv6;     // ports have no IPv4 address
  std::atomic<uint32_t> refuse_pairs;  // queue pairs cannot be created
  std::atomic<uint32_t> link_down_1;   // as link_down, of device 1 alone
  std::atomic<uint32_t> port_down_1;   // as port_down, of device 1 alone
  std::atomic<uint32_t> refuse_dma_buf;
  std::atomic<uint32_t> unreachable;  // peers' addresses cannot be resolved
};

// Live objects and events of this process.
struct Counts {
  std::atomic<int> contexts, domains, regions, channels, queues, pairs;
  std::atomic<uint64_t> dma_bufs;  // registered, ever
  std::atomic<uint64_t> packets, lost, sent_again, not_ready;
  std::atomic<uint64_t> bytes_of[2];  // that devices were asked to send
};

// What the queue pair that changed its state last was given.
struct Given {
  std::atomic<uint32_t> pkey_index, port, mtu, gid_index, traffic_class, service_level, timeout, retry_count, rnr_retry;
};

}  // namespace pretended

extern "C" {
pretended::Given* pretend_given();
pretended::Control* pretend_control();
pretended::Counts* pretend_counts();
void pretend_break_pairs();   // puts all queue pairs of the process into the error state
void pretend_device_fatal();  // sends a fatal asynchronous event to every open device
}

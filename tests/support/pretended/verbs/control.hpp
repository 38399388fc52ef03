// What tests tell the pretended libibverbs, and ask it. The block may lie in a file that several processes map.
//
// ARK_TEST_VERBS_CONTROL names that file (a page, zeros to begin with); without it the block is the process's own.
// Ranks in Python write to the file: the fields are 32-bit words in this order.
#pragma once

#include <atomic>
#include <cstdint>

namespace pretended {

struct Control {
  std::atomic<uint32_t> link_down;           // no packet passes
  std::atomic<uint32_t> loss;                // of 10,000 packets
  std::atomic<uint32_t> lose_completions;    // every n-th of a send that succeeded; the last of a queue never
  std::atomic<uint32_t> swap_completions;    // two of sends that succeeded are swapped, where two are waiting
  std::atomic<uint32_t> receiver_not_ready;  // so many signals find no receive
  std::atomic<uint32_t> wrong_keys;          // so many writes go out with another key
  std::atomic<uint32_t> port_down;           // ports say so when asked
  std::atomic<uint32_t> no_devices;
  std::atomic<uint32_t> most_memory;   // KiB that may be registered; 0: any
  std::atomic<uint32_t> small_mtu;     // of device 1: 1024 instead of 4096
  std::atomic<uint32_t> only_ipv6;     // ports have no IPv4 address
  std::atomic<uint32_t> refuse_pairs;  // no queue pair is made
  std::atomic<uint32_t> link_down_1;   // as link_down, of device 1 alone
  std::atomic<uint32_t> port_down_1;   // as port_down
  std::atomic<uint32_t> refuse_dma_buf;
};

// What is alive in this process, and what has happened in it.
struct Counts {
  std::atomic<int> contexts, domains, regions, channels, queues, pairs;
  std::atomic<uint64_t> dma_bufs;  // registered, ever
  std::atomic<uint64_t> packets, lost, sent_again, not_ready;
  std::atomic<uint64_t> bytes_of[2];  // that devices were asked to send
};

}  // namespace pretended

extern "C" {
pretended::Control* pretend_control();
pretended::Counts* pretend_counts();
void pretend_break_pairs();   // all queue pairs of the process go into the error state
void pretend_device_fatal();  // an asynchronous event of every open device
}

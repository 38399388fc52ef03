// What a user may say about RDMA; ark_torch/env.py declares and documents every one (ARK_RDMA_...), with its bounds.
#pragma once

#include <string>

namespace ark::rdma {

constexpr int kMostRails = 8;  // NICs of a rank

struct Options {
  std::string library;    // libibverbs; empty: the system's
  std::string device;     // its name; empty: the first with an active port. A rail each: names with commas, or "all"
  int port = 0;           // 0: the first that is active
  int gid_index = -1;     // -1: RoCE v2 with an IPv4 address, else what comes nearest
  int mtu = 0;            // bytes; 0: the least that any rank's port has
  int traffic_class = 0;  // of RoCE's IP header: DSCP, two bits up
  int service_level = 0;  // of InfiniBand, or RoCE's priority
  int pkey_index = 0;     // in the port's table
  int timeout = 18;       // a packet is sent again after 4.096 us * 2^timeout, or up to four times that
  int retry_count = 6;    // how often; soft-RoCE takes 7 for ever
  int rnr_retry = 7;      // where a receiver is not ready; 7: for ever. Credits leave no need for it
  int cache_mb = 0;       // memory of users that stays registered although no message uses it

  bool operator==(const Options&) const = default;
};

}  // namespace ark::rdma

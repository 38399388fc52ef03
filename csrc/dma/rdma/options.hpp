// The user's RDMA settings (ARK_RDMA_...). ark_torch/env.py declares and documents each with its bounds.
#pragma once

#include <string>

namespace ark::rdma {

constexpr int kMostRails = 8;  // NICs of a rank

struct Options {
  std::string library;    // path of libibverbs; empty: the system's
  std::string device;     // device name; empty: the first with an active port; "a,b" or "all": several, one rail each
  int port = 0;           // 0: the first active port
  int gid_index = -1;     // -1: RoCE v2 with an IPv4 address, else the nearest match
  int mtu = 0;            // in bytes; 0: the smallest of all ranks' ports
  int traffic_class = 0;  // in RoCE's IP header: DSCP << 2
  int service_level = 0;  // of InfiniBand, or the priority of RoCE
  int pkey_index = 0;     // index in the port's table
  int timeout = 18;       // a packet is resent after 4.096 us * 2^timeout, or up to four times that
  int retry_count = 6;    // resends before failure; soft-RoCE treats 7 as unlimited
  int rnr_retry = 7;      // when a receiver is not ready; 7: unlimited. Credits should prevent this case
  int cache_mb = 0;       // most user memory that stays registered while unused

  bool operator==(const Options&) const = default;
};

}  // namespace ark::rdma

// What a rank publishes about itself through the store: where its socket listens and how large its segment is.
//
// A fixed 256 bytes, each field at a fixed place in little-endian order, never a memory image of a struct. The store
// is shared with other programs and may hold leavings of an earlier start, so decode() trusts nothing: every byte is
// either checked or must be zero. The nonce ties a record to one incarnation of one group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "util/identity.hpp"

namespace ark {

constexpr uint32_t kMaxRanks = 65536;                     // of one group; a sanity bound for untrusted numbers
constexpr uint64_t kMaxSegmentBytes = uint64_t{1} << 46;  // what x86-64 can map, halved

enum class Sharing : uint32_t {
  willing = 1,   // listens at socket_name and hands out its segment
  declined = 2,  // was told not to share memory
  unable = 3,    // the system gives it no local socket; its outcome message says why
};

struct HandleRecord {
  static constexpr size_t kEncodedBytes = 256;
  static constexpr size_t kMaxNameBytes = 107;  // sockaddr_un::sun_path less the leading NUL of an abstract name

  uint32_t rank = 0;
  uint32_t size = 0;
  Sharing sharing = Sharing::declined;
  Bytes16 nonce{};             // of the job: this start of this group
  Bytes16 host_id{};           // boot id of the kernel: one per machine and boot
  uint64_t network_space = 0;  // inode of the network namespace, in which socket names live; 0: unknown
  uint32_t uid = 0;            // effective user
  uint32_t pid = 0;            // as the rank sees itself; other pid namespaces see another number
  uint64_t segment_bytes = 0;
  std::string socket_name;  // abstract Unix socket, without the leading NUL; empty unless willing

  std::vector<uint8_t> encode() const;

  // Error(invalid_argument) that names the field and its value.
  static HandleRecord decode(std::span<const uint8_t> bytes);

  bool operator==(const HandleRecord&) const = default;
};

// Compares secrets in a time that does not depend on where they differ.
bool equal_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b);

}  // namespace ark

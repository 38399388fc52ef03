// The record that a rank publishes through the store: where its socket listens and how large its segment is.
//
// The record is a fixed 256 bytes with little-endian fields at fixed offsets, not a memory image of a struct. Other
// programs share the store, and it may hold leftovers of an earlier start. So decode() trusts nothing: every byte is
// checked or must be zero. The nonce ties a record to one start of one group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "util/identity.hpp"

namespace ark {

constexpr uint32_t kMaxRanks = 65536;                     // per group; a sanity bound for untrusted numbers
constexpr uint64_t kMaxSegmentBytes = uint64_t{1} << 46;  // half of what x86-64 can map

enum class Sharing : uint32_t {
  willing = 1,   // listens at socket_name and hands out its segment
  declined = 2,  // was told not to share memory
  unable = 3,    // the system gives it no local socket; its outcome says why
};

struct HandleRecord {
  static constexpr size_t kEncodedBytes = 256;
  static constexpr size_t kMaxNameBytes = 107;  // sockaddr_un::sun_path without the leading NUL of an abstract name

  uint32_t rank = 0;
  uint32_t size = 0;
  Sharing sharing = Sharing::declined;
  Bytes16 nonce{};             // of this start of this group
  Bytes16 host_id{};           // boot id of the kernel: unique per machine and boot
  uint64_t network_space = 0;  // inode of the network namespace that socket names belong to; 0: unknown
  uint32_t uid = 0;            // effective user
  uint32_t pid = 0;            // as the rank sees it; other pid namespaces see another number
  uint32_t release = 0;        // of ark_torch: this_release()
  uint64_t segment_bytes = 0;
  std::string socket_name;  // abstract Unix socket, without the leading NUL; empty unless willing

  std::vector<uint8_t> encode() const;

  // Throws Error(invalid_argument) that names the field and its value.
  static HandleRecord decode(std::span<const uint8_t> bytes);

  bool operator==(const HandleRecord&) const = default;
};

// The version of ark_torch: "1.2.3" is 0x010203. CMakeLists.txt makes the source that defines it.
uint32_t this_release();
std::string text_of_release(uint32_t release);

// Compares secrets in constant time, wherever they differ.
bool equal_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b);

}  // namespace ark

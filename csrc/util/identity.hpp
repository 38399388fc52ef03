// The machine and user of this process: what two processes must have in common to share memory.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace ark {

using Bytes16 = std::array<uint8_t, 16>;

struct Identity {
  Bytes16 host_id{};           // boot id of the kernel
  uint64_t network_space = 0;  // inode of the network namespace; 0: unknown
  uint32_t uid = 0;            // effective user
  uint32_t pid = 0;
  std::string unknown;  // why the host id could not be read; such a process shares no memory

  static Identity of_this_process();
};

// 16 bytes from the kernel's random source.
Bytes16 random_bytes16();

std::string to_hex(const Bytes16& bytes);

}  // namespace ark

// Reads the boot id, the network namespace and the user; makes nonces.
#include "util/identity.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "util/error.hpp"
#include "util/unique_fd.hpp"

namespace ark {

namespace {

constexpr char kBootId[] = "/proc/sys/kernel/random/boot_id";

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// Reads "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx\n". Returns why it failed, or an empty string.
std::string read_boot_id(Bytes16& out) {
  UniqueFd fd(::open(kBootId, O_RDONLY | O_CLOEXEC));
  if (!fd) return std::string(kBootId) + ": " + std::strerror(errno);
  char text[64];
  const ssize_t length = ::read(fd.get(), text, sizeof text);
  size_t digits = 0;
  for (ssize_t i = 0; i < length; ++i) {
    const int value = hex_digit(text[i]);
    if (value < 0) continue;
    if (digits < 32) out[digits / 2] = static_cast<uint8_t>(out[digits / 2] << 4 | value);
    ++digits;
  }
  return digits == 32 ? std::string() : std::string(kBootId) + " holds no id";
}

}  // namespace

Identity Identity::of_this_process() {
  Identity identity;
  identity.unknown = read_boot_id(identity.host_id);
  struct stat status {};
  if (::stat("/proc/self/ns/net", &status) == 0) identity.network_space = status.st_ino;
  identity.uid = ::geteuid();
  identity.pid = static_cast<uint32_t>(::getpid());
  return identity;
}

Bytes16 random_bytes16() {
  Bytes16 bytes;
  ssize_t got;
  do {
    got = ::getrandom(bytes.data(), bytes.size(), 0);
  } while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(bytes.size())) throw system_error("cannot read random bytes", errno);
  return bytes;
}

std::string to_hex(const Bytes16& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace ark

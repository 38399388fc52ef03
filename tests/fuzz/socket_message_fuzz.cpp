// Fuzzes the bootstrap's socket as a stranger could: bytes in arbitrary pieces, with any number of descriptors at any
// of them. The receiver must accept at most one message, keep at most one descriptor, and leak none.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "driver.hpp"
#include "shm/hello_message.hpp"
#include "util/error.hpp"
#include "util/local_socket.hpp"

namespace {

constexpr int kMaxFds = 4;

// Every piece starts with a byte of the input: the low 7 bits are its length. If the top bit is set, the next byte
// gives the number of descriptor copies that go with it.
void send_piece(int socket, const uint8_t* data, size_t size, int fds) {
  iovec vector{const_cast<uint8_t*>(data), size};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  if (fds > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(static_cast<size_t>(fds) * sizeof(int));
    cmsghdr* item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(static_cast<size_t>(fds) * sizeof(int));
    for (int i = 0; i < fds; ++i)
      std::memcpy(CMSG_DATA(item) + static_cast<size_t>(i) * sizeof(int), &socket, sizeof(int));
  }
  ::sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Returns the number of the next new descriptor, which grows with every leak.
int lowest_free_descriptor() {
  const int fd = ::fcntl(0, F_DUPFD_CLOEXEC, 3);
  if (fd < 0) std::abort();
  ::close(fd);
  return fd;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int before = lowest_free_descriptor();
  {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) std::abort();
    ark::UniqueFd sender(ends[0]), receiver(ends[1]);
    ark::MessageReceiver message(ark::HelloMessage::kEncodedBytes);
    auto status = ark::MessageReceiver::Status::incomplete;
    for (size_t at = 0; at < size && status == ark::MessageReceiver::Status::incomplete;) {
      const size_t length = std::min<size_t>(data[at] & 0x7f, size - at - 1);
      const int fds = (data[at] & 0x80) != 0 && at + 1 < size ? data[at + 1] % (kMaxFds + 1) : 0;
      send_piece(sender.get(), data + at + 1, length, fds);
      at += 1 + length;
      status = message.receive(receiver.get());
    }
    if (message.message().size() > ark::HelloMessage::kEncodedBytes + 1) std::abort();
    if (status == ark::MessageReceiver::Status::complete) {
      if (message.message().size() != ark::HelloMessage::kEncodedBytes) std::abort();
      try {
        ark::HelloMessage::decode(message.message());
      } catch (const ark::Error& error) {
        if (error.kind() != ark::ErrorKind::invalid_argument) std::abort();
      }
    }
  }
  if (lowest_free_descriptor() != before) std::abort();
  return 0;
}

std::vector<std::vector<uint8_t>> fuzz_seeds() {
  ark::HelloMessage hello;
  hello.from = 1;
  hello.size = 2;
  hello.segment_bytes = 4096;
  const std::vector<uint8_t> bytes = hello.encode();
  std::vector<std::vector<uint8_t>> seeds;
  for (uint8_t flag : {0x00, 0x80}) {
    std::vector<uint8_t> whole{static_cast<uint8_t>(bytes.size() | flag)};
    whole.insert(whole.end(), bytes.begin(), bytes.end());
    seeds.push_back(whole);
    std::vector<uint8_t> halves;
    for (size_t at = 0; at < bytes.size(); at += 32) {
      halves.push_back(static_cast<uint8_t>(32 | flag));
      halves.insert(halves.end(), bytes.begin() + static_cast<std::ptrdiff_t>(at),
                    bytes.begin() + static_cast<std::ptrdiff_t>(at + 32));
    }
    seeds.push_back(halves);
  }
  return seeds;
}

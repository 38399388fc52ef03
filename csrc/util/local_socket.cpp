// The system calls of local_socket.hpp.
#include "util/local_socket.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "util/error.hpp"
#include "util/identity.hpp"

namespace ark {

namespace {

// An abstract name is a NUL and the name, without a terminator; its length counts.
socklen_t fill_address(sockaddr_un& address, const std::string& name) {
  std::memset(&address, 0, sizeof address);
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

UniqueFd open_socket() {
  return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

Listener Listener::open() {
  Listener listener;
  listener.fd = open_socket();
  listener.name = "ark-" + to_hex(random_bytes16());
  sockaddr_un address;
  const socklen_t length = fill_address(address, listener.name);
  if (!listener.fd || ::bind(listener.fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(listener.fd.get(), SOMAXCONN) != 0)
    throw system_error("cannot open a local socket", errno);
  return listener;
}

ConnectAttempt connect_to(const std::string& name) {
  ConnectAttempt attempt;
  attempt.fd = open_socket();
  sockaddr_un address;
  if (name.size() + 1 > sizeof address.sun_path) {
    attempt.error = ENAMETOOLONG;
    return attempt;
  }
  const socklen_t length = fill_address(address, name);
  int result = -1;
  if (attempt.fd) do {
      result = ::connect(attempt.fd.get(), reinterpret_cast<sockaddr*>(&address), length);
    } while (result != 0 && errno == EINTR);
  if (result == 0) {
    attempt.status = ConnectAttempt::Status::connected;
    return attempt;
  }
  attempt.error = errno;
  if (attempt.fd && attempt.error == EAGAIN) attempt.status = ConnectAttempt::Status::busy;
  if (attempt.fd && attempt.error == ECONNREFUSED) attempt.status = ConnectAttempt::Status::refused;
  attempt.fd.reset();
  return attempt;
}

PeerCredentials credentials_of(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw system_error("cannot tell who is at the other end of a local socket", errno);
  return {credentials.pid, credentials.uid};
}

int send_message(int socket, std::span<const uint8_t> message, int fd) {
  iovec data{const_cast<uint8_t*>(message.data()), message.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (fd >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(item), &fd, sizeof fd);
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return errno;
  return static_cast<size_t>(sent) == message.size() ? 0 : EMSGSIZE;  // an empty socket buffer takes 64 bytes at once
}

bool has_ended(int socket) {
  char byte;
  const ssize_t got = ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

MessageReceiver::Status MessageReceiver::receive(int socket) {
  for (;;) {
    std::array<uint8_t, 512> buffer;
    // Reading one byte more than expected reveals an oversized message. (A read stops at a message with a descriptor.)
    const size_t want = std::min(buffer.size(), expected_ + (followed_ ? 0 : 1) - bytes_.size());
    iovec data{buffer.data(), want};
    // Room for a second descriptor reveals a surplus; the kernel discards the rest and reports it.
    alignas(cmsghdr) std::array<char, CMSG_SPACE(2 * sizeof(int))> control;
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t got = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return bytes_.size() == expected_ ? Status::complete : Status::incomplete;
    if (got < 0) return Status::ended;

    cut_ = cut_ || (header.msg_flags & MSG_CTRUNC) != 0;
    for (cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
      if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(item) + i * sizeof fd, sizeof fd);
        UniqueFd owned(fd);
        if (fd_)
          surplus_ = true;
        else
          fd_ = std::move(owned);
      }
    }
    if (got == 0) return bytes_.size() == expected_ ? Status::complete : Status::ended;
    bytes_.insert(bytes_.end(), buffer.begin(), buffer.begin() + got);
    if (bytes_.size() > expected_) return Status::oversized;
    if (followed_ && bytes_.size() == expected_) return Status::complete;
  }
}

}  // namespace ark

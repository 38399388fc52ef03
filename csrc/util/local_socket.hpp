// Abstract Unix stream sockets, and passing one descriptor with a message over them.
//
// Everything is non-blocking: the caller polls and keeps the deadlines. Input is untrusted: messages are read up to a
// fixed size, surplus descriptors are closed and truncated control data is reported.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "util/unique_fd.hpp"

namespace ark {

struct Listener {
  UniqueFd fd;
  std::string name;  // random and secret until its owner publishes it

  // Throws Error(system) if the system gives no socket.
  static Listener open();
};

struct ConnectAttempt {
  enum class Status {
    connected,
    busy,     // the listener's queue is full: try again
    refused,  // no process listens at that name in this network namespace
    failed,   // the system forbids it; `error` is its errno
  };
  Status status = Status::failed;
  UniqueFd fd;
  int error = 0;
};

ConnectAttempt connect_to(const std::string& name);

struct PeerCredentials {
  pid_t pid = 0;  // as seen from here; 0: in a pid namespace that is not visible
  uid_t uid = static_cast<uid_t>(-1);
};

// Credentials of the process that connected or called listen. Throws Error(system) if the kernel gives none.
PeerCredentials credentials_of(int socket);

// Sends a short message with a descriptor (fd < 0: none). Returns 0 or errno; never raises SIGPIPE.
int send_message(int socket, std::span<const uint8_t> message, int fd);

// Returns true if the other end is gone (end of file or reset). Consumes nothing.
bool has_ended(int socket);

class MessageReceiver {
 public:
  // With `followed`, another message may follow; it stays in the socket.
  explicit MessageReceiver(size_t bytes, bool followed = false) : expected_(bytes), followed_(followed) {}

  enum class Status {
    incomplete,
    complete,
    ended,      // before the message was complete
    oversized,  // more bytes than the message has
  };
  Status receive(int socket);

  std::span<const uint8_t> message() const { return bytes_; }
  UniqueFd take_fd() { return std::move(fd_); }
  bool has_surplus_fds() const { return surplus_; }
  bool has_cut_control_data() const { return cut_; }  // also set if this process has no descriptor left to receive into

 private:
  size_t expected_;
  bool followed_;
  std::vector<uint8_t> bytes_;
  UniqueFd fd_;
  bool surplus_ = false;
  bool cut_ = false;
};

}  // namespace ark

// Notices the death of a peer: watches the sockets that the bootstrap left open between the processes of a group.
//
// The kernel closes a dead process's sockets whatever killed it, so end-of-file without a goodbye is a loss, and after
// a goodbye a departure. One thread serves all groups of the process; it sleeps in poll without timeout and costs
// nothing until something happens. Where the kernel has pidfds they are watched too, for a peer that died while a
// child of its still holds a copy of its sockets.
// lost() is written once by that thread (release) and read by waiters (relaxed): it orders nothing but itself.
// fork: the child's copies are closed at once (else peers would wait for the child to die) and the monitor does
// nothing there; groups that the child creates itself get a thread of their own.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "util/unique_fd.hpp"

namespace ark {

namespace detail {
struct PeerGroup;
}

class PeerMonitor {
 public:
  // connections[peer] is a stream socket to that peer, empty for `rank` itself. on_lost runs on the monitor's thread,
  // once per lost peer, and must neither block nor destroy this object; it never runs after the destructor returned.
  PeerMonitor(int rank, std::vector<UniqueFd> connections, std::function<void(int peer)> on_lost = {});
  ~PeerMonitor();
  PeerMonitor(const PeerMonitor&) = delete;
  PeerMonitor& operator=(const PeerMonitor&) = delete;

  bool lost(int peer) const noexcept;      // ended without a goodbye
  bool departed(int peer) const noexcept;  // said goodbye; may have ended since

  // Tells every peer that this rank leaves on purpose. Call before a clean shutdown; repeating it is harmless.
  void say_goodbye() noexcept;

 private:
  std::shared_ptr<detail::PeerGroup> group_;
};

}  // namespace ark

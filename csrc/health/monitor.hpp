// Detects the death of a peer by watching the sockets that the bootstrap left open between a group's processes.
//
// The kernel closes a dead process's sockets, so end-of-file without a goodbye is a loss, and after a goodbye a
// departure. One thread sleeps in poll for all groups. pidfds, if available, detect a dead peer whose child still holds
// its sockets. Only that thread writes lost() (release); relaxed reads suffice, because it orders nothing else. After
// fork the child closes its copies at once and does not monitor; its own groups get a new thread.
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
  // connections[peer] is a stream socket to that peer, empty for `rank`. on_lost runs on the monitor's thread once per
  // lost peer. It must not block or destroy this object, and never runs after the destructor has returned.
  PeerMonitor(int rank, std::vector<UniqueFd> connections, std::function<void(int peer)> on_lost = {});
  ~PeerMonitor();
  PeerMonitor(const PeerMonitor&) = delete;
  PeerMonitor& operator=(const PeerMonitor&) = delete;

  bool lost(int peer) const noexcept;      // ended without a goodbye
  bool departed(int peer) const noexcept;  // said goodbye; may have ended since

  // Tells every peer that this rank leaves on purpose. Call it before a clean shutdown; repeating it is harmless.
  void say_goodbye() noexcept;

 private:
  std::shared_ptr<detail::PeerGroup> group_;
};

}  // namespace ark

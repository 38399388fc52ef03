// The life of a window for kernels, and its thread's work: a request becomes a write and a signal.
#include "dma/rdma/gpu_window.hpp"

#include <algorithm>

#include "protocol/atomics.hpp"

namespace ark::rdma {

namespace {

constexpr uint64_t kMostMemory = 128 << 20, kLeastChunk = 16 << 10;
constexpr auto kForWhatWasPosted = std::chrono::seconds(2);
constexpr size_t kReap = 64;  // posted requests to a node, from which on those that are done are let go

}  // namespace

GpuWindow::Shape GpuWindow::Shape::of(int nodes) {
  Shape shape;
  const auto bytes = [&] { return 2 * shape.lanes * shape.slots * shape.chunk_bytes * nodes; };
  while (bytes() > kMostMemory && shape.chunk_bytes > kLeastChunk) shape.chunk_bytes /= 2;
  return shape;
}

GpuWindow::GpuWindow(std::shared_ptr<Messages> messages, Setup setup)
    : messages_(std::move(messages)), setup_(std::move(setup)), posted_(setup_.ranks.size()) {
  const size_t lanes = setup_.shape.lanes, nodes = setup_.ranks.size();
  if (setup_.path.direct) {
    on_gpu_ = DeviceMemory::allocate(setup_.gpu, bytes());
    memory_ = on_gpu_.data();
  } else {
    pinned_ = std::make_unique<PinnedMemory>(setup_.gpu, bytes());
    memory_ = static_cast<char*>(pinned_->host());
  }
  held_ = messages_->hold(memory_, bytes(), true, setup_.path.direct ? Where::gpu : Where::host);
  state_ = DeviceMemory::allocate(setup_.gpu, lanes * sizeof(device::BetweenLane));
  control_ = std::make_unique<PinnedMemory>(
      setup_.gpu, lanes * (sizeof(protocol::RequestRing) + nodes * sizeof(device::BetweenHeard)));
  for (size_t node = 0; node < nodes; ++node)
    if (static_cast<int>(node) != setup_.node) others_.push_back(setup_.ranks[node]);
  auto* const heard =
      reinterpret_cast<device::BetweenHeard*>(static_cast<protocol::RequestRing*>(control_->host()) + lanes);
  for (size_t lane = 0; lane < lanes; ++lane) {
    for (const bool credits : {false, true}) {
      messages_->open_window(window(lane, credits), others_,
                             [ranks = setup_.ranks, own = heard + lane * nodes, credits](int peer, uint64_t count) {
                               const auto node = std::find(ranks.begin(), ranks.end(), peer) - ranks.begin();
                               if (node == static_cast<long>(ranks.size())) return;
                               protocol::store_release(credits ? own[node].credits : own[node].chunks,
                                                       protocol::uint64{count});
                             });
    }
  }
}

GpuWindow::~GpuWindow() {
  if (server_) server_->finish();  // a peer may wait for what a kernel has just asked for
  const auto deadline = Messages::Clock::now() + kForWhatWasPosted;
  for (auto& node : posted_) {
    for (Posted& one : node) {
      try {
        one.message->wait_a_while(deadline);
      } catch (const Error&) {  // the peer has gone
      }
    }
    node.clear();
  }
  for (size_t lane = 0; lane < setup_.shape.lanes; ++lane)
    for (const bool credits : {false, true}) messages_->close_window(window(lane, credits));
}

uint64_t GpuWindow::bytes() const {
  const Shape& shape = setup_.shape;
  return 2 * shape.lanes * setup_.ranks.size() * shape.slots * shape.chunk_bytes;
}

device::BetweenWindow GpuWindow::kernels_view() const {
  auto* const rings = static_cast<protocol::RequestRing*>(control_->device());
  return {.memory = pinned_ ? static_cast<char*>(pinned_->device()) : memory_,
          .state = reinterpret_cast<device::BetweenLane*>(state_.data()),
          .rings = rings,
          .heard = reinterpret_cast<const device::BetweenHeard*>(rings + setup_.shape.lanes),
          .chunk_bytes = setup_.shape.chunk_bytes,
          .lanes = setup_.shape.lanes,
          .slots = setup_.shape.slots,
          .nodes = static_cast<int>(setup_.ranks.size()),
          .node = setup_.node};
}

void GpuWindow::connect(std::vector<Remote> remotes) {
  remotes_ = std::move(remotes);
  auto* const rings = static_cast<protocol::RequestRing*>(control_->host());
  server_ = std::make_unique<RequestServer>(
      std::span(rings, setup_.shape.lanes),
      [this](size_t lane, const protocol::Request& request) { told([&] { serve(lane, request); }); },
      RequestServer::Pace{}, [this] { told([&] { reap_all(); }); });
}

void GpuWindow::told(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    if (setup_.fail) setup_.fail(error);
    throw;
  }
}

void GpuWindow::serve(size_t lane, const protocol::Request& request) {
  using protocol::Request;
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorKind::system, "a kernel asked the NIC for " + what,
                ErrorContext{-1, -1, "request ring", 0, "This is a bug of ark_torch: please report it."});
  };
  const auto node = static_cast<size_t>(request.channel);
  if (node >= setup_.ranks.size() || static_cast<int>(node) == setup_.node)
    refuse("a write to node " + std::to_string(node));
  const int peer = setup_.ranks[node];
  auto& posted = posted_[node];
  if (posted.size() >= kReap) reap(posted);
  if (request.kind == Request::put_with_signal) {
    const uint64_t half = bytes() / 2;
    if (request.bytes == 0 || request.bytes > setup_.shape.chunk_bytes || request.to > half - request.bytes ||
        request.from < half || request.from > bytes() - request.bytes)
      refuse(std::to_string(request.bytes) + " bytes from " + std::to_string(request.from) + " to " +
             std::to_string(request.to));
    const Remote& remote = remotes_[node];
    // With the registration that the window has: a call of the driver's here could wait for a kernel that waits for
    // this write.
    posted.push_back({messages_->put(peer, memory_ + request.from, request.bytes, remote.address + request.to,
                                     remote.keys, held_.again()),
                      true});
    posted.push_back({messages_->signal(peer, window(lane, false)), true});
  } else if (request.kind == Request::signal) {
    // A peer that has all it wants may have left without its last credits.
    posted.push_back({messages_->signal(peer, window(lane, true)), false});
  } else if (request.kind == Request::probe) {
    messages_->probe(peer);
  } else {
    refuse("a request of kind " + std::to_string(request.kind));
  }
}

// Lets go what is done, and throws what failed.
void GpuWindow::reap(std::deque<Posted>& posted) {
  while (!posted.empty() && posted.front().message->done()) {
    const Posted one = std::move(posted.front());
    posted.pop_front();
    try {
      one.message->wait_a_while(Messages::Clock::now());
    } catch (const Error&) {
      if (one.awaited) throw;
    }
  }
}

void GpuWindow::reap_all() {
  for (auto& one : posted_) reap(one);
}

}  // namespace ark::rdma

// Puts, signals and waits of a window (rma_window.hpp).
#include <algorithm>
#include <cstring>

#include "collectives/cpu/wait.hpp"
#include "collectives/rma/rma_window.hpp"

namespace ark {

namespace {

constexpr auto kSlice = std::chrono::milliseconds(20);          // of a sleep in the node, between looks at its health
constexpr auto kSliceOutside = std::chrono::milliseconds(250);  // the same for what other nodes send
constexpr int kYields = 8;
constexpr size_t kReap = 32;  // pending transfers, from which on those that are done are let go

}  // namespace

// What fails between nodes ends the group; in a node GroupHealth sees to it, and other nodes are told here.
template <class Body>
auto RmaWindow::guarded(const OperationContext& context, Body&& body) const {
  try {
    return body();
  } catch (const Error& error) {
    const Error told = error.at(setup_.rank, context.name, context.sequence);
    const bool of_the_call = error.kind() == ErrorKind::invalid_argument || error.kind() == ErrorKind::type_error ||
                             error.kind() == ErrorKind::closed;
    if (!of_the_call && setup_.fail) setup_.fail(told);
    throw told;
  }
}

void RmaWindow::check(const OperationContext& context, int peer) const {
  if (peer < 0 || peer >= setup_.size)
    throw Error(ErrorKind::invalid_argument,
                "rank is " + std::to_string(peer) + ", and the group has " + std::to_string(setup_.size) + " ranks",
                ErrorContext{setup_.rank, -1, context.name, context.sequence, "Name a rank of the window's group."});
  if (closed_)
    throw Error(ErrorKind::closed, "the window's tensor was deregistered",
                ErrorContext{setup_.rank, -1, context.name, context.sequence,
                             "Register one with tensor_register, on all ranks together."});
  setup_.health->check_alive(context);
}

// Of a node's rank, at its place: how many signals `from` (a rank's place) has sent to it.
protocol::Counter& RmaWindow::counter(int local, int from) const {
  return reinterpret_cast<protocol::Counter*>(neighbours_[local].signals->data())[from];
}

RmaWindow::Transfer RmaWindow::put(const OperationContext& context, int peer, uint32_t type, const void* from,
                                   uint64_t elements, int64_t offset, std::shared_ptr<void> keep, rdma::Where where) {
  return guarded(context, [&]() -> Transfer {
    check(context, peer);
    const RmaRecord& there = records_[peer];
    const auto refuse = [&](ErrorKind kind, const std::string& what, const std::string& remedy) {
      throw Error(kind, what, ErrorContext{setup_.rank, peer, context.name, context.sequence, remedy});
    };
    if (type != there.type)
      refuse(ErrorKind::type_error, "the tensor has another dtype than the window of rank " + std::to_string(peer),
             "Put a tensor of the window's dtype.");
    if (offset < 0 || static_cast<uint64_t>(offset) > there.elements ||
        elements > there.elements - static_cast<uint64_t>(offset))
      refuse(ErrorKind::invalid_argument,
             std::to_string(elements) + " elements from target_offset_nelems " + std::to_string(offset) +
                 " on are beyond the window of rank " + std::to_string(peer) + ", which has " +
                 std::to_string(there.elements),
             "Put what fits into that rank's window.");
    const size_t bytes = elements * there.item;
    if (bytes == 0) return nullptr;
    const int local = local_of(peer);
    if (local >= 0 && where == rdma::Where::gpu && !copies_)
      refuse(ErrorKind::invalid_argument,
             "the tensor is on a GPU, and the window of rank " + std::to_string(peer) + ", of this node, on the CPU",
             "Put a CPU tensor, or register CUDA tensors.");
    if (local >= 0 && copies_) {
      if (!copies_->copy(neighbours_[local].data + offset * there.item, from, bytes, context.deadline))
        late(context, peer, "was not written to by copy engines");
      return nullptr;
    }
    if (local >= 0) {
      std::memmove(neighbours_[local].data + offset * there.item, from, bytes);
      return nullptr;
    }
    Transfer transfer = setup_.messages->put(peer, from, bytes, there.address + offset * there.item, there.keys, where);
    // Kept here, too: a transfer that goes before its end would take the connection with it.
    const std::lock_guard lock(mutex_);
    if (pending_.size() >= kReap) std::erase_if(pending_, [](const Pending& one) { return one.transfer->done(); });
    pending_.push_back({peer, transfer, std::move(keep)});
    return transfer;
  });
}

RmaWindow::Transfer RmaWindow::signal(const OperationContext& context, int peer) {
  return guarded(context, [&]() -> Transfer {
    check(context, peer);
    if (const int local = local_of(peer); local >= 0) {
      const std::lock_guard lock(mutex_);
      advance_and_wake(counter(local, local_of(setup_.rank)), ++sent_[peer]);
      return nullptr;
    }
    Transfer transfer = setup_.messages->signal(peer, static_cast<int32_t>(setup_.number));
    const std::lock_guard lock(mutex_);
    pending_.push_back({peer, transfer, nullptr});
    return transfer;
  });
}

uint64_t RmaWindow::expect(const OperationContext& context, int peer) {
  return guarded(context, [&] {
    check(context, peer);
    return expected_[peer].fetch_add(1) + 1;
  });
}

bool RmaWindow::arrived(int peer, uint64_t signal) const {
  if (const int local = local_of(peer); local >= 0)
    return protocol::reached(counter(local_of(setup_.rank), local), signal);
  return setup_.messages->signals(peer, static_cast<int32_t>(setup_.number)) >= signal;
}

void RmaWindow::late(const OperationContext& context, int peer, const std::string& what) const {
  throw Error(
      ErrorKind::timeout,
      "rank " + std::to_string(peer) + " " + what + " within " + std::to_string(context.timeout.count()) + " ms",
      ErrorContext{setup_.rank, peer, context.name, context.sequence,
                   "See whether that rank is stopped, slow, or called something else; destroy the process "
                   "group on every rank (or restart the job) before going on."});
}

bool RmaWindow::wait(const OperationContext& context, int peer, uint64_t signal, Clock::time_point until) {
  return guarded(context, [&] {
    GroupHealth& health = *setup_.health;
    const int local = local_of(peer);
    if (local < 0) {
      while (true) {
        health.check_alive(context);
        const auto now = Clock::now();
        if (setup_.messages->wait_signals(peer, static_cast<int32_t>(setup_.number), signal,
                                          std::min({until, context.deadline, now + kSliceOutside})))
          return true;
        if (Clock::now() >= context.deadline) late(context, peer, "sent no signal");
        if (Clock::now() >= until) return false;
      }
    }
    protocol::Counter& signals = counter(local_of(setup_.rank), local);
    const int blamed = peer == setup_.rank ? -1 : local;  // of oneself another thread signals
    for (int turn = 0;; ++turn) {
      const uint64_t seen = protocol::current(signals);
      if (seen >= signal) return true;
      if (turn < kYields) {
        std::this_thread::yield();
        continue;
      }
      if (const auto alarm = health.alarm(context, blamed)) {
        if (protocol::reached(signals, signal)) return true;
        if (alarm->kind == GroupHealth::Alarm::late) late(context, peer, "sent no signal");
        health.raise(*alarm, context, blamed);
      }
      const auto left = until - Clock::now();
      if (left <= left.zero()) return false;
      sleep_on(signals, seen, std::min<std::chrono::nanoseconds>(left, kSlice));
    }
  });
}

bool RmaWindow::wait(const OperationContext& context, int peer, rdma::Message& transfer, Clock::time_point until) {
  return guarded(context, [&] {
    while (!transfer.wait_a_while(std::min({until, context.deadline, Clock::now() + kSliceOutside}))) {
      if (Clock::now() >= context.deadline) late(context, peer, "has not taken what was put");
      setup_.health->check_alive(context);
      if (Clock::now() >= until) return false;
    }
    return true;
  });
}

std::pair<std::byte*, std::shared_ptr<void>> RmaWindow::mapped(int peer) const {
  const int local = local_of(peer);
  if (local < 0) return {};
  const Neighbour& there = neighbours_[local];
  if (there.on_gpu) return {there.data, there.on_gpu};
  return {there.data, there.memory};
}

}  // namespace ark

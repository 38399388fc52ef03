// How a window is opened and closed. Puts, signals and waits: rma_operations.cpp.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "collectives/rma/rma_window.hpp"
#include "shm/rendezvous.hpp"
#include "shm/store_gather.hpp"

namespace ark {

namespace {

struct Card {
  uint64_t segment, offset, elements;
  uint32_t item, type, on_gpu;
};

constexpr const char* kOperation = "new_window";
constexpr const char* kTogether = "Let all ranks call new_window and tensor_register in the same order.";

std::vector<int> places_of(int size, const std::vector<int>& own) {
  std::vector<int> places(size, -1);
  for (size_t i = 0; i < own.size(); ++i) places[own[i]] = static_cast<int>(i);
  return places;
}

}  // namespace

RmaWindow::RmaWindow(Setup setup)
    : setup_(std::move(setup)),
      local_(places_of(setup_.size, setup_.own)),
      records_(setup_.size),
      expected_(setup_.size),
      sent_(setup_.size) {}

std::shared_ptr<RmaWindow> RmaWindow::open(Setup setup, const std::function<Memory()>& offer) {
  std::shared_ptr<RmaWindow> window(new RmaWindow(std::move(setup)));
  const Setup& is = window->setup_;
  RmaRecord& own = window->records_[is.rank];
  own.rank = static_cast<uint32_t>(is.rank);
  own.size = static_cast<uint32_t>(is.size);
  own.window = is.number;
  const bool nodes = static_cast<int>(is.own.size()) < is.size;
  try {
    window->share(offer);
  } catch (const Error& error) {
    // The meeting counts the ranks of a node from 0.
    const int peer = error.context().peer;
    const bool among = nodes && is.own.size() > 1;
    const Error told(
        error.kind(),
        (among ? "among " + name_ranks(is.own) + ", which are a node and count from 0 there: " : "") + error.message(),
        ErrorContext{is.rank, among && peer >= 0 ? is.own[peer] : peer, kOperation, 0, error.context().remedy});
    // A step that failed did so on all ranks of the node; those of other nodes are told in the record.
    const bool alone = error.kind() == ErrorKind::peer_lost || error.kind() == ErrorKind::timeout ||
                       error.kind() == ErrorKind::mismatch || error.kind() == ErrorKind::aborted;
    if (alone && is.fail) is.fail(told);
    if (!nodes || alone) throw told;
    own.reason = told.message() + (told.context().remedy.empty() ? "" : ". " + told.context().remedy);
  }
  if (nodes) window->meet_nodes();
  return window;
}

RmaWindow::~RmaWindow() {
  if (opened_) setup_.messages->close_window(static_cast<int32_t>(setup_.number));
}

// Within the node: each rank's memory and page of counters is mapped by all.
void RmaWindow::share(const std::function<Memory()>& offer) {
  const int ranks = static_cast<int>(setup_.own.size());
  const int local = local_of(setup_.rank);
  neighbours_.resize(ranks);
  const auto prepare = [&] {
    own_ = offer();
    Neighbour& mine = neighbours_[local];
    mine.memory = own_.segment;
    mine.data = own_.data;
    mine.signals = std::make_shared<SharedMemory>(
        SharedMemory::create("ark-window-signals", static_cast<size_t>(ranks) * sizeof(protocol::Counter)));
    if (own_.where == rdma::Where::gpu) copies_ = std::make_unique<GpuCopies>(own_.device);
    if (setup_.messages && own_.elements > 0)
      registered_ = setup_.messages->hold(own_.data, own_.elements * own_.item, true, own_.where);
    RmaRecord& record = records_[setup_.rank];
    record.elements = own_.elements;
    record.item = own_.item;
    record.type = own_.type;
    record.address = registered_ ? reinterpret_cast<uint64_t>(own_.data) : 0;
    record.keys = registered_.remote_keys();
  };
  if (ranks == 1) return prepare();
  MemoryMeeting& meeting = *setup_.meeting;
  meeting.step([&] {
    prepare();
    const bool on_gpu = own_.where == rdma::Where::gpu;
    const auto* const start = on_gpu ? reinterpret_cast<std::byte*>(own_.gpu->memory.data()) : own_.segment->data();
    meeting.own_card<Card>() = {on_gpu ? own_.gpu->memory.size() : own_.segment->size(),
                                static_cast<uint64_t>(own_.data - start),
                                own_.elements,
                                own_.item,
                                own_.type,
                                on_gpu};
  });
  std::vector<Card> cards;
  for (int peer = 0; peer < ranks; ++peer) cards.push_back(meeting.card_of<Card>(peer));
  for (int peer = 0; peer < ranks; ++peer) {
    if (cards[peer].on_gpu == cards[0].on_gpu) continue;
    const auto whose = [&](int place) {
      return "that of rank " + std::to_string(setup_.own[place]) + (cards[place].on_gpu ? " on a GPU" : " on the CPU");
    };
    throw Error(ErrorKind::invalid_argument,
                "a window's tensors are on different devices: " + whose(0) + ", " + whose(peer),
                ErrorContext{setup_.rank, setup_.own[peer], kOperation, 0,
                             "Register CPU tensors on all ranks of a machine, or CUDA tensors on all."});
  }
  const auto copy_of = [](const std::shared_ptr<SharedMemory>& memory) {
    UniqueFd copy(::fcntl(memory->fd(), F_DUPFD_CLOEXEC, 0));
    if (!copy) throw system_error("no descriptor to share a window's memory", errno, "Raise `ulimit -n`.");
    return copy;
  };
  const auto hand_round = [&](auto&& offered, auto&& take) {
    meeting.step([&] {
      const UniqueFd copy = offered();
      for (int peer = 0; peer < ranks; ++peer)
        if (peer != local) meeting.give(peer, copy);
      for (int peer = 0; peer < ranks; ++peer)
        if (peer != local) take(peer, meeting.take(peer));
    });
  };
  const auto offered = [&] { return own_.gpu ? own_.gpu->memory.export_fd() : copy_of(own_.segment); };
  hand_round(offered, [&](int peer, UniqueFd fd) {
    const Card& card = cards[peer];
    const bool inside =
        card.item > 0 && card.offset <= card.segment && card.elements <= (card.segment - card.offset) / card.item;
    if (!inside) throw Error(ErrorKind::mismatch, "rank " + std::to_string(setup_.own[peer]) + " shares no window");
    if (card.on_gpu != 0) {
      auto memory = std::make_shared<DeviceMemory>(DeviceMemory::import(own_.device, fd, card.segment));
      neighbours_[peer].data = reinterpret_cast<std::byte*>(memory->data()) + card.offset;
      neighbours_[peer].on_gpu = std::move(memory);
    } else {
      auto memory = std::make_shared<SharedMemory>(SharedMemory::attach(std::move(fd), card.segment));
      memory->close_fd();
      neighbours_[peer].data = memory->data() + card.offset;
      neighbours_[peer].memory = std::move(memory);
    }
    RmaRecord& record = records_[setup_.own[peer]];
    record.rank = static_cast<uint32_t>(setup_.own[peer]);
    record.size = static_cast<uint32_t>(setup_.size);
    record.window = setup_.number;
    record.elements = card.elements;
    record.item = card.item;
    record.type = card.type;
  });
  hand_round([&] { return copy_of(neighbours_[local].signals); },
             [&](int peer, UniqueFd fd) {
               neighbours_[peer].signals = std::make_shared<SharedMemory>(
                   SharedMemory::attach(std::move(fd), static_cast<size_t>(ranks) * sizeof(protocol::Counter)));
               neighbours_[peer].signals->close_fd();
             });
  neighbours_[local].signals->close_fd();
}

// Between nodes: everyone's record, and RDMA's connections. Signals count from before this rank's record is there.
void RmaWindow::meet_nodes() {
  setup_.messages->open_window(static_cast<int32_t>(setup_.number), others());
  opened_ = true;
  const auto all = store_all_gather(*setup_.store, setup_.prefix, setup_.rank, setup_.size,
                                    records_[setup_.rank].encode(), setup_.timeout);
  std::optional<Error> refused;
  for (int rank = 0; rank < setup_.size; ++rank) {
    try {
      RmaRecord record = RmaRecord::decode(all[rank]);
      if (static_cast<int>(record.rank) != rank || static_cast<int>(record.size) != setup_.size ||
          record.window != setup_.number)
        throw Error(ErrorKind::mismatch, "it is window " + std::to_string(record.window) + " of rank " +
                                             std::to_string(record.rank) + " of " + std::to_string(record.size));
      if (!record.reason.empty() && !refused)
        refused = Error(ErrorKind::invalid_argument, "rank " + std::to_string(rank) + ": " + record.reason,
                        ErrorContext{setup_.rank, rank, kOperation, 0, ""});
      if (local_of(rank) < 0) records_[rank] = std::move(record);
    } catch (const Error& error) {
      throw Error(ErrorKind::mismatch, "of rank " + std::to_string(rank) + ": " + error.message(),
                  ErrorContext{setup_.rank, rank, kOperation, 0,
                               std::string("Run the same ark_torch on all ranks. ") + kTogether});
    }
  }
  if (refused) throw *refused;
}

void RmaWindow::close() {
  if (closed_.exchange(true)) return;
  OperationContext context{"tensor_deregister", 0, Clock::now() + setup_.timeout, setup_.timeout};
  std::vector<Pending> pending;
  {
    const std::lock_guard lock(mutex_);
    pending.swap(pending_);
  }
  for (const Pending& one : pending) wait(context, one.peer, *one.transfer, context.deadline);
  try {
    if (setup_.meeting) setup_.meeting->step([] {});
    if (opened_)
      store_all_gather(*setup_.store, setup_.prefix + "/closed", setup_.rank, setup_.size, {1}, setup_.timeout);
  } catch (const Error& error) {
    if (setup_.fail) setup_.fail(error.at(setup_.rank, context.name));
    throw;
  }
  registered_.reset();
}

int RmaWindow::local_of(int peer) const {
  return local_[peer];
}

std::vector<int> RmaWindow::others() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < setup_.size; ++rank)
    if (local_of(rank) < 0) ranks.push_back(rank);
  return ranks;
}

}  // namespace ark

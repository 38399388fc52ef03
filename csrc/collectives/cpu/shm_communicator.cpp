// The layout of the segments, the start-up handshake, and the entry point of each collective.
#include "collectives/cpu/shm_communicator.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <thread>

#include "collectives/cpu/algorithms.hpp"
#include "util/error.hpp"

namespace ark {

namespace {

constexpr size_t kPage = 4096;
constexpr uint64_t kOutboxSlots = 4;
constexpr size_t kOutboxSlotBytes = kMaxChunkBytes + 64 * 1024;  // room for headers, size rows and alignment
constexpr uint64_t kPairSlots = 4;
constexpr size_t kPairSlotBytes = 128 * 1024;
constexpr uint64_t kLayoutVersion = 1;

struct Table {
  uint64_t count;
  Rule rules[kMaxRules];
};

struct PairCounters {
  protocol::Counter published;  // messages from the segment's owner to the peer
  protocol::Counter released;   // messages from the peer that the owner has taken
};

// The head of a segment, at fixed offsets.
struct Head {
  ControlBlock control;
  alignas(kPage) protocol::Counter outbox_published;
  protocol::Counter released;
  Table table;
};

struct Layout {
  size_t pairs, outbox, pair_slots, total;
  explicit Layout(int size) {
    auto pages = [](size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; };
    pairs = pages(sizeof(Head));
    outbox = pages(pairs + size * sizeof(PairCounters));
    pair_slots = pages(outbox + kOutboxSlots * kOutboxSlotBytes);
    total = pages(pair_slots + size * kPairSlots * kPairSlotBytes);
  }
  uint64_t fingerprint(int size) const {
    return (kLayoutVersion << 48) ^ (total * 0x9e3779b97f4a7c15ull) ^ static_cast<uint64_t>(size) ^ sizeof(Head) << 20;
  }
};

Head& head_of(const SharedMemory& segment) {
  return *reinterpret_cast<Head*>(segment.data());
}

PairCounters& pair_of(const SharedMemory& segment, const Layout& layout, int peer) {
  return reinterpret_cast<PairCounters*>(segment.data() + layout.pairs)[peer];
}

}  // namespace

size_t ShmCommunicator::segment_bytes(int size) {
  return Layout(size).total;
}

ShmCommunicator::ShmCommunicator(int rank, int size, Neighbourhood neighbourhood, const ShmOptions& options)
    : Communicator(rank, size), segments_(std::move(neighbourhood.segments)) {
  const Layout layout(size);
  for (int peer = 0; peer < size; ++peer) {
    if (segments_[peer].size() != layout.total) {
      throw Error(ErrorKind::mismatch,
                  "rank " + std::to_string(peer) + " shares " + std::to_string(segments_[peer].size()) +
                      " bytes, this rank " + std::to_string(layout.total),
                  ErrorContext{rank, peer, "init", 0, "Install the same version of ark_torch for every rank."});
    }
  }
  segments_[rank].commit(0, layout.outbox);
  std::vector<ControlBlock*> control;
  for (auto& segment : segments_) control.push_back(&head_of(segment).control);
  health_ = std::make_unique<GroupHealth>(
      rank, control,
      size > 1 ? std::make_unique<PeerMonitor>(rank, std::move(neighbourhood.connections), options.on_lost) : nullptr,
      options.names);
  hand_shake(options);

  const SpinPolicy policy = SpinPolicy::choose(size, cores_, options.spin);
  std::vector<Channel> outboxes, to, from;
  std::vector<protocol::Counter*> doorbells;
  for (int writer = 0; writer < size; ++writer) {
    ChannelLayout outbox{&head_of(segments_[writer]).outbox_published,
                         {},
                         segments_[writer].data() + layout.outbox,
                         kOutboxSlotBytes,
                         kOutboxSlots,
                         writer};
    for (int reader = 0; reader < size; ++reader) {
      if (reader != writer) outbox.readers.push_back({&head_of(segments_[reader]).released, reader});
    }
    outboxes.emplace_back(std::move(outbox));
    auto pair = [&](int source, int target) {
      return Channel(ChannelLayout{&pair_of(segments_[source], layout, target).published,
                                   {{&pair_of(segments_[target], layout, source).released, target}},
                                   segments_[source].data() + layout.pair_slots + target * kPairSlots * kPairSlotBytes,
                                   kPairSlotBytes,
                                   kPairSlots,
                                   source});
    };
    to.push_back(pair(rank, writer));
    from.push_back(pair(writer, rank));
    doorbells.push_back(&head_of(segments_[writer]).control.doorbell);
  }
  auto commit_outbox = [this, layout](size_t bytes) {
    for (uint64_t slot = 0; slot < kOutboxSlots; ++slot) {
      segments_[rank_].commit(layout.outbox + slot * kOutboxSlotBytes, bytes);
    }
  };
  auto commit_pair = [this, layout](int peer) {
    segments_[rank_].commit(layout.pair_slots + peer * kPairSlots * kPairSlotBytes, kPairSlots * kPairSlotBytes);
  };
  rounds_ = std::make_unique<Rounds>(rank, std::move(outboxes), &head_of(segments_[rank]).released,
                                     Waiter(*health_, policy), options.debug, commit_outbox);
  point_to_point_ = std::make_unique<PointToPoint>(*health_, std::move(to), std::move(from), std::move(doorbells),
                                                   policy, commit_pair);
}

ShmCommunicator::~ShmCommunicator() = default;

// Each rank writes its processors (rank 0 also the table), then its layout word with a release. A rank that has seen
// all layout words may read the rest.
void ShmCommunicator::hand_shake(const ShmOptions& options) {
  const uint64_t fingerprint = Layout(size_).fingerprint(size_);
  Head& own = head_of(segments_[rank_]);
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) {
    static_assert(sizeof mask == kCpuMaskWords * sizeof(uint64_t));
    std::memcpy(own.control.cpu_mask, &mask, sizeof mask);
  }
  const DispatchTable mine(options.rules.empty() ? DispatchTable::defaults() : options.rules);
  own.table.count = mine.rules().size();
  std::copy(mine.rules().begin(), mine.rules().end(), own.table.rules);
  protocol::store_release(own.control.layout, fingerprint);

  OperationContext context{"init", 0, Clock::now() + options.timeout, options.timeout};
  uint64_t cpus[kCpuMaskWords] = {};
  for (int peer = 0; peer < size_; ++peer) {
    Head& head = head_of(segments_[peer]);
    uint64_t theirs;
    for (auto pause = std::chrono::microseconds(20); (theirs = protocol::load_acquire(head.control.layout)) == 0;
         pause = std::min(pause * 2, std::chrono::microseconds(5000))) {
      if (const auto alarm = health_->alarm(context, peer)) {
        if (protocol::load_acquire(head.control.layout) == 0) health_->raise(*alarm, context, peer);
      }
      std::this_thread::sleep_for(pause);
    }
    if (theirs != fingerprint) {
      Error error(ErrorKind::mismatch, "rank " + std::to_string(peer) + " runs another version of ark_torch",
                  ErrorContext{rank_, peer, "init", 0, "Install the same version of ark_torch for every rank."});
      health_->fail(error);
      throw error;
    }
    for (int word = 0; word < kCpuMaskWords; ++word) cpus[word] |= head.control.cpu_mask[word];
  }
  cores_ = 0;
  for (uint64_t word : cpus) cores_ += std::popcount(word);
  cores_ = std::max(cores_, 1);
  const Table& agreed = head_of(segments_[0]).table;
  const size_t count = std::min<size_t>(agreed.count, kMaxRules);
  table_ = DispatchTable(std::vector<Rule>(agreed.rules, agreed.rules + count));
}

Operation ShmCommunicator::with_algorithm(const Operation& operation, Choice choice) const {
  Operation chosen = operation;
  chosen.descriptor.algorithm = static_cast<uint8_t>(choice.algorithm);
  return chosen;
}

void ShmCommunicator::all_reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const size_t bytes = count * size_of(operation.descriptor.dtype);
  const Choice choice = table_.choose(Kind::all_reduce, bytes, size_, cores_);
  const Operation chosen = with_algorithm(operation, choice);
  if (choice.algorithm == Algorithm::one_shot) {
    one_shot_reduce(*rounds_, chosen, in, out, count, -1, choice.chunk_bytes);
  } else {
    two_shot_reduce(*rounds_, chosen, in, out, count, -1, choice.chunk_bytes);
  }
}

void ShmCommunicator::reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const size_t bytes = count * size_of(operation.descriptor.dtype);
  const Choice choice = table_.choose(Kind::reduce, bytes, size_, cores_);
  const Operation chosen = with_algorithm(operation, choice);
  const int root = operation.descriptor.root;
  if (choice.algorithm == Algorithm::one_shot) {
    one_shot_reduce(*rounds_, chosen, in, out, count, root, choice.chunk_bytes);
  } else {
    two_shot_reduce(*rounds_, chosen, in, out, count, root, choice.chunk_bytes);
  }
}

void ShmCommunicator::reduce_scatter(const Operation& operation, const void* const* ins, void* out, size_t count) {
  const size_t bytes = count * size_of(operation.descriptor.dtype);
  const Choice choice = table_.choose(Kind::reduce_scatter, bytes, size_, cores_);
  ark::reduce_scatter(*rounds_, with_algorithm(operation, choice), ins, out, count, choice.chunk_bytes);
}

void ShmCommunicator::all_gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  const Choice choice = table_.choose(Kind::all_gather, bytes, size_, cores_);
  ark::all_gather(*rounds_, with_algorithm(operation, choice), in, outs, bytes, choice.chunk_bytes);
}

void ShmCommunicator::broadcast(const Operation& operation, void* data, size_t bytes) {
  const Choice choice = table_.choose(Kind::broadcast, bytes, size_, cores_);
  ark::broadcast(*rounds_, with_algorithm(operation, choice), data, bytes, operation.descriptor.root,
                 choice.chunk_bytes);
}

void ShmCommunicator::gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  const Choice choice = table_.choose(Kind::gather, bytes, size_, cores_);
  ark::gather(*rounds_, with_algorithm(operation, choice), in, outs, bytes, operation.descriptor.root,
              choice.chunk_bytes);
}

void ShmCommunicator::scatter(const Operation& operation, const void* const* ins, void* out, size_t bytes) {
  const Choice choice = table_.choose(Kind::scatter, bytes, size_, cores_);
  ark::scatter(*rounds_, with_algorithm(operation, choice), ins, out, bytes, operation.descriptor.root,
               choice.chunk_bytes);
}

void ShmCommunicator::all_to_all(const Operation& operation, const Bytes* ins, const MutableBytes* outs) {
  // Split sizes differ between ranks, so the choice must not depend on them.
  const Choice choice = table_.choose(Kind::all_to_all, 0, size_, cores_);
  ark::all_to_all(*rounds_, with_algorithm(operation, choice), ins, outs, choice.chunk_bytes);
}

bool ShmCommunicator::exchange(const Operation& operation, const uint64_t* sent, const uint64_t* received,
                               uint64_t unit, const Produce& produce, const Consume& consume) {
  const Choice choice = table_.choose(Kind::all_to_all, 0, size_, cores_);
  if (unit > unit_limit(size_, choice.chunk_bytes)) return false;
  ark::exchange(*rounds_, with_algorithm(operation, choice), sent, received, unit, produce, consume,
                choice.chunk_bytes);
  return true;
}

void ShmCommunicator::barrier(const Operation& operation) {
  ark::barrier(*rounds_, operation);
}

void ShmCommunicator::monitored_barrier(const OperationContext& context, bool wait_all) {
  ark::monitored_barrier(*health_, ++monitored_barriers_, context, wait_all);
}

}  // namespace ark

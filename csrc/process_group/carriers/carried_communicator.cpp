// The parts that all collectives over several nodes share, and the collectives of small tensors.
#include "process_group/carriers/carried_communicator.hpp"

#include <algorithm>
#include <cstring>

#include "collectives/agreement.hpp"
#include "collectives/cpu/algorithms.hpp"
#include "util/error.hpp"

namespace ark {

CarriedCommunicator::CarriedCommunicator(int rank, int size, std::shared_ptr<Carrier> carrier,
                                         std::shared_ptr<Carrier> notes_by, std::unique_ptr<NodeBeats> beats,
                                         NodePlan plan, Neighbourhood node, ShmOptions options, SumOrder sums)
    : Communicator(rank, size),
      carrier_(std::move(carrier)),
      beats_(std::move(beats)),
      plan_(std::move(plan)),
      sums_(plan_.flat() ? SumOrder{} : sums),
      heard_(size),
      told_(size),
      awaited_(size) {
  options.names = plan_.own();
  options.on_lost = [this](int local) { lost(local); };
  node_ =
      std::make_unique<ShmCommunicator>(plan_.local(), static_cast<int>(plan_.own().size()), std::move(node), options);
  node_->health().set_patience_outside(CarriedMessages::kForALateStory + beats_->patience());
  auto notes = std::make_unique<FailureNotes>(std::move(notes_by), rank, size, plan_,
                                              [this](const Error& error) { fail(error); });
  std::unique_lock lock(mutex_);
  notes_ = std::move(notes);
  const std::optional<int> early = lost_early_;
  lock.unlock();
  if (early) lost(*early);
  expect(plan_.peers());
}

// Ends the threads that may call fail() before it destroys what fail() uses.
CarriedCommunicator::~CarriedCommunicator() {
  close();
  node_.reset();
}

void CarriedCommunicator::close() {
  beats_->close();
  notes_->close();
  carrier_->close([this] {
    const std::lock_guard lock(mutex_);
    return failed_;
  }());
  node_->point_to_point().stop();
  node_->health().say_goodbye();
}

void CarriedCommunicator::abort(const Error& error) {
  fail(error);
}

// Called by this rank's operations, by a note or by the node's shared memory. The first failure counts.
void CarriedCommunicator::fail(const Error& error) {
  std::unique_lock lock(mutex_);
  if (!notes_) return;  // still starting: the constructor's caller raises
  lock.unlock();
  node_->health().fail(error);
  lock.lock();
  failed_ = true;
  if (now_) now_->abort();
  for (const auto& work : awaited_)
    if (work) work->abort();
  lock.unlock();
  notes_->tell(error);
}

// A rank of this node has ended. A rank that waits for another node's message would not notice.
void CarriedCommunicator::lost(int local) {
  OperationContext context{"idle", 0};
  {
    const std::lock_guard lock(mutex_);
    if (!notes_) {
      lost_early_ = local;
      return;
    }
    if (now_) context = now_->operation().context;
  }
  try {
    node_->health().raise({GroupHealth::Alarm::lost, local}, context, local);
  } catch (const Error& error) {
    fail(error);
  }
}

// Lets fail() abort the messages of the running operation, including those that it begins later.
struct CarriedCommunicator::Current {
  Current(CarriedCommunicator& communicator, CarriedMessages& messages) : of(communicator) {
    const std::lock_guard lock(of.mutex_);
    of.now_ = &messages;
    if (of.failed_) messages.abort();
  }
  ~Current() {
    const std::lock_guard lock(of.mutex_);
    of.now_ = nullptr;
  }
  CarriedCommunicator& of;
};

// A connection ends because its rank has left a failed group. The reason may have reached another rank of this node and
// not yet this one. If that rank has lost a connection, too, this one's own words say more.
void CarriedCommunicator::raise_what_the_node_knows(const OperationContext& context) {
  try {
    node_->health().check_alive(context);
  } catch (const Error& cause) {
    if (cause.kind() == ErrorKind::peer_lost) return;
    fail(cause);
    throw;
  }
}

template <class Body>
void CarriedCommunicator::guarded(const Operation& given, Body&& body) {
  Operation operation = given;
  if (in_flat_order(given.descriptor)) operation.descriptor.algorithm = kFlatOrder;
  if (rounds_partials(given.descriptor)) operation.descriptor.algorithm = kInputPartials;
  ControlBlock& progress = node_->health().own();
  try {
    protocol::store_relaxed(progress.enqueued, operation.descriptor.sequence);
    node_->health().check_alive(operation.context);
    CarriedMessages messages(*carrier_, operation, rank_, left_, *beats_, progress);
    const Current current(*this, messages);
    const Descriptor& what = operation.descriptor;
    const bool wide = !rounds_partials(what);
    Exchange exchange{messages, operation, StagedReduce(what.dtype, what.op, size_, plan_.flat(), wide)};
    body(exchange);
    messages.wait_for_all();
    sent_.fetch_add(messages.sent(), std::memory_order_relaxed);
    expect_next(exchange.heard);
    protocol::store_relaxed(progress.completed, operation.descriptor.sequence);
  } catch (const CarriedMessages::Aborted&) {
    node_->health().raise(operation.context);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::peer_lost) raise_what_the_node_knows(operation.context);
    fail(error);
    throw;
  } catch (const std::exception& error) {  // the carrier could not even begin
    raise_what_the_node_knows(operation.context);
    const Error own(ErrorKind::peer_lost,
                    carrier_->name() + ", which carries this group between nodes, failed: " + error.what(),
                    ErrorContext{rank_, -1, operation.context.name, operation.context.sequence,
                                 "Look at the other ranks' output; destroy the process group (or restart the job) "
                                 "before going on."});
    fail(own);
    throw own;
  }
}

void CarriedCommunicator::expect(const std::vector<int>& peers, bool needed) {
  for (const int peer : peers) {
    if (awaited_[peer]) continue;
    const auto receive = [&] {
      return carrier_->receive(peer, tag_of(MessageChannel::agreement), &heard_[peer], sizeof(First));
    };
    auto work = needed && now_ != nullptr ? now_->started(peer, receive) : receive();
    const std::lock_guard lock(mutex_);
    if (failed_) work->abort();
    awaited_[peer] = std::move(work);
  }
}

// A rank may leave the group once it has its result. That is no failure of this collective; the next one finds that the
// rank is gone.
void CarriedCommunicator::expect_next(const std::vector<int>& peers) {
  for (const int peer : peers) {
    try {
      expect({peer}, false);
    } catch (const std::exception&) {
    }
  }
}

void CarriedCommunicator::tell(Exchange& exchange, int peer, const void* data, size_t bytes, uint64_t promised,
                               uint64_t expected) {
  First& first = told_[peer];
  first.descriptor = exchange.operation.descriptor;
  first.factor = exchange.operation.factor;
  first.bytes = promised;
  first.expected = expected;
  copy_bytes(first.data, data, bytes);
  exchange.messages.send(peer, MessageChannel::agreement, &first, sizeof(First));
}

const CarriedCommunicator::First& CarriedCommunicator::hear(Exchange& exchange, int peer) {
  expect({peer});
  exchange.messages.wait_for(awaited_[peer], peer);
  exchange.heard.push_back(peer);
  if (const auto error = disagreement(exchange.operation, heard_[peer].descriptor, rank_, peer)) throw *error;
  return heard_[peer];
}

void CarriedCommunicator::meet(Exchange& exchange, const std::vector<int>& peers) {
  expect(peers);
  for (const int peer : peers) tell(exchange, peer);
}

void CarriedCommunicator::hear_all(Exchange& exchange, const std::vector<int>& peers) {
  for (const int peer : peers) hear(exchange, peer);
}

// For PREMUL_SUM when every rank is its own node: the factors arrived with the first messages.
const double* CarriedCommunicator::factors_of_nodes(const Exchange& exchange) {
  if (!plan_.flat() || exchange.operation.descriptor.op != ReduceOp::premul_sum) return nullptr;
  factors_.resize(size_);
  for (int rank = 0; rank < size_; ++rank)
    factors_[rank] = rank == rank_ ? exchange.operation.factor : heard_[rank].factor;
  return factors_.data();
}

// Returns the other nodes' representatives if this rank is root, or root if this rank represents it.
std::vector<int> CarriedCommunicator::partners_of(int root) const {
  if (rank_ != root) {
    const bool represents = plan_.node_of(root) != plan_.node() && plan_.stands_for(root, plan_.node()) == rank_;
    return represents ? std::vector<int>{root} : std::vector<int>{};
  }
  std::vector<int> partners;
  for (const int node : plan_.others()) partners.push_back(plan_.stands_for(root, node));
  return partners;
}

CarriedPath CarriedCommunicator::path_of(const Exchange& exchange, size_t bytes) const {
  const Descriptor& what = exchange.operation.descriptor;
  return carried_path(what.kind, bytes, size_of(what.dtype), exchange.reduction.partial_size(), plan_);
}

bool CarriedCommunicator::rounds_partials(const Descriptor& descriptor) const {
  return sums_.input_partials && !sums_.flat && has_wide_partials(descriptor);
}

std::byte* CarriedCommunicator::scratch(size_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

// Adds up what the ranks of the node published in one round. Only ranks that want the sum compute it.
void CarriedCommunicator::sum_in_node(const Operation& operation, const StagedReduce& reduction, const void* in,
                                      size_t count, std::byte* partial, bool wanted) {
  const size_t bytes = count * size_of(operation.descriptor.dtype);
  if (plan_.flat()) return copy_bytes(partial, in, bytes);
  Rounds& rounds = node_->rounds();
  rounds.begin(operation, bytes);
  const uint64_t round = rounds.next();
  copy_bytes(rounds.open(round), in, bytes);
  rounds.publish(round);
  if (wanted) {
    std::vector<const void*> sources(rounds.size());
    for (int i = 0; i < rounds.size(); ++i) sources[i] = i == rounds.rank() ? in : rounds.read(round, i);
    std::vector<double> storage;
    const double* factors = gather_factors(rounds, operation, round, storage);
    if (count > 0) reduction.partial(partial, sources.data(), rounds.size(), count, factors);
  } else {
    rounds.check_all(round);
  }
  rounds.release(round);
}

// One hop: sends the node's partial to every rank that this rank represents, or to root.
void CarriedCommunicator::reduce_whole(Exchange& exchange, const void* in, void* out, size_t count, int root) {
  const size_t bytes = count * exchange.reduction.partial_size();
  const bool in_first = bytes <= First::kRoom, everybody = root < 0;
  const int nodes = plan_.nodes(), node = plan_.node();
  const std::vector<int> partners = everybody ? plan_.peers() : partners_of(root);
  const bool wanted = everybody || rank_ == plan_.stands_for(root, node);
  std::byte* partials = scratch(nodes * bytes);
  std::byte* own = partials + node * bytes;
  expect(partners);
  if (!in_first) {
    for (const int peer : partners) tell(exchange, peer);
  }
  sum_in_node(exchange.operation, exchange.reduction, in, count, own, wanted);
  if (in_first && (everybody || rank_ != root)) {
    for (const int peer : partners) tell(exchange, peer, own, bytes);
  }
  const bool receives = everybody || rank_ == root;
  const auto takes = [&](int peer) { return everybody ? plan_.stands_for(peer, node) == rank_ : peer == root; };
  std::vector<const void*> sources(nodes, own);
  for (const int other : plan_.others()) {
    if (!receives) break;
    const int from = plan_.stands_for(everybody ? rank_ : root, other);
    sources[other] = in_first ? heard_[from].data : partials + other * bytes;
    if (!in_first) exchange.messages.receive(from, MessageChannel::data, partials + other * bytes, bytes, true);
  }
  if (!in_first || receives) hear_all(exchange, partners);  // a rank that has sent everything need not wait for root
  if (!in_first) {
    for (const int peer : partners)
      if (takes(peer)) exchange.messages.send(peer, MessageChannel::data, own, bytes);
    exchange.messages.wait_for_all();
  }
  if (receives && count > 0) exchange.reduction.combine(out, sources.data(), nodes, count, factors_of_nodes(exchange));
}

void CarriedCommunicator::all_reduce(const Operation& operation, const void* in, void* out, size_t count) {
  guarded(operation, [&](Exchange& exchange) {
    if (in_flat_order(operation.descriptor)) return reduce_in_order(exchange, in, out, count, -1);
    const size_t bytes = count * size_of(operation.descriptor.dtype);
    if (path_of(exchange, bytes).way != CarriedWay::pieces) return reduce_whole(exchange, in, out, count, -1);
    reduce_in_chunks(exchange, in, out, count, -1);
  });
}

void CarriedCommunicator::reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const int root = operation.descriptor.root;
  guarded(operation, [&](Exchange& exchange) {
    if (in_flat_order(operation.descriptor)) return reduce_in_order(exchange, in, out, count, root);
    const size_t bytes = count * size_of(operation.descriptor.dtype);
    if (path_of(exchange, bytes).way != CarriedWay::pieces) return reduce_whole(exchange, in, out, count, root);
    reduce_in_chunks(exchange, in, rank_ == root ? out : nullptr, count, root);
  });
}

void CarriedCommunicator::reduce_scatter(const Operation& operation, const void* const* ins, void* out, size_t count) {
  guarded(operation, [&](Exchange& exchange) {
    if (in_flat_order(operation.descriptor)) return reduce_blocks_in_order(exchange, ins, out, count);
    reduce_blocks(exchange, ins, out, count);
  });
}

void CarriedCommunicator::all_gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  guarded(operation, [&](Exchange& exchange) {
    if (path_of(exchange, bytes).way == CarriedWay::first) return gather_whole(exchange, in, outs, bytes);
    gather_in_pieces(exchange, in, outs, bytes);
  });
}

void CarriedCommunicator::broadcast(const Operation& operation, void* data, size_t bytes) {
  guarded(operation, [&](Exchange& exchange) { broadcast_in_pieces(exchange, data, bytes); });
}

void CarriedCommunicator::gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  guarded(operation, [&](Exchange& exchange) {
    if (path_of(exchange, bytes).way == CarriedWay::parcels) return gather_in_parcels(exchange, in, outs, bytes);
    gather_to_root(exchange, in, outs, bytes);
  });
}

void CarriedCommunicator::scatter(const Operation& operation, const void* const* ins, void* out, size_t bytes) {
  guarded(operation, [&](Exchange& exchange) {
    if (path_of(exchange, bytes).way == CarriedWay::parcels) return scatter_in_parcels(exchange, ins, out, bytes);
    scatter_from_root(exchange, ins, out, bytes);
  });
}

void CarriedCommunicator::all_to_all(const Operation& operation, const Bytes* ins, const MutableBytes* outs) {
  guarded(operation, [&](Exchange& exchange) {
    if (plan_.parcel_limit() > 0) return exchange_parcels(exchange, ins, outs);
    exchange_blocks(exchange, ins, outs);
  });
}

// A rank sends its message once all ranks of its node have arrived, then waits for every other node.
void CarriedCommunicator::barrier(const Operation& operation) {
  guarded(operation, [&](Exchange& exchange) {
    expect(plan_.peers());
    ark::barrier(node_->rounds(), operation);
    for (const int peer : plan_.peers()) tell(exchange, peer);
    hear_all(exchange, plan_.peers());
  });
}

}  // namespace ark

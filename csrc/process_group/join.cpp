// Creates a group: its ranks meet, find out which of them share memory, and choose the carrier.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "collectives/cuda/between/between_stage.hpp"
#include "process_group/carriers/backend_carrier.hpp"
#include "process_group/carriers/carried_communicator.hpp"
#include "process_group/carriers/rdma_carrier.hpp"
#include "process_group/process_group_ark.hpp"
#include "shm/rendezvous.hpp"
#include "util/identity.hpp"

namespace ark {

namespace {

std::string torch_key(int rank) {
  return "torch/" + std::to_string(rank);
}

std::string minor_of(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

// The machine that this process counts as; Options::node overrides it.
Identity identity_of(const ProcessGroupArk::Options& options) {
  Identity identity = Identity::of_this_process();
  if (options.node >= 0)
    for (size_t i = 0; i < sizeof options.node; ++i)
      identity.host_id[i] ^= static_cast<uint8_t>((options.node + 1) >> (8 * i));
  return identity;
}

ShmOptions shm_options_of(const ProcessGroupArk::Options& options) {
  ShmOptions shm;
  shm.debug = options.debug;
  shm.spin = std::chrono::microseconds(options.spin_us);
  shm.rules = options.dispatch;
  shm.timeout = options.timeout;
  return shm;
}

// The first rank of a node tells the others one of these; anything else is an error.
constexpr const char* kShares = "shares memory";
constexpr const char* kApart = "shares no memory";

std::string parcels_of(const NodePlan& plan) {
  const size_t limit = plan.parcel_limit();
  if (limit == 0) return "";
  const std::string shown = limit % 1024 == 0 ? std::to_string(limit / 1024) + " KB" : std::to_string(limit) + " bytes";
  return std::string(", ") + (plan.scatters_parcels() ? "all_to_all, gather and scatter" : "all_to_all and gather") +
         " aggregated per node up to " + shown + " a pair";
}

}  // namespace

void ProcessGroupArk::join() {
  try {
    core_->name = options_->group_name;
    core_->timeout_ms = options_->timeout.count();
    core_->global_rank = options_->global_rank >= 0 ? static_cast<int>(options_->global_rank) : rank_;
    core_->flight_dump = options_->flight_dump;
    core_->timing = options_->timing;
    FlightRecord::instance().resize(static_cast<size_t>(options_->flight_record));
    std::vector<int> members(options_->global_ranks_in_group.begin(), options_->global_ranks_in_group.end());
    core_->flight_group =
        FlightRecord::instance().register_group(options_->group_name, options_->group_desc, rank_, size_, members);

    StoreAdapter adapter(c10::make_intrusive<c10d::PrefixStore>("ark", store_));
    ConnectOptions connecting;
    connecting.rank = rank_;
    connecting.size = size_;
    connecting.segment_bytes = ShmCommunicator::segment_bytes(size_);
    connecting.timeout = options_->timeout;
    connecting.allow_sharing = options_->shared_memory != Options::SharedMemory::off;
    // Rank 0 reads these once all ranks have met.
    const std::string version = TORCH_VERSION;
    if (rank_ > 0) adapter.set(torch_key(rank_), {version.begin(), version.end()});
    ConnectResult result = connect(adapter, connecting, identity_of(*options_));
    start_ = result.start;
    if (rank_ == 0 && options_->log) tell_mixed_versions(adapter);
    if (result.neighbourhood) {
      auto communicator =
          std::make_unique<ShmCommunicator>(rank_, size_, std::move(*result.neighbourhood), shm_options_of(*options_));
      core_->shm = communicator.get();
      core_->communicator = std::move(communicator);
      return;
    }
    join_nodes(adapter, result);
  } catch (const Error& error) {
    throw error.at(rank_, "init");
  }
}

// Finds the memory of this rank's node. If the ranks of a node turn out to share none, its first rank tells all others
// and the node splits into one per rank, the same on all ranks.
std::pair<NodePlan, Neighbourhood> ProcessGroupArk::find_node(StoreAdapter& store, const ConnectResult& result) {
  std::vector<int> nodes = result.nodes;
  const auto come_apart = [&](int node) {
    for (int& one : nodes)
      if (one == node) one = -1 - static_cast<int>(&one - nodes.data());
  };
  NodePlan plan(nodes, rank_);
  if (plan.nodes() == 1) come_apart(nodes[0]);  // one machine, but no shared memory
  plan = NodePlan(nodes, rank_);
  const auto key = [&](int node) { return "node/" + result.start + "/" + std::to_string(node); };
  std::optional<Neighbourhood> mine;
  if (plan.own().size() > 1) {
    ConnectOptions connecting;
    connecting.rank = plan.local();
    connecting.size = static_cast<int>(plan.own().size());
    connecting.segment_bytes = ShmCommunicator::segment_bytes(connecting.size);
    connecting.timeout = options_->timeout;
    StoreAdapter inside(c10::make_intrusive<c10d::PrefixStore>("ark/" + key(plan.node()) + "/ranks", store_));
    std::string word = kShares;
    try {
      mine = std::move(connect(inside, connecting, identity_of(*options_)).neighbourhood);
      if (!mine) word = kApart;
    } catch (const Error& error) {
      const std::string what =
          "among " + name_ranks(plan.own()) + ", which are a node and count from 0 there: " + error.message();
      if (plan.local() == 0) store.set(key(plan.node()), {what.begin(), what.end()});
      throw Error(error.kind(), what, ErrorContext{rank_, -1, "init", 0, error.context().remedy});
    }
    if (plan.local() == 0) store.set(key(plan.node()), {word.begin(), word.end()});
  }
  for (int node = 0; node < plan.nodes(); ++node) {
    if (plan.members(node).size() == 1) continue;
    const auto found = store.get(key(node), options_->timeout);
    const std::string word(found.begin(), found.end());
    if (word == kApart) come_apart(nodes[plan.members(node)[0]]);
    if (word != kApart && word != kShares)
      throw Error(ErrorKind::system, word, ErrorContext{rank_, plan.members(node)[0], "init", 0, ""});
  }
  plan = NodePlan(nodes, rank_);
  if (!mine) mine = neighbourhood_of_one(ShmCommunicator::segment_bytes(1));
  return {std::move(plan), std::move(*mine)};
}

void ProcessGroupArk::join_nodes(StoreAdapter& store, const ConnectResult& result) {
  if (options_->shared_memory == Options::SharedMemory::on) {
    throw Error(ErrorKind::system, "the ranks of this group share no memory: " + result.reason,
                ErrorContext{rank_, -1, "init", 0, "Unset ARK_SHARED_MEMORY to let PyTorch's Gloo carry such groups."});
  }
  if (!options_->make_carrier) {
    throw Error(ErrorKind::system,
                "the ranks of this group share no memory (" + result.reason + ") and nothing is configured to carry it",
                ErrorContext{rank_, -1, "init", 0, "Set Options::make_carrier to a function that makes a Gloo group."});
  }
  auto [plan, node] = find_node(store, result);
  // Peers connect while this process may be waiting in its store, which blocks all other uses of the same client.
  const auto own_store = [&]() -> std::unique_ptr<KeyValueStore> {
    auto client = store_;
    try {
      client = store_->clone();
    } catch (const std::exception&) {  // a user-defined store
    }
    return std::make_unique<StoreAdapter>(c10::make_intrusive<c10d::PrefixStore>("ark", std::move(client)));
  };
  // The rank that writes also needs its own client. The others only ask once, when they raise an error.
  std::shared_ptr<KeyValueStore> of_beats =
      plan.local() == 0 ? own_store()
                        : std::make_unique<StoreAdapter>(c10::make_intrusive<c10d::PrefixStore>("ark", store_));
  auto beats = std::make_unique<NodeBeats>(std::move(of_beats), "beat/" + result.start, plan,
                                           NodeBeats::period_of(options_->timeout));
  RdmaAgreement rdma = agree_on_rdma(
      {rank_, size_, result.start, options_->net, options_->rdma, options_->timeout, plan.peers()}, store, own_store);
  plan_ = plan.text() + parcels_of(plan) + (plan.flat() ? "" : text_of(options_->sums)) +
          (rdma.carrier && options_->net == rdma::Wish::rdma && BetweenStage::why_not(plan).empty()
               ? ", CUDA tensors likewise"
               : "") +
          (rdma.carrier ? ", rdma between them" : ", gloo between them");
  if (rank_ == 0 && options_->log) {
    const std::string by = rdma.carrier ? "RDMA" : "PyTorch's Gloo";
    const std::string how = plan.flat() ? "shares no memory and is carried by " + by
                                        : "is on " + plan.text() + ": memory in each, " + by + " between them";
    options_->log("group \"" + options_->group_name + "\" of " + std::to_string(size_) + " ranks " + how + ": " +
                  result.reason + (rdma.carrier ? " (" : " (no RDMA: ") + rdma.reason + ")");
  }
  try {
    core_->carrier = options_->make_carrier(c10::make_intrusive<c10d::PrefixStore>("carrier/" + result.start, store_),
                                            rank_, size_, options_->timeout);
  } catch (const std::exception& error) {
    throw Error(ErrorKind::system,
                "PyTorch's Gloo, which is to carry this group (" + result.reason + "), failed: " + error.what(),
                ErrorContext{rank_, -1, "init", 0,
                             "See whether the ranks reach each other (GLOO_SOCKET_IFNAME names the interface) and "
                             "this process's limits (ulimit -a)."});
  }
  if (rdma.carrier) core_->rdma = rdma.carrier->messages();
  core_->no_rdma = rdma.carrier ? "" : rdma.reason;
  core_->plan = plan;
  // News of failures always uses Gloo: its connections end with the process, a NIC's only after a retry budget.
  const auto gloo = std::make_shared<BackendCarrier>(core_->carrier);
  const std::shared_ptr<Carrier> between = rdma.carrier ? std::shared_ptr<Carrier>(rdma.carrier) : gloo;
  auto communicator =
      std::make_unique<CarriedCommunicator>(rank_, size_, between, gloo, std::move(beats), std::move(plan),
                                            std::move(node), shm_options_of(*options_), options_->sums);
  core_->node_health = &communicator->node_health();
  core_->communicator = std::move(communicator);
}

uint64_t ProcessGroupArk::messages_between_nodes() const {
  const auto* carried = dynamic_cast<const CarriedCommunicator*>(core_->communicator.get());
  return carried ? carried->messages_sent() : 0;
}

// Ranks may run different PyTorch minors, because they share only ark's own messages and memory. Reported once per
// process, since later groups have the same ranks.
void ProcessGroupArk::tell_mixed_versions(StoreAdapter& store) const {
  static std::atomic<bool> told{false};
  std::map<std::string, std::vector<int>> ranks_of;
  ranks_of[minor_of(TORCH_VERSION)].push_back(0);
  for (int rank = 1; rank < size_; ++rank) {
    if (const auto found = store.find(torch_key(rank)))
      ranks_of[minor_of({found->begin(), found->end()})].push_back(rank);
  }
  if (ranks_of.size() < 2 || told.exchange(true)) return;
  std::string text;
  for (const auto& [minor, ranks] : ranks_of) text += (text.empty() ? "" : ", ") + minor + " on " + name_ranks(ranks);
  options_->log("group \"" + options_->group_name + "\" has ranks with different PyTorch versions: " + text +
                ". Collectives work; what PyTorch itself sends between ranks (pickled objects, checkpoints) may not.");
}

}  // namespace ark

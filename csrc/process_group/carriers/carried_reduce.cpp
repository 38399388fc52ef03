// Large sums over several nodes, pipelined chunk by chunk through three stages: sum in the node, sum over nodes,
// publish.
//
// In round a(k) every rank publishes chunk k to its node. The rank of each rail adds its part of the chunk (a partial)
// and sends every other node that node's range of it. One step later it adds the partials of its own range in node
// order and sends the result to the other nodes. Another step later it publishes the complete part in round b(k), which
// the node collects in the next step. A reduce has one range: that of root's node.
#include <algorithm>

#include "collectives/cpu/algorithms.hpp"
#include "process_group/carriers/carried_communicator.hpp"

namespace ark {

namespace {

constexpr size_t kLag = kSumLag;
constexpr size_t kSlots = kLag + 1;    // buffers between two stages
constexpr size_t kPartAlign = kAlign;  // in bytes; parts of a chunk start on cache lines

}  // namespace

// step t:   publish a(t) | add part of t-1 | add range of t-1-lag | publish b(t-1-2 lag) | collect b(t-2-2 lag)
// Every rank of a node publishes and reads rounds in this order, so `released` only grows. A step publishes at most two
// rounds and reads those of the previous step, so four slots suffice. Receives depend only on earlier steps of other
// ranks, and sends are waited for only before their memory is reused, so the waits cannot form a cycle.
class CarriedCommunicator::ChunkedReduce {
 public:
  ChunkedReduce(CarriedCommunicator& of, Exchange& exchange, const void* in, void* out, size_t count, int root,
                const CarriedPath& path)
      : of_(of),
        exchange_(exchange),
        plan_(of.plan_),
        messages_(exchange.messages),
        reduction_(exchange.reduction),
        rounds_(of.node_->rounds()),
        in_(static_cast<const std::byte*>(in)),
        out_(static_cast<std::byte*>(out)),
        count_(count),
        root_node_(root < 0 ? -1 : plan_.node_of(root)),
        element_(size_of(exchange.operation.descriptor.dtype)),
        partial_(reduction_.partial_size()),
        unit_(std::max<size_t>(1, kPartAlign / element_)),
        chunk_(path.piece / element_),
        chunks_(path.pieces),
        ranks_(rounds_.size()),
        rail_(plan_.local() < plan_.rails() ? plan_.local() : -1),
        lone_(ranks_ == 1),
        direct_(root < 0 && plan_.nodes() == 2 && partial_ == element_),
        sources_(std::max(ranks_, plan_.nodes())) {
    for (const int node : plan_.others()) {
      if (rail_ < 0) break;
      if (root < 0 || node == root_node_ || plan_.node() == root_node_) peers_.push_back(plan_.members(node)[rail_]);
    }
    most_part_ = part_of(chunk_, plan_.rails(), 0, unit_).count;
    const size_t slot = most_part_ * (partial_ * plan_.nodes() + element_);
    memory_ = of.scratch(kSlots * slot);
  }

  void run() {
    of_.meet(exchange_, peers_);
    for (size_t k = 0; k < kSlots; ++k) expect_partials(k);
    rounds_.begin(exchange_.operation, std::min(chunk_, count_) * element_);
    first_ = rounds_.next();
    for (size_t t = 0; t < chunks_ + 2 + 2 * kLag; ++t) {
      if (t < chunks_) publish_input(t);
      if (const size_t k = t - 1; t >= 1 && k < chunks_) add_part(k);
      if (const size_t k = t - 1 - kLag; t >= 1 + kLag && k < chunks_) add_range(k);
      if (const size_t k = t - 1 - 2 * kLag; t >= 1 + 2 * kLag && k < chunks_) publish_result(k);
      if (const size_t k = t - 2 - 2 * kLag; t >= 2 + 2 * kLag && k < chunks_) collect(k);
    }
  }

 private:
  using enum MessageChannel;

  uint64_t input_round(size_t k) const { return first_ + k + (k > 1 + 2 * kLag ? k - 1 - 2 * kLag : 0); }
  uint64_t result_round(size_t k) const { return first_ + k + std::min(chunks_, k + 2 + 2 * kLag); }
  size_t elements(size_t k) const { return std::min(chunk_, count_ - k * chunk_); }
  ElementRange part(size_t k, int rail) const { return part_of(elements(k), plan_.rails(), rail, unit_); }
  // A node's range within this rank's part. With two nodes each takes the whole part: as many bytes, one hop fewer.
  ElementRange range(size_t k, int node) const {
    const size_t total = part(k, rail_).count;
    if (direct_) return {0, total};
    if (root_node_ >= 0) return {0, node == root_node_ ? total : 0};
    return part_of(total, plan_.nodes(), node, unit_);
  }
  bool wants_result() const { return out_ != nullptr; }
  bool node_has_result() const { return root_node_ < 0 || root_node_ == plan_.node(); }

  // Memory of chunk k: every node's partial of this rank's part, and the result if this rank has no output tensor.
  std::byte* slot(size_t k) const { return memory_ + k % kSlots * most_part_ * (partial_ * plan_.nodes() + element_); }
  std::byte* partial(size_t k, int node) const { return slot(k) + node * most_part_ * partial_; }
  std::byte* result(size_t k) const {
    return wants_result() ? out_ + (k * chunk_ + part(k, rail_).begin) * element_
                          : slot(k) + plan_.nodes() * most_part_ * partial_;
  }
  const std::byte* own_partial(size_t k) const {
    return plan_.flat() ? in_ + (k * chunk_ + part(k, rail_).begin) * element_ : partial(k, plan_.node());
  }

  void publish_input(size_t k) {
    const uint64_t round = input_round(k);
    if (lone_) return rounds_.pass(round);
    const ElementRange own = rail_ >= 0 ? part(k, rail_) : ElementRange{};
    const std::byte* chunk = in_ + k * chunk_ * element_;
    std::byte* slot = rounds_.open(round);
    const size_t before = own.begin * element_, after = (own.begin + own.count) * element_;
    copy_bytes(slot, chunk, before);
    copy_bytes(slot + after, chunk + after, elements(k) * element_ - after);
    rounds_.publish(round);
  }

  void add_part(size_t k) {
    const uint64_t round = input_round(k);
    for (int i = 0; i < ranks_ && (k == 0 || rail_ >= 0); ++i) {  // ranks that add nothing still compare descriptors
      const size_t offset = rail_ < 0 ? 0 : part(k, rail_).begin * element_;
      sources_[i] = (i == rounds_.rank() ? in_ + k * chunk_ * element_ : rounds_.read(round, i)) + offset;
    }
    if (rail_ >= 0) {
      if (k == 0) {
        factors_ = gather_factors(rounds_, exchange_.operation, first_, factor_storage_);
        of_.hear_all(exchange_, peers_);
      }
      const size_t count = part(k, rail_).count;
      if (!plan_.flat() && count > 0) {
        for (const size_t sent : sent_[k % kSlots]) messages_.wait_for(sent);
        reduction_.partial(partial(k, plan_.node()), sources_.data(), ranks_, count, factors_);
      }
      send_partials(k);
    }
    rounds_.release(round);
  }

  void expect_partials(size_t k) {
    if (k >= chunks_ || rail_ < 0) return;
    awaited_[k % kSlots].clear();
    const size_t bytes = range(k, plan_.node()).count * partial_;
    for (const int peer : peers_)
      awaited_[k % kSlots].push_back(messages_.receive(peer, data, partial(k, plan_.node_of(peer)), bytes, true));
  }

  void send_partials(size_t k) {
    sent_[k % kSlots].clear();
    for (const int peer : peers_) {
      const ElementRange theirs = range(k, plan_.node_of(peer));
      const std::byte* from = own_partial(k) + theirs.begin * partial_;
      sent_[k % kSlots].push_back(messages_.send(peer, data, from, theirs.count * partial_));
    }
  }

  void add_range(size_t k) {
    if (rail_ < 0) return;
    for (const size_t receive : awaited_[k % kSlots]) messages_.wait_for(receive);
    if (direct_ && plan_.flat())  // the result may overwrite the input that was sent
      for (const size_t sent : sent_[k % kSlots]) messages_.wait_for(sent);
    const ElementRange own = range(k, plan_.node());
    std::byte* target = result(k) + own.begin * element_;
    if (own.count > 0) {
      for (int node = 0; node < plan_.nodes(); ++node)
        sources_[node] = node == plan_.node() ? own_partial(k) + own.begin * partial_ : partial(k, node);
      reduction_.combine(target, sources_.data(), plan_.nodes(), own.count, of_.factors_of_nodes(exchange_));
    }
    expect_partials(k + kSlots);
    results_[k % kSlots].clear();
    for (const int peer : peers_) {
      if (root_node_ >= 0 || direct_) break;
      const ElementRange theirs = range(k, plan_.node_of(peer));
      results_[k % kSlots].push_back(
          messages_.receive(peer, results, result(k) + theirs.begin * element_, theirs.count * element_));
      messages_.send(peer, results, target, own.count * element_);
    }
  }

  void publish_result(size_t k) {
    const uint64_t round = result_round(k);
    if (rail_ >= 0)
      for (const size_t receive : results_[k % kSlots]) messages_.wait_for(receive);
    if (lone_ || rail_ < 0 || !node_has_result()) return rounds_.pass(round);
    std::byte* slot = rounds_.open(round);
    copy_bytes(slot, result(k), part(k, rail_).count * element_);
    rounds_.publish(round);
  }

  void collect(size_t k) {
    const uint64_t round = result_round(k);
    for (int rail = 0; rail < plan_.rails() && wants_result() && !lone_; ++rail) {
      if (rail == rail_) continue;
      const ElementRange theirs = part(k, rail);
      copy_bytes(out_ + (k * chunk_ + theirs.begin) * element_, rounds_.read(round, rail), theirs.count * element_);
    }
    rounds_.release(round);
  }

  CarriedCommunicator& of_;
  Exchange& exchange_;
  const NodePlan& plan_;
  CarriedMessages& messages_;
  const StagedReduce& reduction_;
  Rounds& rounds_;
  const std::byte* in_;
  std::byte* out_;  // null if another rank gets the result
  const size_t count_;
  const int root_node_;  // -1: every rank wants the result
  const size_t element_, partial_, unit_;
  const size_t chunk_, chunks_;  // elements per chunk; number of chunks
  const int ranks_;              // of this node
  const int rail_;               // -1: this rank has no rail
  const bool lone_, direct_;
  std::vector<const void*> sources_;
  std::vector<int> peers_;  // on the same rail
  size_t most_part_ = 0;
  std::byte* memory_ = nullptr;
  uint64_t first_ = 0;
  std::vector<double> factor_storage_;
  const double* factors_ = nullptr;
  std::vector<size_t> sent_[kSlots], awaited_[kSlots], results_[kSlots];
};

void CarriedCommunicator::reduce_in_chunks(Exchange& exchange, const void* in, void* out, size_t count, int root) {
  const CarriedPath path = path_of(exchange, count * size_of(exchange.operation.descriptor.dtype));
  ChunkedReduce(*this, exchange, in, out, count, root, path).run();
}

// reduce_scatter: every rank publishes piece k of all blocks. A block owner's representative adds the node's pieces and
// sends the partial to the owner. The owner adds the partials of all nodes a step later.
void CarriedCommunicator::reduce_blocks(Exchange& exchange, const void* const* ins, void* out, size_t count) {
  using enum MessageChannel;
  const Operation& operation = exchange.operation;
  const StagedReduce& reduction = exchange.reduction;
  CarriedMessages& messages = exchange.messages;
  Rounds& rounds = node_->rounds();
  const size_t element = size_of(operation.descriptor.dtype), partial = reduction.partial_size();
  const int nodes = plan_.nodes(), node = plan_.node(), ranks = rounds.size();
  const CarriedPath path = path_of(exchange, count * element);
  const bool in_first = path.way == CarriedWay::first;
  const size_t piece = path.piece / element, pieces = path.pieces;
  const auto elements = [&](size_t k) { return std::min(piece, count - k * piece); };
  std::vector<int> blocks = plan_.targets();  // blocks that this rank adds up
  blocks.push_back(rank_);
  const size_t slot = piece * partial * (nodes + blocks.size());
  std::byte* memory = scratch(kSlots * slot);
  const auto outgoing = [&](size_t k, size_t i) { return memory + k % kSlots * slot + (nodes + i) * piece * partial; };
  const auto incoming = [&](size_t k, int from) { return memory + k % kSlots * slot + from * piece * partial; };
  std::vector<size_t> sent[kSlots], awaited[kSlots];
  std::vector<const void*> sources(std::max(nodes, ranks));
  std::vector<double> storage;
  const double* factors = nullptr;

  const auto expect_sums = [&](size_t k) {
    if (k >= pieces || in_first) return;
    awaited[k % kSlots].clear();
    for (const int other : plan_.others()) {
      const size_t bytes = elements(k) * partial;
      awaited[k % kSlots].push_back(
          messages.receive(plan_.stands_for(rank_, other), data, incoming(k, other), bytes, true));
    }
  };

  expect(plan_.peers());
  if (!in_first) {
    for (const int peer : plan_.peers()) tell(exchange, peer);
  }
  rounds.begin(operation, plan_.flat() ? 0 : piece * element * size_);
  const uint64_t first = rounds.next();
  const auto publish = [&](size_t k) {
    if (ranks == 1) return rounds.pass(first + k);
    std::byte* to = rounds.open(first + k);
    for (int block = 0; block < size_; ++block) {
      if (plan_.stands_for(block, node) == rank_) continue;
      copy_bytes(to + block * piece * element, at_offset(ins[block], k * piece * element), elements(k) * element);
    }
    rounds.publish(first + k);
  };
  const auto add_blocks = [&](size_t k) {
    for (const size_t number : sent[k % kSlots]) messages.wait_for(number);
    sent[k % kSlots].clear();
    for (int i = 0; i < ranks && k == 0; ++i)
      if (i != rounds.rank()) rounds.read(first, i);
    if (k == 0) factors = gather_factors(rounds, operation, first, storage);
    if (k == 0 && !in_first) hear_all(exchange, plan_.peers());
    for (size_t b = 0; b < blocks.size(); ++b) {
      const int block = blocks[b];
      const std::byte* sum = at_offset(ins[block], k * piece * element);
      if (!plan_.flat() && elements(k) > 0) {
        for (int i = 0; i < ranks; ++i) {
          sources[i] = i == rounds.rank() ? sum : rounds.read(first + k, i) + block * piece * element;
        }
        reduction.partial(outgoing(k, b), sources.data(), ranks, elements(k), factors);
        sum = outgoing(k, b);
      }
      if (block == rank_) continue;
      if (in_first) {
        tell(exchange, block, sum, elements(k) * partial);
      } else {
        sent[k % kSlots].push_back(messages.send(block, data, sum, elements(k) * partial));
      }
    }
    if (in_first) {  // these peers send partials and expect only a first message in return
      for (const int peer : plan_.peers())
        if (plan_.stands_for(peer, node) != rank_) tell(exchange, peer);
    }
    rounds.release(first + k);
  };
  const auto add_nodes = [&](size_t k) {
    if (in_first) hear_all(exchange, plan_.peers());
    for (const size_t number : awaited[k % kSlots]) messages.wait_for(number);
    for (int other = 0; other < nodes; ++other) {
      if (other != node) {
        sources[other] = in_first ? heard_[plan_.stands_for(rank_, other)].data : incoming(k, other);
      } else {
        sources[other] = plan_.flat() ? at_offset(ins[rank_], k * piece * element) : outgoing(k, blocks.size() - 1);
      }
    }
    if (elements(k) > 0) {
      reduction.combine(at_offset(out, k * piece * element), sources.data(), nodes, elements(k),
                        factors_of_nodes(exchange));
    }
    expect_sums(k + kSlots);
  };
  for (size_t k = 0; k < kSlots; ++k) expect_sums(k);
  for (size_t t = 0; t < pieces + 1 + kLag; ++t) {
    if (t < pieces) publish(t);
    if (t >= 1 && t - 1 < pieces) add_blocks(t - 1);
    if (t >= 1 + kLag && t - 1 - kLag < pieces) add_nodes(t - 1 - kLag);
  }
}

}  // namespace ark

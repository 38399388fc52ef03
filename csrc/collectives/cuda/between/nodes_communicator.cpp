// How each collective that moves bytes divides into stages in the node and between nodes; sums are in nodes_sums.cpp.
#include "collectives/cuda/between/nodes_communicator.hpp"

#include <algorithm>

namespace ark {

namespace {

constexpr size_t kWord = 16;  // bytes of a barrier

}  // namespace

NodesCommunicator::NodesCommunicator(int rank, int size, NodePlan plan, std::shared_ptr<Communicator> node,
                                     std::unique_ptr<BetweenStage> stage)
    : Communicator(rank, size), plan_(std::move(plan)), node_(std::move(node)), stage_(std::move(stage)) {}

Operation NodesCommunicator::in_node(const Operation& operation, int root) {
  Operation inner = operation;
  inner.descriptor.root = root;
  if (inner.descriptor.op == ReduceOp::avg) inner.descriptor.op = ReduceOp::sum;
  return inner;
}

bool NodesCommunicator::takes(Kind kind, bool even) {
  return kind != Kind::all_to_all || even;
}

// The range of a tensor that the rank at a place carries between nodes: equal ones, the last rail's with the rest; none
// beyond the rails.
ElementRange NodesCommunicator::part(size_t count, int place, size_t element) const {
  if (place >= rails()) return {0, 0};
  const size_t unit = unit_of(element), each = count / rails() / unit * unit;
  const size_t begin = each * place;
  return {begin, place == rails() - 1 ? count - begin : each};
}

void NodesCommunicator::exchange(const Operation& operation, const Messages& messages) {
  node_->all_to_all(in_node(operation), messages.ins.data(), messages.outs.data());
}

// In this node, between the rails and the ranks whose blocks they carry in a turn. The first turn's are the rails' own.
void NodesCommunicator::hand_over(const Operation& operation, int turn, Way way, const void* from, void* to,
                                  size_t bytes) {
  if (turn == 0 || in_turn(here(), turn) == 0) return;
  Messages messages(places());
  const int rail = place() - turn * rails(), owner = place() + turn * rails();
  if (rail >= 0 && rail < in_turn(here(), turn)) {
    if (way == Way::to_rail) messages.ins[rail] = {from, bytes};
    if (way == Way::from_rail) messages.outs[rail] = {to, bytes};
  } else if (carries(here(), turn)) {
    if (way == Way::to_rail) messages.outs[owner] = {to, bytes};
    if (way == Way::from_rail) messages.ins[owner] = {from, bytes};
  }
  exchange(operation, messages);
}

// Gives the ranks of this node, or the one at place `only`, the parts that each of them has.
void NodesCommunicator::spread_in_node(const Operation& operation, void* data, size_t count, size_t element, int only) {
  if (lone()) return;
  Messages messages(places());
  const ElementRange own = part(count, place(), element);
  for (int i = 0; i < places(); ++i) {
    if (i == place()) continue;
    const ElementRange theirs = part(count, i, element);
    if (only < 0 || only == i) messages.ins[i] = {at(data, own.begin * element), own.count * element};
    if (only < 0 || only == place()) messages.outs[i] = {at(data, theirs.begin * element), theirs.count * element};
  }
  exchange(operation, messages);
}

// First the node's ranks collect their own blocks, then those that their rails bring from each other node.
void NodesCommunicator::all_gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  if (bytes == 0) return;
  std::vector<void*> to(places());
  const auto gather = [&](int node, int first, const void* own) {
    for (int i = 0; i < places(); ++i) to[i] = outs[member(node, first + i)];
    node_->all_gather(in_node(operation), own, to.data(), bytes);
  };
  if (!lone()) gather(here(), 0, in);
  for (int turn = 0; turn < turns(); ++turn) {
    if (has_rail()) {
      Blocks moving(nodes());
      for (int node = 0; node < nodes(); ++node) {
        if (carries(here(), turn)) {
          moving.send[node] = lone() ? in : outs[carried(here(), turn)];
          moving.send_bytes[node] = bytes;
        }
        if (!carries(node, turn)) continue;
        moving.receive[node] = outs[carried(node, turn)];
        moving.receive_bytes[node] = bytes;
      }
      stage_->move(operation, moving);
    }
    for (int node = 0; node < nodes() && !lone(); ++node) {
      const int blocks = in_turn(node, turn);
      if (node == here() || blocks == 0) continue;
      if (blocks == places()) {
        gather(node, turn * rails(), outs[carried(node, turn)]);
        continue;
      }
      Messages messages(places());
      for (int i = 0; i < places(); ++i) {
        if (i == place()) continue;
        if (carries(node, turn)) messages.ins[i] = {outs[carried(node, turn)], bytes};
        if (i < blocks) messages.outs[i] = {outs[member(node, turn * rails() + i)], bytes};
      }
      exchange(operation, messages);
    }
  }
}

// A small one goes by one rail: root's, if it has one; of a large one every rail carries a part.
void NodesCommunicator::broadcast(const Operation& operation, void* data, size_t bytes) {
  if (bytes == 0) return;
  const int root = operation.descriptor.root, root_node = plan_.node_of(root), root_place = plan_.local_of(root);
  const bool whole = rails() == 1 || bytes <= kWhole;
  const int rail = root_place % rails();
  if (whole && root_place != rail && here() == root_node) node_->broadcast(in_node(operation, root_place), data, bytes);
  if (!whole && here() == root_node) {
    Messages messages(places());
    for (int i = 0; i < places(); ++i) {
      const ElementRange theirs = part(bytes, i, 1);
      if (rank_ == root && i != place()) messages.ins[i] = {at(data, theirs.begin), theirs.count};
    }
    const ElementRange own = part(bytes, place(), 1);
    if (rank_ != root) messages.outs[root_place] = {at(data, own.begin), own.count};
    exchange(operation, messages);
  }
  if (whole ? place() == rail : has_rail()) {
    const ElementRange own = whole ? ElementRange{0, bytes} : part(bytes, place(), 1);
    Blocks moving(nodes());
    for (int node = 0; node < nodes(); ++node) {
      moving.send[node] = moving.receive[node] = at(data, own.begin);
      moving.send_bytes[node] = here() == root_node && node != here() ? own.count : 0;
      moving.receive_bytes[node] = here() != root_node && node == root_node ? own.count : 0;
    }
    stage_->move(operation, moving);
  }
  if (lone()) return;
  if (!whole) return spread_in_node(operation, data, bytes, 1, -1);
  if (root_place == rail || here() != root_node) node_->broadcast(in_node(operation, rail), data, bytes);
}

void NodesCommunicator::gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  const int root = operation.descriptor.root, root_node = plan_.node_of(root), root_place = plan_.local_of(root);
  const bool collects = here() == root_node;
  const size_t most = flat() ? bytes : stage_->scratch_bytes() / nodes() / kUnit * kUnit;
  std::vector<void*> to(places());
  for (size_t begin = 0; begin < bytes; begin += most) {
    const size_t slice = std::min(most, bytes - begin);
    const auto of = [&](int rank) { return at(outs[rank], begin); };
    const auto gather_here = [&](int node, int first, const void* own) {
      for (int i = 0; i < places(); ++i) to[i] = rank_ == root ? of(member(node, first + i)) : nullptr;
      node_->gather(in_node(operation, root_place), own, rank_ == root ? to.data() : nullptr, slice);
    };
    if (collects && !lone()) gather_here(here(), 0, at(in, begin));
    for (int turn = 0; turn < turns(); ++turn) {
      const void* own = at(in, begin);
      if (!collects && turn > 0) {
        hand_over(operation, turn, Way::to_rail, own, scratch(), slice);
        own = scratch();
      }
      Blocks moving(nodes());
      for (int node = 0; node < nodes() && has_rail(); ++node) {
        const bool keeps = collects && node == here() && lone() && turn == 0;
        if (keeps || (!collects && node == root_node && carries(here(), turn)))
          moving.send[node] = own, moving.send_bytes[node] = slice;
        if (!keeps && (!collects || node == here() || !carries(node, turn))) continue;
        moving.receive[node] = rank_ == root ? of(carried(node, turn)) : scratch(node * most);
        moving.receive_bytes[node] = slice;
      }
      if (has_rail()) stage_->move(operation, moving);
      for (int node = 0; node < nodes() && collects && !lone(); ++node) {
        const int blocks = in_turn(node, turn);
        if (node == here() || blocks == 0) continue;
        if (blocks == places()) {
          gather_here(node, turn * rails(), moving.receive[node]);
          continue;
        }
        Messages messages(places());
        for (int i = 0; i < blocks && rank_ == root; ++i)
          if (i != place()) messages.outs[i] = {of(member(node, turn * rails() + i)), slice};
        if (rank_ != root && carries(node, turn)) messages.ins[root_place] = {moving.receive[node], slice};
        exchange(operation, messages);
      }
    }
  }
}

void NodesCommunicator::scatter(const Operation& operation, const void* const* ins, void* out, size_t bytes) {
  const int root = operation.descriptor.root, root_node = plan_.node_of(root), root_place = plan_.local_of(root);
  const bool gives = here() == root_node;
  const size_t most = flat() ? bytes : stage_->scratch_bytes() / nodes() / kUnit * kUnit;
  std::vector<const void*> from(places());
  for (size_t begin = 0; begin < bytes; begin += most) {
    const size_t slice = std::min(most, bytes - begin);
    const auto of = [&](int rank) { return at(ins[rank], begin); };
    const auto scatter_here = [&](int node, int first, void* to) {
      for (int i = 0; i < places(); ++i) from[i] = rank_ == root ? of(member(node, first + i)) : nullptr;
      node_->scatter(in_node(operation, root_place), rank_ == root ? from.data() : nullptr, to, slice);
    };
    if (gives && !lone()) scatter_here(here(), 0, at(out, begin));
    for (int turn = 0; turn < turns(); ++turn) {
      Blocks moving(nodes());
      for (int node = 0; node < nodes() && gives; ++node) {
        if (node == here() ? !lone() || turn > 0 : in_turn(node, turn) == 0) continue;
        if (carries(node, turn)) {
          moving.send[node] = rank_ == root ? of(carried(node, turn)) : scratch(node * most);
          moving.send_bytes[node] = slice;
        }
        if (lone()) continue;
        if (in_turn(node, turn) == places()) {
          // Root's own part goes where the stage takes it from, or nowhere: its input must stay as it is.
          scatter_here(node, turn * rails(), scratch(node * most));
          continue;
        }
        Messages messages(places());
        for (int i = 0; i < in_turn(node, turn) && rank_ == root; ++i)
          if (i != place()) messages.ins[i] = {of(member(node, turn * rails() + i)), slice};
        if (rank_ != root && carries(node, turn)) messages.outs[root_place] = {scratch(node * most), slice};
        exchange(operation, messages);
      }
      void* const to = turn == 0 ? at(out, begin) : scratch();
      const bool receives = gives ? lone() && turn == 0 : carries(here(), turn);
      if (receives) moving.receive[root_node] = to, moving.receive_bytes[root_node] = slice;
      if (has_rail()) stage_->move(operation, moving);
      if (!gives) hand_over(operation, turn, Way::from_rail, to, at(out, begin), slice);
    }
  }
}

// First the node's ranks exchange their own blocks. Then, for each other node, they give its rails what is for a place
// there, and each rail takes it, from one place of the node after the other.
void NodesCommunicator::all_to_all(const Operation& operation, const Bytes* ins, const MutableBytes* outs) {
  const size_t bytes = ins[rank_].size;
  const size_t blocks = size_t{1} * nodes() * (most_places() + 1);  // in the scratch memory
  const size_t most = flat() ? bytes : stage_->scratch_bytes() / blocks / kUnit * kUnit;
  for (size_t begin = 0; begin < bytes; begin += most) {
    const size_t slice = std::min(most, bytes - begin);
    const auto in = [&](int rank) { return Bytes{at(ins[rank].data, begin), slice}; };
    const auto out = [&](int rank) { return MutableBytes{at(outs[rank].data, begin), slice}; };
    const auto given = [&](int node, int from) { return scratch((size_t{1} * node * most_places() + from) * most); };
    const auto taken = [&](int node) { return scratch((size_t{1} * nodes() * most_places() + node) * most); };
    for (int turn = 0; turn < turns(); ++turn) {
      for (int node = 0; node < nodes() && !lone(); ++node) {
        Messages messages(places());
        const bool own = node == here();
        if (own ? turn > 0 : in_turn(node, turn) == 0) continue;
        for (int i = 0; i < places(); ++i) {
          if (own || i < in_turn(node, turn)) messages.ins[i] = in(member(node, turn * rails() + i));
          if (own) messages.outs[i] = out(member(node, i));
          if (!own && carries(node, turn)) messages.outs[i] = {given(node, i), slice};
        }
        exchange(operation, messages);
      }
      for (int from = 0; from < most_places(); ++from) {
        Blocks moving(nodes());
        for (int node = 0; node < nodes() && has_rail(); ++node) {
          if (node == here() && (!lone() || turn > 0 || from > 0)) continue;
          if (from < places() && carries(node, turn)) {
            moving.send[node] = lone() ? in(carried(node, turn)).data : given(node, from);
            moving.send_bytes[node] = slice;
          }
          if (from >= places(node) || !carries(here(), turn)) continue;
          moving.receive[node] = turn == 0 ? out(member(node, from)).data : taken(node);
          moving.receive_bytes[node] = slice;
        }
        if (has_rail()) stage_->move(operation, moving);
        for (int node = 0; node < nodes(); ++node)
          if (node != here() && from < places(node))
            hand_over(operation, turn, Way::from_rail, taken(node), out(member(node, from)).data, slice);
      }
    }
  }
}

void NodesCommunicator::barrier(const Operation& operation) {
  const Operation inner = in_node(operation);
  if (!lone()) node_->barrier(inner);
  if (has_rail()) {
    Blocks moving(nodes());
    for (int node = 0; node < nodes(); ++node) {
      moving.send[node] = scratch();
      moving.receive[node] = scratch(kWord * (1 + node));
      moving.send_bytes[node] = moving.receive_bytes[node] = node == here() ? 0 : kWord;
    }
    stage_->move(operation, moving);
  }
  if (!lone()) node_->barrier(inner);
}

std::unique_ptr<NodesCommunicator::Shared> NodesCommunicator::share(uint64_t bytes, uint64_t fingerprint,
                                                                    const rdma::GpuWindow::Shape& shape,
                                                                    std::string& why) {
  CudaCommunicator* const node = on_node();
  auto shared = std::make_unique<Shared>();
  std::exception_ptr failed;
  try {
    if (node == nullptr)
      why = "its node has no GPUs";
    else
      shared->here = node->share(bytes, fingerprint, why);
    // A launch of a region that is gone may still run.
    const bool unused = std::ranges::any_of(regions_, [](const RegionWindow& one) { return one.used.expired(); });
    if (unused && node != nullptr && node->settle())
      std::erase_if(regions_, [](const RegionWindow& one) { return one.used.expired(); });
  } catch (const Error&) {
    failed = std::current_exception();
  }
  auto window = stage_->region_window(shape, fingerprint, failed, why);
  if (!window) return nullptr;
  shared->window = window->kernels_view();
  shared->names = plan_.own();
  shared->outside = window->setup().ranks;
  shared->keep = std::make_shared<std::shared_ptr<void>>(shared->here->keep);
  regions_.push_back({shared->keep, std::move(window)});
  return shared;
}

}  // namespace ark

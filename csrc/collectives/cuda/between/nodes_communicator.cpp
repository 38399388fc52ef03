// How each collective divides into stages in the node and between nodes.
#include "collectives/cuda/between/nodes_communicator.hpp"

#include <algorithm>

namespace ark {

namespace {

// Sums whose copies to all nodes take at most this many bytes go whole, in one hop; broadcasts likewise.
constexpr size_t kWhole = 64 << 10;
constexpr size_t kUnit = 16;  // bytes; parts start at multiples
constexpr size_t kWord = 16;  // of a barrier

size_t unit_of(size_t element) {
  return std::max<size_t>(1, kUnit / element);
}

const std::byte* at(const void* data, size_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}
std::byte* at(void* data, size_t bytes) {
  return static_cast<std::byte*>(data) + bytes;
}

// The operation as its node's ranks see it.
Operation in_node(const Operation& operation, int root = -1) {
  Operation inner = operation;
  inner.descriptor.root = root;
  if (inner.descriptor.op == ReduceOp::avg) inner.descriptor.op = ReduceOp::sum;
  return inner;
}

bool averages(const Operation& operation) {
  return operation.descriptor.op == ReduceOp::avg;
}

}  // namespace

NodesCommunicator::NodesCommunicator(int rank, int size, NodePlan plan, std::shared_ptr<Communicator> node,
                                     std::unique_ptr<BetweenStage> stage)
    : Communicator(rank, size), plan_(std::move(plan)), node_(std::move(node)), stage_(std::move(stage)) {}

bool NodesCommunicator::takes(Kind kind, ReduceOp op, bool even) {
  const bool reduces = kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
  if (reduces && op == ReduceOp::premul_sum) return false;
  return kind != Kind::all_to_all || even;
}

// The range of a tensor that the rank at a place carries between nodes: equal ones, the last with the rest.
ElementRange NodesCommunicator::part(size_t count, int place, size_t element) const {
  const size_t unit = unit_of(element), each = count / places() / unit * unit;
  const size_t begin = each * place;
  return {begin, place == places() - 1 ? count - begin : each};
}

// Adds up the node's inputs. Returns the range of `out` that this rank then has; the rest of it is undefined.
ElementRange NodesCommunicator::sum_in_node(const Operation& operation, const void* in, void* out, size_t count) {
  const size_t element = size_of(operation.descriptor.dtype);
  const ElementRange own = part(count, place(), element);
  if (lone()) return own;
  const Operation inner = in_node(operation);
  const size_t each = part(count, 0, element).count, rest = count - each * places();
  std::vector<const void*> ins(places());
  for (int i = 0; i < places(); ++i) ins[i] = at(in, each * i * element);
  if (each > 0) node_->reduce_scatter(inner, ins.data(), at(out, own.begin * element), each);
  const size_t behind = each * places() * element;
  if (rest > 0) node_->all_reduce(inner, at(in, behind), at(out, behind), rest);
  return own;
}

// Gives the ranks of this node, or the one at place `only`, the parts that each of them has.
void NodesCommunicator::spread_in_node(const Operation& operation, void* data, size_t count, size_t element, int only) {
  if (lone()) return;
  std::vector<Bytes> ins(places(), Bytes{nullptr, 0});
  std::vector<MutableBytes> outs(places(), MutableBytes{nullptr, 0});
  const ElementRange own = part(count, place(), element);
  for (int i = 0; i < places(); ++i) {
    if (i == place()) continue;
    const ElementRange theirs = part(count, i, element);
    if (only < 0 || only == i) ins[i] = {at(data, own.begin * element), own.count * element};
    if (only < 0 || only == place()) outs[i] = {at(data, theirs.begin * element), theirs.count * element};
  }
  node_->all_to_all(in_node(operation), ins.data(), outs.data());
}

// Every rank of a rail gets its node's whole sum to all nodes.
void NodesCommunicator::sum_whole(const Operation& operation, const void* in, void* out, size_t count) {
  const size_t bytes = count * size_of(operation.descriptor.dtype);
  const void* sum = in;
  if (!lone()) {
    node_->all_reduce(in_node(operation), in, out, count);
    sum = out;
  }
  Blocks blocks(nodes());
  for (int node = 0; node < nodes(); ++node)
    blocks.send[node] = sum, blocks.send_bytes[node] = blocks.receive_bytes[node] = bytes;
  blocks.receive[here()] = out;
  stage_->add(operation, blocks, averages(operation));
}

void NodesCommunicator::all_reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const size_t element = size_of(operation.descriptor.dtype);
  if (count == 0) return;
  if (count * element * nodes() <= kWhole) return sum_whole(operation, in, out, count);
  const ElementRange mine = sum_in_node(operation, in, out, count);
  const void* const sums = lone() ? in : out;
  Blocks adding(nodes()), moving(nodes());
  const auto range = [&](int node) {
    const ElementRange within = part_of(mine.count, nodes(), node, unit_of(element));
    return ElementRange{mine.begin + within.begin, within.count};
  };
  const size_t own_bytes = range(here()).count * element;
  std::byte* const own = at(out, range(here()).begin * element);
  for (int node = 0; node < nodes(); ++node) {
    const size_t begin = range(node).begin * element, bytes = range(node).count * element;
    adding.send[node] = at(sums, begin), adding.send_bytes[node] = bytes, adding.receive_bytes[node] = own_bytes;
    moving.send[node] = own, moving.send_bytes[node] = own_bytes;
    moving.receive[node] = at(out, begin), moving.receive_bytes[node] = bytes;
  }
  adding.receive[here()] = own;
  stage_->add(operation, adding, averages(operation));
  stage_->move(operation, moving);
  spread_in_node(operation, out, count, element, -1);
}

// In slices, since ranks other than root have no output to work in.
void NodesCommunicator::reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const size_t element = size_of(operation.descriptor.dtype);
  const int root = operation.descriptor.root, root_node = plan_.node_of(root);
  const size_t most = stage_->scratch_bytes() / element / kUnit * kUnit;
  for (size_t begin = 0; begin < count; begin += most) {
    const size_t slice = std::min(most, count - begin);
    const void* const from = at(in, begin * element);
    void* const to = rank_ == root ? static_cast<void*>(at(out, begin * element)) : scratch();
    const ElementRange mine = sum_in_node(operation, from, to, slice);
    const size_t bytes = mine.count * element;
    Blocks adding(nodes());
    for (int node = 0; node < nodes(); ++node) {
      adding.send[node] = at(lone() ? from : to, mine.begin * element);
      adding.send_bytes[node] = node == root_node ? bytes : 0;
      adding.receive_bytes[node] = here() == root_node ? bytes : 0;
    }
    adding.receive[here()] = at(to, mine.begin * element);
    stage_->add(operation, adding, averages(operation));
    if (here() == root_node) spread_in_node(operation, to, slice, element, plan_.local_of(root));
  }
}

void NodesCommunicator::reduce_scatter(const Operation& operation, const void* const* ins, void* out, size_t count) {
  const size_t element = size_of(operation.descriptor.dtype);
  const size_t most = lone() ? count : stage_->scratch_bytes() / nodes() / element / kUnit * kUnit;
  const Operation inner = in_node(operation);
  std::vector<const void*> parts(places());
  for (size_t begin = 0; begin < count; begin += most) {
    const size_t slice = std::min(most, count - begin), bytes = slice * element;
    Blocks adding(nodes());
    for (int node = 0; node < nodes(); ++node) {
      adding.send_bytes[node] = adding.receive_bytes[node] = bytes;
      adding.send[node] = at(ins[member(node, place())], begin * element);
      if (lone()) continue;
      for (int i = 0; i < places(); ++i) parts[i] = at(ins[member(node, i)], begin * element);
      std::byte* const sum = scratch(node * most * element);
      node_->reduce_scatter(inner, parts.data(), sum, slice);
      adding.send[node] = sum;
    }
    adding.receive[here()] = at(out, begin * element);
    stage_->add(operation, adding, averages(operation));
  }
}

void NodesCommunicator::all_gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  if (bytes == 0) return;
  Blocks moving(nodes());
  for (int node = 0; node < nodes(); ++node) {
    moving.send[node] = in, moving.receive[node] = outs[member(node, place())];
    moving.send_bytes[node] = moving.receive_bytes[node] = bytes;
  }
  stage_->move(operation, moving);
  if (lone()) return;
  std::vector<void*> to(places());
  for (int node = 0; node < nodes(); ++node) {
    for (int i = 0; i < places(); ++i) to[i] = outs[member(node, i)];
    node_->all_gather(in_node(operation), to[place()], to.data(), bytes);
  }
}

// A small one goes by root's rail; of a large one every rail carries a part.
void NodesCommunicator::broadcast(const Operation& operation, void* data, size_t bytes) {
  if (bytes == 0) return;
  const int root = operation.descriptor.root, root_node = plan_.node_of(root), root_place = plan_.local_of(root);
  const bool whole = lone() || bytes <= kWhole;
  const Operation inner = in_node(operation, root_place);
  if (!whole && here() == root_node) {
    std::vector<Bytes> ins(places(), Bytes{nullptr, 0});
    std::vector<MutableBytes> outs(places(), MutableBytes{nullptr, 0});
    for (int i = 0; i < places(); ++i) {
      const ElementRange theirs = part(bytes, i, 1);
      if (rank_ == root && i != place()) ins[i] = {at(data, theirs.begin), theirs.count};
    }
    const ElementRange own = part(bytes, place(), 1);
    if (rank_ != root) outs[root_place] = {at(data, own.begin), own.count};
    node_->all_to_all(inner, ins.data(), outs.data());
  }
  if (!whole || place() == root_place) {
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
  if (whole) return node_->broadcast(inner, data, bytes);
  spread_in_node(operation, data, bytes, 1, -1);
}

void NodesCommunicator::gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  const int root = operation.descriptor.root, root_node = plan_.node_of(root), root_place = plan_.local_of(root);
  const bool collects = here() == root_node;
  const size_t most = lone() ? bytes : stage_->scratch_bytes() / nodes() / kUnit * kUnit;
  std::vector<void*> to(places());
  for (size_t begin = 0; begin < bytes; begin += most) {
    const size_t slice = std::min(most, bytes - begin);
    Blocks moving(nodes());
    for (int node = 0; node < nodes(); ++node) {
      const bool sends = node == root_node && !collects, receives = collects && node != root_node;
      moving.send[node] = at(in, begin);
      if (collects)
        moving.receive[node] = rank_ == root ? at(outs[member(node, place())], begin) : scratch(node * most);
      moving.send_bytes[node] = sends || (collects && node == here()) ? slice : 0;
      moving.receive_bytes[node] = receives || (collects && node == here()) ? slice : 0;
    }
    stage_->move(operation, moving);
    if (!collects || lone()) continue;
    for (int node = 0; node < nodes(); ++node) {
      for (int i = 0; i < places(); ++i) to[i] = rank_ == root ? at(outs[member(node, i)], begin) : nullptr;
      node_->gather(in_node(operation, root_place), moving.receive[node], rank_ == root ? to.data() : nullptr, slice);
    }
  }
}

void NodesCommunicator::scatter(const Operation& operation, const void* const* ins, void* out, size_t bytes) {
  const int root = operation.descriptor.root, root_node = plan_.node_of(root), root_place = plan_.local_of(root);
  const bool gives = here() == root_node;
  const size_t most = lone() ? bytes : stage_->scratch_bytes() / nodes() / kUnit * kUnit;
  std::vector<const void*> from(places());
  for (size_t begin = 0; begin < bytes; begin += most) {
    const size_t slice = std::min(most, bytes - begin);
    Blocks moving(nodes());
    for (int node = 0; node < nodes(); ++node) {
      moving.receive[node] = at(out, begin);
      moving.send[node] = at(out, begin);
      if (gives) moving.send[node] = rank_ == root ? at(ins[member(node, place())], begin) : scratch(node * most);
      moving.send_bytes[node] = gives ? slice : 0;
      moving.receive_bytes[node] = node == root_node ? slice : 0;
      if (!gives || lone()) continue;
      for (int i = 0; i < places(); ++i) from[i] = rank_ == root ? at(ins[member(node, i)], begin) : nullptr;
      // Root's own part goes where the stage takes it from, or nowhere: its input must stay as it is.
      void* const to = scratch(node * most);
      node_->scatter(in_node(operation, root_place), rank_ == root ? from.data() : nullptr, to, slice);
    }
    stage_->move(operation, moving);
  }
}

// First the node's ranks give each other what is for a place of any node, then each rail takes it there.
void NodesCommunicator::all_to_all(const Operation& operation, const Bytes* ins, const MutableBytes* outs) {
  const size_t bytes = ins[rank_].size;
  const size_t most = lone() ? bytes : stage_->scratch_bytes() / size_ / kUnit * kUnit;
  std::vector<Bytes> given(places());
  std::vector<MutableBytes> taken(places());
  for (size_t begin = 0; begin < bytes; begin += most) {
    const size_t slice = std::min(most, bytes - begin);
    const auto kept = [&](int node, int from) { return scratch((size_t{1} * node * places() + from) * most); };
    for (int node = 0; node < nodes() && !lone(); ++node) {
      for (int i = 0; i < places(); ++i) {
        given[i] = {at(ins[member(node, i)].data, begin), slice};
        taken[i] = {kept(node, i), slice};
      }
      node_->all_to_all(in_node(operation), given.data(), taken.data());
    }
    for (int from = 0; from < places(); ++from) {
      Blocks moving(nodes());
      for (int node = 0; node < nodes(); ++node) {
        moving.send[node] = lone() ? at(ins[member(node, 0)].data, begin) : kept(node, from);
        moving.receive[node] = at(outs[member(node, from)].data, begin);
        moving.send_bytes[node] = moving.receive_bytes[node] = slice;
      }
      stage_->move(operation, moving);
    }
  }
}

void NodesCommunicator::barrier(const Operation& operation) {
  const Operation inner = in_node(operation);
  if (!lone()) node_->barrier(inner);
  Blocks moving(nodes());
  for (int node = 0; node < nodes(); ++node) {
    moving.send[node] = scratch();
    moving.receive[node] = scratch(kWord * (1 + node));
    moving.send_bytes[node] = moving.receive_bytes[node] = node == here() ? 0 : kWord;
  }
  stage_->move(operation, moving);
  if (!lone()) node_->barrier(inner);
}

}  // namespace ark

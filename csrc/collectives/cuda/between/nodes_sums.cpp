// How each collective that adds divides into stages in the node and between nodes.
//
// What a rank brings to its rail is, for its part of the tensor, the node's sum; or, where that sum must not be rounded
// yet or all ranks are added in their order, the inputs of all ranks of its node, which an all_to_all in the node has
// brought to its scratch memory. The kernel between nodes then adds them while it fills its slots. A node with more
// ranks than there are rails has a reduce for each of these, in place of a reduce_scatter. What is chosen, and how much
// goes at a time, is alike on all nodes, also on one of a single rank.
#include <algorithm>

#include "collectives/cuda/between/nodes_communicator.hpp"

namespace ark {

namespace {

bool averages(const Operation& operation) {
  return operation.descriptor.op == ReduceOp::avg;
}

size_t padded(size_t bytes) {
  return device::between_padded(bytes);
}

}  // namespace

NodesCommunicator::Brings NodesCommunicator::brings(const Descriptor& descriptor) const {
  const SumOrder& sums = stage_->sums();
  if (flat()) return Brings::sum;  // the only input: the order of nodes is that of ranks
  if (sums.flat && depends_on_order(descriptor)) return Brings::inputs;
  if (!sums.input_partials && has_wide_partials(descriptor)) return Brings::wide_sum;
  return Brings::sum;
}

// Of Brings::sum: whether the node's sum must be taken before the stage between nodes. A single rank among larger nodes
// only multiplies: their sums have done so, too.
bool NodesCommunicator::sums_here(const Operation& operation) const {
  return !lone() || (!flat() && operation.descriptor.op == ReduceOp::premul_sum);
}

// The most bytes that a rank sends to a node for an element.
size_t NodesCommunicator::sent_for(Brings what, DType dtype) const {
  const size_t element = size_of(dtype);
  if (what == Brings::inputs) return element * most_places();
  return what == Brings::sum ? element : element * sizeof(float) / device::scalar_bytes(device::DType(dtype));
}

// How many elements can go at a time if a rail's part of them, from all ranks of its node, must fit. The last part is a
// little larger than the others.
size_t NodesCommunicator::most_at_once(size_t bytes, size_t element) const {
  const size_t larger = size_t{1} * most_places() * (rails() + 1) * kUnit;
  return (bytes - larger) / most_places() * rails() / element / kUnit * kUnit;
}

BetweenStage::Parts NodesCommunicator::inputs_at(size_t offset, size_t stride, Brings what) const {
  BetweenStage::Parts parts;
  parts.brings = what;
  parts.count = places();
  parts.others = scratch(offset), parts.stride = stride;
  parts.at.assign(nodes(), 0);
  return parts;
}

// Adds up the node's inputs. Returns the range that this rank then has in `out`, whose rest is undefined; or in `in`,
// unless sums_here().
ElementRange NodesCommunicator::sum_in_node(const Operation& operation, const void* in, void* out, size_t count) {
  const size_t element = size_of(operation.descriptor.dtype);
  const ElementRange own = part(count, place(), element);
  if (!sums_here(operation)) return own;
  const Operation inner = in_node(operation);
  if (places() > rails()) {
    for (int i = 0; i < rails(); ++i) {
      const ElementRange theirs = part(count, i, element);
      const size_t begin = theirs.begin * element;
      if (theirs.count > 0)
        node_->reduce(in_node(operation, i), at(in, begin), i == place() ? at(out, begin) : nullptr, theirs.count);
    }
    return own;
  }
  const size_t each = part(count, 0, element).count, rest = count - each * places();
  std::vector<const void*> ins(places());
  for (int i = 0; i < places(); ++i) ins[i] = at(in, each * i * element);
  if (each > 0) node_->reduce_scatter(inner, ins.data(), at(out, own.begin * element), each);
  const size_t behind = each * places() * element;
  if (rest > 0) node_->all_reduce(inner, at(in, behind), at(out, behind), rest);
  return own;
}

// Brings this rank its part: as sum_in_node(), or as inputs at the beginning of the scratch memory.
NodesCommunicator::Share NodesCommunicator::share(const Operation& operation, Brings what, const void* in, void* out,
                                                  size_t count) {
  const size_t element = size_of(operation.descriptor.dtype);
  if (what == Brings::sum) {
    const ElementRange own = sum_in_node(operation, in, out, count);
    return {own, at(sums_here(operation) ? out : in, own.begin * element), {}};
  }
  const ElementRange own = part(count, place(), element);
  const size_t stride = padded(own.count * element);
  Messages messages(places());
  for (int i = 0; i < places(); ++i) {
    if (i == place()) continue;
    const ElementRange theirs = part(count, i, element);
    messages.ins[i] = {at(in, theirs.begin * element), theirs.count * element};
    messages.outs[i] = {scratch(i * stride), own.count * element};
  }
  if (!lone()) exchange(operation, messages);
  return {own, at(in, own.begin * element), inputs_at(0, stride, what)};
}

// The operation as the stage between nodes sees it. Where that stage multiplies, all rails get all factors first.
Operation NodesCommunicator::between(const Operation& operation, Brings what) {
  Operation outer = operation;
  if (operation.descriptor.op != ReduceOp::premul_sum) return outer;
  if (what == Brings::sum && !flat()) {
    outer.descriptor.op = ReduceOp::sum;
    return outer;
  }
  constexpr size_t kBytes = device::kFactorStride * sizeof(double);
  stage_->set_factor(operation);
  if (!lone()) {
    std::vector<void*> own(places());
    for (int i = 0; i < places(); ++i) own[i] = stage_->factor(here(), i);
    node_->all_gather(in_node(operation), own[place()], own.data(), kBytes);
  }
  if (!has_rail()) return outer;
  Blocks moving(nodes());
  for (int node = 0; node < nodes(); ++node) {
    moving.send[node] = stage_->factor(here(), 0), moving.receive[node] = stage_->factor(node, 0);
    moving.send_bytes[node] = kBytes * places(), moving.receive_bytes[node] = kBytes * places(node);
  }
  stage_->move(operation, moving);
  return outer;
}

// Every rank of a rail gets its node's whole sum, or inputs, to all nodes; ranks beyond the rails get the result after.
void NodesCommunicator::sum_whole(const Operation& operation, const Operation& outer, Brings what, const void* in,
                                  void* out, size_t count) {
  const size_t bytes = count * size_of(operation.descriptor.dtype);
  Blocks blocks(nodes());
  const void* mine = in;
  if (what != Brings::sum) {
    const size_t stride = padded(bytes);
    std::vector<void*> to(places());
    for (int i = 0; i < places(); ++i) to[i] = i == place() ? const_cast<void*>(in) : scratch(i * stride);
    if (!lone()) node_->all_gather(in_node(operation), in, to.data(), bytes);
    blocks.parts = inputs_at(0, stride, what);
  } else if (sums_here(operation)) {
    node_->all_reduce(in_node(operation), in, out, count);
    mine = out;
  }
  for (int node = 0; node < nodes(); ++node)
    blocks.send[node] = mine, blocks.send_bytes[node] = blocks.receive_bytes[node] = bytes;
  blocks.receive[here()] = out;
  if (has_rail()) stage_->add(outer, blocks, averages(operation));
  if (places() > rails()) node_->broadcast(in_node(operation, 0), out, bytes);
}

void NodesCommunicator::all_reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const DType dtype = operation.descriptor.dtype;
  const size_t element = size_of(dtype);
  if (count == 0) return;
  const Brings what = brings(operation.descriptor);
  const Operation outer = between(operation, what);
  if (count * sent_for(what, dtype) * nodes() <= kWhole) return sum_whole(operation, outer, what, in, out, count);
  const size_t most = what == Brings::sum ? count : most_at_once(stage_->scratch_bytes(), element);
  for (size_t begin = 0; begin < count; begin += most)
    all_reduce_slice(operation, outer, what, at(in, begin * element), at(out, begin * element),
                     std::min(most, count - begin));
}

void NodesCommunicator::all_reduce_slice(const Operation& operation, const Operation& outer, Brings what,
                                         const void* in, void* out, size_t count) {
  const size_t element = size_of(operation.descriptor.dtype);
  Share mine = share(operation, what, in, out, count);
  Blocks adding(nodes()), moving(nodes());
  adding.parts = std::move(mine.parts);
  const auto range = [&](int node) { return part_of(mine.range.count, nodes(), node, unit_of(element)); };
  const size_t own_bytes = range(here()).count * element;
  std::byte* const result = at(out, mine.range.begin * element);
  std::byte* const own = at(result, range(here()).begin * element);
  for (int node = 0; node < nodes(); ++node) {
    const size_t begin = range(node).begin * element, bytes = range(node).count * element;
    adding.send[node] = at(mine.data, begin), adding.send_bytes[node] = bytes, adding.receive_bytes[node] = own_bytes;
    if (what != Brings::sum) adding.parts.at[node] = begin;
    moving.send[node] = own, moving.send_bytes[node] = own_bytes;
    moving.receive[node] = at(result, begin), moving.receive_bytes[node] = bytes;
  }
  adding.receive[here()] = own;
  if (has_rail()) {
    stage_->add(outer, adding, averages(operation));
    stage_->move(operation, moving);
  }
  spread_in_node(operation, out, count, element, -1);
}

// In slices, since ranks other than root have no output to work in. Half of the scratch memory is for inputs, if they
// come, the rest for a result.
void NodesCommunicator::reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const size_t element = size_of(operation.descriptor.dtype), all = stage_->scratch_bytes();
  const int root = operation.descriptor.root, root_node = plan_.node_of(root);
  const Brings what = brings(operation.descriptor);
  const Operation outer = between(operation, what);
  const size_t inputs = what == Brings::sum ? 0 : all / 2 / kUnit * kUnit;
  const size_t most = what == Brings::sum ? all / element / kUnit * kUnit : most_at_once(inputs, element);
  for (size_t begin = 0; begin < count; begin += most) {
    const size_t slice = std::min(most, count - begin);
    void* const to = rank_ == root ? static_cast<void*>(at(out, begin * element)) : scratch(inputs);
    Share mine = share(operation, what, at(in, begin * element), to, slice);
    const size_t bytes = mine.range.count * element;
    Blocks adding(nodes());
    adding.parts = std::move(mine.parts);
    for (int node = 0; node < nodes(); ++node) {
      adding.send[node] = mine.data;
      adding.send_bytes[node] = node == root_node ? bytes : 0;
      adding.receive_bytes[node] = here() == root_node ? bytes : 0;
    }
    adding.receive[here()] = at(to, mine.range.begin * element);
    if (has_rail()) stage_->add(outer, adding, averages(operation));
    if (here() == root_node) spread_in_node(operation, to, slice, element, plan_.local_of(root));
  }
}

// In turns: in each, rails add up the blocks of one place of every node and bring them there.
void NodesCommunicator::reduce_scatter(const Operation& operation, const void* const* ins, void* out, size_t count) {
  const size_t element = size_of(operation.descriptor.dtype);
  const Brings what = brings(operation.descriptor);
  const Operation outer = between(operation, what);
  // Blocks in the scratch memory: of each node, and a result for another place.
  const size_t of_nodes = size_t{1} * nodes() * (what == Brings::sum ? 1 : most_places());
  const size_t most = flat() ? count : stage_->scratch_bytes() / (of_nodes + (turns() > 1)) / element / kUnit * kUnit;
  for (size_t begin = 0; begin < count; begin += most) {
    const size_t slice = std::min(most, count - begin), bytes = slice * element, stride = padded(bytes);
    const auto in = [&](int rank) { return at(ins[rank], begin * element); };
    for (int turn = 0; turn < turns(); ++turn) {
      Blocks adding(nodes());
      if (what != Brings::sum) adding.parts = inputs_at(0, stride, what);
      for (int node = 0; node < nodes(); ++node) {
        const int blocks = in_turn(node, turn), first = turn * rails();
        if (carries(here(), turn)) adding.receive_bytes[node] = bytes;
        if (blocks == 0) continue;
        if (carries(node, turn)) adding.send[node] = in(carried(node, turn)), adding.send_bytes[node] = bytes;
        if (what != Brings::sum) {
          adding.parts.at[node] = size_t{1} * node * places() * stride;
          Messages messages(places());
          for (int i = 0; i < places(); ++i) {
            if (i == place()) continue;
            if (i < blocks) messages.ins[i] = {in(member(node, first + i)), bytes};
            if (carries(node, turn)) messages.outs[i] = {scratch(adding.parts.at[node] + i * stride), bytes};
          }
          if (!lone()) exchange(operation, messages);
          continue;
        }
        if (!sums_here(operation)) continue;
        std::byte* const sum = scratch(node * stride);
        if (carries(node, turn)) adding.send[node] = sum;
        if (blocks == places()) {
          std::vector<const void*> parts(places());
          for (int i = 0; i < places(); ++i) parts[i] = in(member(node, first + i));
          node_->reduce_scatter(in_node(operation), parts.data(), sum, slice);
          continue;
        }
        for (int i = 0; i < blocks; ++i)
          node_->reduce(in_node(operation, i), in(member(node, first + i)), i == place() ? sum : nullptr, slice);
      }
      std::byte* const own = at(out, begin * element);
      std::byte* const result = turn == 0 ? own : scratch(of_nodes * stride);
      adding.receive[here()] = result;
      if (has_rail()) stage_->add(outer, adding, averages(operation));
      hand_over(operation, turn, Way::from_rail, result, own, bytes);
    }
  }
}

}  // namespace ark

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

// The range of a tensor that the rank at a place carries between nodes: equal ones, the last with the rest.
ElementRange NodesCommunicator::part(size_t count, int place, size_t element) const {
  const size_t unit = unit_of(element), each = count / places() / unit * unit;
  const size_t begin = each * place;
  return {begin, place == places() - 1 ? count - begin : each};
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

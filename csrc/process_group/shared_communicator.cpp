// Decides which operations NCCL carries and calls it: raw memory becomes tensors of bytes, or of numbers for sums.
#include "process_group/carriers/nccl_entry.hpp"
#include "process_group/work.hpp"

namespace ark {

namespace {

template <class Options>
Options options_of(const Operation& operation) {
  Options options;
  options.asyncOp = false;  // on the current stream, which is the operation's
  if (operation.context.timeout.count() > 0) options.timeout = operation.context.timeout;
  return options;
}

// For other types NCCL's different order of addition is not worth it.
std::optional<at::ScalarType> summed_type(DType type) {
  switch (type) {
    case DType::f32: return at::kFloat;
    case DType::f64: return at::kDouble;
    case DType::f16: return at::kHalf;
    case DType::bf16: return at::kBFloat16;
    default: return std::nullopt;
  }
}

c10d::ReduceOp op_of(const Operation& operation) {
  return operation.descriptor.op == ReduceOp::avg ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
}

// Adjacent pieces form one buffer.
template <class Pointer>
bool adjacent(Pointer const* places, int size, size_t bytes) {
  for (int r = 1; r < size; ++r)
    if (static_cast<const std::byte*>(places[r]) != static_cast<const std::byte*>(places[0]) + r * bytes) return false;
  return true;
}

}  // namespace

NcclEntry::BackendPtr SharedCommunicator::carrier(Kind kind, uint64_t bytes) const {
  return nccl_.wants(kind, bytes) ? nccl_.backend() : nullptr;
}

NcclEntry::BackendPtr SharedCommunicator::reducer(const Operation& operation, Kind kind, uint64_t bytes) const {
  // NCCL multiplies each input by 1 / n before it adds, which rounds the smallest numbers differently.
  const bool any_order = nccl_.options().dispatch.any_order;
  const bool sum = operation.descriptor.op == ReduceOp::sum || (operation.descriptor.op == ReduceOp::avg && any_order);
  return sum && summed_type(operation.descriptor.dtype) ? carrier(kind, bytes) : nullptr;
}

at::Tensor SharedCommunicator::at(const void* data, size_t count, at::ScalarType type) const {
  const c10::Device device = nccl_.options().device;
  return at::for_blob(const_cast<void*>(data), {static_cast<int64_t>(count)})
      .options(at::TensorOptions().dtype(type).device(device))
      .target_device(device)
      .make_tensor();
}

template <class Pointer>
std::vector<at::Tensor> SharedCommunicator::all_at(Pointer const* places, size_t count, at::ScalarType type) const {
  std::vector<at::Tensor> tensors;
  for (int r = 0; r < size_; ++r) tensors.push_back(at(places[r], count, type));
  return tensors;
}

void SharedCommunicator::carry(c10d::Backend& nccl, Kind kind, const Operation& operation, Call call) {
  ours_.barrier(operation);
  try {
    wait_for(call(nccl));
  } catch (const std::exception& error) {
    // Peers may already be in NCCL's kernels and wait for this rank.
    const Error failure(ErrorKind::system,
                        std::string("PyTorch's NCCL, which carries this operation, failed: ") + error.what(),
                        ErrorContext{rank_, -1, operation.context.name, operation.context.sequence,
                                     "See the cause above; ARK_DISPATCH's nccl_..._from decide what it carries."});
    nccl_.options().fail_group(failure);
    throw failure;
  }
  nccl_.count(kind);
}

void SharedCommunicator::all_reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const auto nccl = reducer(operation, Kind::all_reduce, count * size_of(operation.descriptor.dtype));
  if (!nccl) return ours_.all_reduce(operation, in, out, count);
  const at::ScalarType type = *summed_type(operation.descriptor.dtype);
  std::vector<at::Tensor> tensors{at(out, count, type)};
  carry(*nccl, Kind::all_reduce, operation, [&](c10d::Backend& backend) {
    if (in != out) tensors[0].copy_(at(in, count, type), true);
    auto options = options_of<c10d::AllreduceOptions>(operation);
    options.reduceOp = op_of(operation);
    return backend.allreduce(tensors, options);
  });
}

void SharedCommunicator::reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const auto nccl = reducer(operation, Kind::reduce, count * size_of(operation.descriptor.dtype));
  if (!nccl) return ours_.reduce(operation, in, out, count);
  const at::ScalarType type = *summed_type(operation.descriptor.dtype);
  const bool root = rank_ == operation.descriptor.root;
  std::vector<at::Tensor> tensors{at(root ? out : in, count, type)};  // NCCL writes only at root
  carry(*nccl, Kind::reduce, operation, [&](c10d::Backend& backend) {
    if (root && in != out) tensors[0].copy_(at(in, count, type), true);
    auto options = options_of<c10d::ReduceOptions>(operation);
    options.reduceOp = op_of(operation);
    options.rootRank = operation.descriptor.root;
    return backend.reduce(tensors, options);
  });
}

void SharedCommunicator::reduce_scatter(const Operation& operation, const void* const* ins, void* out, size_t count) {
  const size_t bytes = count * size_of(operation.descriptor.dtype);
  const auto nccl = reducer(operation, Kind::reduce_scatter, bytes * size_);
  if (!nccl) return ours_.reduce_scatter(operation, ins, out, count);
  const at::ScalarType type = *summed_type(operation.descriptor.dtype);
  carry(*nccl, Kind::reduce_scatter, operation, [&](c10d::Backend& backend) {
    auto options = options_of<c10d::ReduceScatterOptions>(operation);
    options.reduceOp = op_of(operation);
    at::Tensor output = at(out, count, type);
    if (adjacent(ins, size_, bytes)) {
      at::Tensor input = at(ins[0], count * size_, type);
      return backend._reduce_scatter_base(output, input, options);
    }
    std::vector<at::Tensor> outputs{output};
    std::vector<std::vector<at::Tensor>> inputs{all_at(ins, count, type)};
    return backend.reduce_scatter(outputs, inputs, options);
  });
}

void SharedCommunicator::all_gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  const auto nccl = carrier(Kind::all_gather, bytes * size_);
  if (!nccl) return ours_.all_gather(operation, in, outs, bytes);
  carry(*nccl, Kind::all_gather, operation, [&](c10d::Backend& backend) {
    const auto options = options_of<c10d::AllgatherOptions>(operation);
    at::Tensor input = at(in, bytes);
    if (adjacent(outs, size_, bytes)) {
      at::Tensor output = at(outs[0], bytes * size_);
      return backend._allgather_base(output, input, options);
    }
    std::vector<at::Tensor> inputs{input};
    std::vector<std::vector<at::Tensor>> outputs{all_at(outs, bytes)};
    return backend.allgather(outputs, inputs, options);
  });
}

void SharedCommunicator::broadcast(const Operation& operation, void* data, size_t bytes) {
  const auto nccl = carrier(Kind::broadcast, bytes);
  if (!nccl) return ours_.broadcast(operation, data, bytes);
  carry(*nccl, Kind::broadcast, operation, [&](c10d::Backend& backend) {
    auto options = options_of<c10d::BroadcastOptions>(operation);
    options.rootRank = operation.descriptor.root;
    std::vector<at::Tensor> tensors{at(data, bytes)};
    return backend.broadcast(tensors, options);
  });
}

void SharedCommunicator::all_to_all(const Operation& operation, const Bytes* ins, const MutableBytes* outs) {
  const size_t bytes = even_ ? ins[0].size : 0;
  const auto nccl = carrier(Kind::all_to_all, bytes * size_);
  if (!nccl) return ours_.all_to_all(operation, ins, outs);
  carry(*nccl, Kind::all_to_all, operation, [&](c10d::Backend& backend) {
    // Even blocks are parts of one tensor.
    at::Tensor input = at(ins[0].data, bytes * size_), output = at(outs[0].data, bytes * size_);
    std::vector<int64_t> equal;
    return backend.alltoall_base(output, input, equal, equal, options_of<c10d::AllToAllOptions>(operation));
  });
}

void SharedCommunicator::gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  ours_.gather(operation, in, outs, bytes);
}

void SharedCommunicator::scatter(const Operation& operation, const void* const* ins, void* out, size_t bytes) {
  ours_.scatter(operation, ins, out, bytes);
}

void SharedCommunicator::barrier(const Operation& operation) {
  ours_.barrier(operation);
}

}  // namespace ark

// Collectives made of another backend's byte movements and ark's own arithmetic.
#include "process_group/carried_communicator.hpp"

#include <cstring>

#include "collectives/agreement.hpp"
#include "collectives/reduce.hpp"
#include "error.hpp"

namespace ark {

namespace {

at::Tensor bytes_at(void* data, size_t bytes) {
  return at::from_blob(data, {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
}
at::Tensor bytes_at(const void* data, size_t bytes) {
  return bytes_at(const_cast<void*>(data), bytes);
}
at::Tensor fresh(size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
}
std::byte* pointer(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

template <class Options>
Options with_timeout(const Operation& operation) {
  Options options;
  if (operation.context.timeout.count() > 0) options.timeout = operation.context.timeout;
  return options;
}

void wait(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

}  // namespace

// Whatever the carrier throws becomes an error of this group, with the operation and a remedy.
template <class Body>
void CarriedCommunicator::guarded(const Operation& operation, Body&& body) {
  try {
    check_agreement(operation);
    body();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const bool late = Clock::now() >= operation.context.deadline;
    throw Error(late ? ErrorKind::timeout : ErrorKind::peer_lost,
                carrier_->getBackendName() + ", which carries this group, failed: " + error.what(),
                ErrorContext{rank_, -1, operation.context.name, operation.context.sequence,
                             "Look at the other ranks' output; destroy the process group (or restart the job) before "
                             "going on."});
  }
}

// The first thing that every collective exchanges, as over shared memory: what each rank believes it is in.
void CarriedCommunicator::check_agreement(const Operation& operation) {
  at::Tensor all = fresh(sizeof(Descriptor) * size_);
  at::Tensor mine = bytes_at(&operation.descriptor, sizeof(Descriptor));
  wait(carrier_->_allgather_base(all, mine, with_timeout<c10d::AllgatherOptions>(operation)));
  for (int peer = 0; peer < size_; ++peer) {
    Descriptor theirs;
    std::memcpy(&theirs, pointer(all) + peer * sizeof theirs, sizeof theirs);
    if (const auto error = disagreement(operation, theirs, rank_, peer)) throw *error;
  }
}

at::Tensor CarriedCommunicator::exchange(const Operation& operation, const at::Tensor& padded) {
  at::Tensor received = at::empty_like(padded), sent = padded;
  std::vector<int64_t> equal;
  wait(carrier_->alltoall_base(received, sent, equal, equal, with_timeout<c10d::AllToAllOptions>(operation)));
  return received;
}

void CarriedCommunicator::reduce_parts(const Operation& operation, const void* parts, size_t stride, void* out,
                                       size_t count) {
  std::vector<const void*> sources(size_);
  for (int r = 0; r < size_; ++r) sources[r] = static_cast<const std::byte*>(parts) + r * stride;
  std::vector<double> factors(size_, 1.0);
  if (operation.descriptor.op == ReduceOp::premul_sum) {
    at::Tensor all = bytes_at(factors.data(), sizeof(double) * size_);
    at::Tensor mine = bytes_at(&operation.factor, sizeof(double));
    wait(carrier_->_allgather_base(all, mine, with_timeout<c10d::AllgatherOptions>(operation)));
  }
  find_reduce(operation.descriptor.dtype, operation.descriptor.op)(
      out, nullptr, sources.data(), size_, count,
      operation.descriptor.op == ReduceOp::premul_sum ? factors.data() : nullptr);
}

void CarriedCommunicator::all_reduce(const Operation& operation, const void* in, void* out, size_t count) {
  guarded(operation, [&] {
    if (count == 0) return;
    const size_t element = size_of(operation.descriptor.dtype);
    const size_t each = (count + size_ - 1) / size_;
    at::Tensor padded = at::zeros({static_cast<int64_t>(each * element * size_)}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(pointer(padded), in, count * element);
    at::Tensor received = exchange(operation, padded);
    at::Tensor part = fresh(each * element);
    reduce_parts(operation, pointer(received), each * element, pointer(part), each);
    wait(carrier_->_allgather_base(padded, part, with_timeout<c10d::AllgatherOptions>(operation)));
    std::memcpy(out, pointer(padded), count * element);
  });
}

void CarriedCommunicator::reduce(const Operation& operation, const void* in, void* out, size_t count) {
  guarded(operation, [&] {
    if (count == 0) return;
    const size_t bytes = count * size_of(operation.descriptor.dtype);
    at::Tensor all = fresh(bytes * size_), mine = bytes_at(in, bytes);
    wait(carrier_->_allgather_base(all, mine, with_timeout<c10d::AllgatherOptions>(operation)));
    at::Tensor scratch = out ? at::Tensor() : fresh(bytes);
    reduce_parts(operation, pointer(all), bytes, out ? out : pointer(scratch), count);
  });
}

void CarriedCommunicator::reduce_scatter(const Operation& operation, const void* const* ins, void* out, size_t count) {
  guarded(operation, [&] {
    if (count == 0) return;
    const size_t bytes = count * size_of(operation.descriptor.dtype);
    at::Tensor packed = fresh(bytes * size_);
    for (int r = 0; r < size_; ++r) std::memcpy(pointer(packed) + r * bytes, ins[r], bytes);
    at::Tensor received = exchange(operation, packed);
    reduce_parts(operation, pointer(received), bytes, out, count);
  });
}

void CarriedCommunicator::all_gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  guarded(operation, [&] {
    if (bytes == 0) return;
    at::Tensor all = fresh(bytes * size_), mine = bytes_at(in, bytes);
    wait(carrier_->_allgather_base(all, mine, with_timeout<c10d::AllgatherOptions>(operation)));
    for (int r = 0; r < size_; ++r) std::memcpy(outs[r], pointer(all) + r * bytes, bytes);
  });
}

void CarriedCommunicator::broadcast(const Operation& operation, void* data, size_t bytes) {
  guarded(operation, [&] {
    if (bytes == 0) return;
    auto options = with_timeout<c10d::BroadcastOptions>(operation);
    options.rootRank = operation.descriptor.root;
    std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
    wait(carrier_->broadcast(tensors, options));
  });
}

void CarriedCommunicator::gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  guarded(operation, [&] {
    if (bytes == 0) return;
    auto options = with_timeout<c10d::GatherOptions>(operation);
    options.rootRank = operation.descriptor.root;
    std::vector<at::Tensor> inputs{bytes_at(in, bytes)};
    std::vector<std::vector<at::Tensor>> outputs;
    if (operation.descriptor.root == rank_) {
      outputs.emplace_back();
      for (int r = 0; r < size_; ++r) outputs[0].push_back(bytes_at(outs[r], bytes));
    }
    wait(carrier_->gather(outputs, inputs, options));
  });
}

void CarriedCommunicator::scatter(const Operation& operation, const void* const* ins, void* out, size_t bytes) {
  guarded(operation, [&] {
    if (bytes == 0) return;
    auto options = with_timeout<c10d::ScatterOptions>(operation);
    options.rootRank = operation.descriptor.root;
    std::vector<at::Tensor> outputs{bytes_at(out, bytes)};
    std::vector<std::vector<at::Tensor>> inputs;
    if (operation.descriptor.root == rank_) {
      inputs.emplace_back();
      for (int r = 0; r < size_; ++r) inputs[0].push_back(bytes_at(ins[r], bytes));
    }
    wait(carrier_->scatter(outputs, inputs, options));
  });
}

void CarriedCommunicator::all_to_all(const Operation& operation, const Bytes* ins, const MutableBytes* outs) {
  guarded(operation, [&] {
    std::vector<int64_t> sends, receives, promised(size_);
    int64_t out_bytes = 0, in_bytes = 0;
    for (int r = 0; r < size_; ++r) {
      sends.push_back(static_cast<int64_t>(ins[r].size));
      receives.push_back(static_cast<int64_t>(outs[r].size));
      in_bytes += sends.back();
      out_bytes += receives.back();
    }
    // Sizes first: what the peers send must be what this rank expects, and the carrier would not say.
    at::Tensor row = at::from_blob(sends.data(), {size_}, at::kLong),
               column = at::from_blob(promised.data(), {size_}, at::kLong);
    std::vector<int64_t> equal;
    const auto options = with_timeout<c10d::AllToAllOptions>(operation);
    wait(carrier_->alltoall_base(column, row, equal, equal, options));
    for (int r = 0; r < size_; ++r) {
      if (const auto error = broken_promise(operation, rank_, r, rank_, promised[r], receives[r])) throw *error;
    }
    at::Tensor packed = fresh(in_bytes), received = fresh(out_bytes);
    std::byte* cursor = pointer(packed);
    for (int r = 0; r < size_; cursor += ins[r++].size) {
      if (ins[r].size > 0) std::memcpy(cursor, ins[r].data, ins[r].size);
    }
    wait(carrier_->alltoall_base(received, packed, receives, sends, options));
    const std::byte* source = pointer(received);
    for (int r = 0; r < size_; source += outs[r++].size) {
      if (outs[r].size > 0) std::memcpy(outs[r].data, source, outs[r].size);
    }
  });
}

void CarriedCommunicator::barrier(const Operation& operation) {
  guarded(operation, [&] { wait(carrier_->barrier(with_timeout<c10d::BarrierOptions>(operation))); });
}

}  // namespace ark

// send, recv and recvAnysource. They bypass the queue of collectives, so neither waits for the other.
//
// Over shared memory, a Transfer finishes on the thread that made its last progress; its callbacks run on a progress
// thread. A carried group passes the tensors to its carrier and follows the carrier's work.
#include <ATen/core/LegacyTypeDispatch.h>

#include "process_group/carriers/carried_messages.hpp"
#include "process_group/cuda/cuda_group.hpp"
#include "process_group/cuda/work_cuda.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark {

ProcessGroupArk::WorkPtr ProcessGroupArk::transfer(Tensors& tensors, int peer, int tag, bool is_send, bool any_source) {
  return with_torch_errors([&]() -> WorkPtr {
    const CallSite here = site(is_send ? "send" : "recv");
    const at::Tensor& tensor = only(here, "tensor", tensors);
    if (!any_source) {
      check_rank(here, is_send ? "dst" : "src", peer, size_);
      if (peer == rank_ && tensor.is_cuda()) return transfer_to_self(here, tensor, is_send);
      if (peer == rank_) {
        refuse(here, ErrorKind::invalid_argument,
               std::string(is_send ? "dst" : "src") + " is this rank, " + std::to_string(rank_),
               "Copy the tensor, or name another rank.");
      }
    }
    if (tag < 0) {
      refuse(here, ErrorKind::invalid_argument, "tag is " + std::to_string(tag), "Use a tag of zero or more.");
    }
    if (!core_->shm && !tensor.is_cuda() && tag >= kFirstReservedTag) {
      refuse(here, ErrorKind::invalid_argument,
             "tag is " + std::to_string(tag) + ", and collectives of a group that another backend carries use it",
             "Use a tag below " + std::to_string(kFirstReservedTag) + ".");
    }
    if (any_source && tensor.is_cuda()) {
      refuse(here, ErrorKind::invalid_argument,
             "src is not given, and a CUDA tensor cannot be received from any source",
             "Name the source, as with NCCL, or receive into a CPU tensor.");
    }
    const auto type = is_send ? c10d::OpType::SEND : any_source ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
    const uint64_t number = core_->p2p_sequence.fetch_add(1) + 1;
    const int named_peer = any_source ? -1 : peer;
    const Call call{.type = type,
                    .name = here.operation,
                    .event = here.operation,
                    .timeout = c10d::kUnsetTimeout,
                    .async = true,
                    .peer = named_peer,
                    .inputs = tensors,
                    .outputs = tensors,
                    .carry = [&](c10d::Backend& carrier) {
                      return is_send ? carrier.send(tensors, peer, tag) : carrier.recv(tensors, peer, tag);
                    }};
    const CommsRecord event(comms(), call, number);
    FlightEntry entry = flight_entry(call);
    entry.peer = named_peer;
    entry.tag = tag;
    entry.is_p2p = true;
    entry.sequence = core_->sequence.load();
    entry.p2p_sequence = next_message(is_send, named_peer, tag);
    (is_send ? entry.outputs : entry.inputs) = FlightSizes();  // one side of a message has one tensor
    if (tensor.is_cuda()) return transfer_cuda(call, entry, number);
    entry.state = FlightState::started;
    auto work = make_work(type, here.operation, tensors);
    work->source_rank = named_peer;
    describe(call, {}, entry, work->operation);
    work->operation.context.sequence = number;
    core_->number(work->operation, entry);
    auto target = std::make_shared<Output>(is_send ? Output() : Output(here, "tensor", tensor));
    auto source = std::make_shared<Input>(is_send ? Input(tensor) : Input());
    if (!core_->shm) {
      // The carrier gets bytes, because it supports fewer dtypes than ark. source and target keep them alive.
      Tensors memory{at::from_blob(is_send ? const_cast<void*>(source->data()) : target->data(),
                                   {static_cast<int64_t>(tensor.nbytes())}, at::TensorOptions().dtype(at::kByte))};
      WorkPtr carried = is_send      ? core_->carrier->send(memory, peer, tag)
                        : any_source ? core_->carrier->recvAnysource(memory, tag)
                                     : core_->carrier->recv(memory, peer, tag);
      follow(
          work, {carried},
          [raw = work.get(), carried, target, source, any_source, is_send] {
            if (any_source) raw->source_rank = carried->sourceRank();
            if (!is_send) target->commit();
          },
          core_->executor);
      return collect(work);
    }
    auto moving = std::make_shared<Transfer>();
    moving->is_send = is_send;
    moving->peer = any_source ? kAnySource : peer;
    moving->tag = tag;
    moving->data = is_send ? const_cast<void*>(source->data()) : target->data();
    moving->bytes = tensor.nbytes();
    moving->context = core_->context(here.operation, number, work->operation.asked);
    // The transfer holds the work and its tensors until it is done; the work holds the transfer to wait for it.
    moving->done = [work, core = core_, raw = moving.get(), target, source, is_send](std::exception_ptr error) {
      if (!error && !is_send) {
        work->source_rank = raw->source;
        try {
          target->commit();
        } catch (...) {
          error = std::current_exception();
        }
      }
      work->finish(error);
      if (auto settlement = work->take_settlement()) core->executor->defer(std::move(settlement));
    };
    work->wait_elsewhere = [core = core_.get(), moving](Clock::time_point until) {
      return core->shm->point_to_point().wait(*moving, until);
    };
    core_->shm->point_to_point().post(moving);
    return collect(work);
  });
}

// A send to this rank within a batch: a copy on the later call's stream, ordered after both calls. As with NCCL, the
// n-th send to oneself matches the n-th recv, and the batch's work covers the copy. No other rank takes part, so if the
// group has no side on the device yet, the work gets one of its own.
ProcessGroupArk::WorkPtr ProcessGroupArk::transfer_to_self(const CallSite& site, const at::Tensor& tensor,
                                                           bool is_send) {
  const c10::Stream current = current_stream(tensor.device());
  std::optional<SelfEnd> other;
  std::unique_lock lock(mutex_);
  const auto batch = coalescing_.find(std::this_thread::get_id());
  if (batch == coalescing_.end()) {
    refuse(site, ErrorKind::invalid_argument,
           std::string(is_send ? "dst" : "src") + " is this rank, " + std::to_string(rank_),
           "Send to it and receive from it in one batch_isend_irecv, copy the tensor, or name another rank.");
  }
  const auto type = is_send ? c10d::OpType::SEND : c10d::OpType::RECV;
  auto& [works, sends, recvs, carrier] = batch->second;
  auto& counterparts = is_send ? recvs : sends;
  if (counterparts.empty()) {
    auto issued = std::make_shared<c10::Event>(c10::DeviceType::CUDA);
    issued->record(current);
    (is_send ? sends : recvs).push_back({tensor, current, std::move(issued)});
    auto work = make_work(type, site.operation, Tensors{tensor});
    work->finish(nullptr);  // nothing to wait for yet
    return work;
  }
  other = std::move(counterparts.front());
  counterparts.pop_front();
  lock.unlock();
  const at::Tensor &from = is_send ? tensor : other->tensor, &to = is_send ? other->tensor : tensor;
  if (from.nbytes() != to.nbytes() || from.scalar_type() != to.scalar_type()) {
    refuse(site, ErrorKind::mismatch,
           "this rank sends " + std::to_string(from.nbytes()) + " bytes to itself and receives " +
               std::to_string(to.nbytes()),
           "Give both ends the same size and dtype.");
  }
  auto cuda = core_->cuda() ? cuda_side(site.operation, tensor.device())
                            : std::make_shared<CudaGroup>(tensor.device(), std::unique_ptr<CudaCommunicator>());
  const uint64_t capture = capture_of(current);
  SharedEvent start;
  if (core_->timing.load(std::memory_order_relaxed) && capture == 0) {
    start = cuda->events().take(false, true);
    start->record(current);
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;  // a message is no computation, so it has no gradient
    if (other->stream != current) {
      other->issued->block(current);
      other->tensor.record_stream(current);
    }
    raise_version(to);
    at::Tensor(to).copy_(from.sizes() == to.sizes() ? from : from.reshape(to.sizes()), true);
  }
  auto copied = cuda->mark(type, site.operation, core_->p2p_sequence.load(), std::move(start));
  auto work = c10::make_intrusive<CudaWork>(core_, std::move(cuda), type, site.operation, Tensors{to},
                                            CudaWork::Parts{std::move(copied)});
  work->source_rank = rank_;
  return collect(std::move(work));
}

uint64_t ProcessGroupArk::next_message(bool is_send, int peer, int tag) {
  std::lock_guard lock(mutex_);
  return ++messages_[{is_send, peer, tag}];
}

ProcessGroupArk::WorkPtr ProcessGroupArk::send(Tensors& tensors, int destination, int tag) {
  return transfer(tensors, destination, tag, true, false);
}

ProcessGroupArk::WorkPtr ProcessGroupArk::recv(Tensors& tensors, int source, int tag) {
  return transfer(tensors, source, tag, false, false);
}

ProcessGroupArk::WorkPtr ProcessGroupArk::recvAnysource(Tensors& tensors, int tag) {
  return transfer(tensors, 0, tag, false, true);
}

}  // namespace ark

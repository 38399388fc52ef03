// Makes streams and host threads wait for works on the device.
#include "process_group/cuda/work_cuda.hpp"

#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <thread>

#include "process_group/group_core.hpp"

namespace ark {

namespace {

// Extra time beyond the operation's timeout, for earlier work on its stream. By then the device has given up.
constexpr auto kSlack = std::chrono::seconds(5);

}  // namespace

CudaWork::CudaWork(std::shared_ptr<GroupCore> core, std::shared_ptr<CudaGroup> cuda, c10d::OpType type,
                   const char* name, std::vector<at::Tensor> outputs, Parts parts)
    : Work(core->rank, type),
      core_(std::move(core)),
      cuda_(std::move(cuda)),
      name_(name),
      sequence_(parts.empty() ? 0 : parts.back()->sequence()),
      outputs_(std::move(outputs)),
      parts_(std::move(parts)) {}

CudaWork::~CudaWork() {
  if (released_) return;
  for (const auto& part : parts_) cuda_->abandon(*part);
}

bool CudaWork::done() const {
  if (host_part && !host_part->isCompleted()) return false;
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->done(); });
}

std::exception_ptr CudaWork::failure() const {
  std::exception_ptr error;
  try {
    if (done()) return host_part ? host_part->exception() : nullptr;
  } catch (...) {
    return std::current_exception();  // the device failed
  }
  return cuda_->failed(context(), error) ? to_torch(error) : nullptr;
}

bool CudaWork::isCompleted() {
  try {
    if (done()) return true;
  } catch (const std::exception&) {
    return true;
  }
  return failure() != nullptr;
}

bool CudaWork::isSuccess() const {
  try {
    return done() && !failure();
  } catch (const std::exception&) {
    return false;
  }
}

std::exception_ptr CudaWork::exception() const {
  return failure();
}

std::chrono::milliseconds CudaWork::getTimeout() const {
  return timeout.count() >= 0 ? timeout : std::chrono::milliseconds(core_->timeout_ms.load());
}

int CudaWork::sourceRank() const {
  TORCH_CHECK(opType_ == c10d::OpType::RECV, "ark: [rank ", rank_, "] sourceRank() is for the work of a recv");
  return source_rank;
}

void CudaWork::wait_streams(const c10::Stream& current) {
  std::optional<uint64_t> capture;
  for (const auto& part : parts_) {
    if (part->on == current) continue;  // the stream's own order suffices
    if (!capture) capture = capture_of(current);
    if (part->capture == *capture) {
      part->end->block(current);
    } else if (part->capture == 0) {
      throw Error(ErrorKind::invalid_argument,
                  "wait() under graph capture for an operation that was issued before the capture began",
                  ErrorContext{rank_, -1, name_, sequence_, "Wait for it before capture begins."});
    }  // the graph orders a captured operation, wherever it is replayed
  }
}

void CudaWork::wait_host(std::chrono::milliseconds given) {
  const bool own_timeout = given.count() > 0;
  const OperationContext operation = core_->context(name_, sequence_, own_timeout ? given : timeout);
  const auto until =
      own_timeout || operation.deadline == Clock::time_point::max() ? operation.deadline : operation.deadline + kSlack;
  const auto began = Clock::now();
  while (!done()) {
    cuda_->check(operation);
    const auto now = Clock::now();
    if (now >= until) {
      throw Error(ErrorKind::timeout,
                  "the device was not done after " +
                      std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(now - began).count()) +
                      " ms; the operation goes on",
                  ErrorContext{rank_, -1, name_, sequence_,
                               "Wait again, wait longer, or see what runs before it on its stream."});
    }
    // Most waits are short, but a long one must not occupy a core.
    if (now - began < std::chrono::microseconds(200)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(now - began < std::chrono::milliseconds(20) ? 20 : 200));
    }
  }
}

void CudaWork::release(const c10::Stream& current) {
  {
    const std::lock_guard lock(mutex_);
    if (released_) return;
    released_ = true;
  }
  // The issuing stream now waits for the operation, so its next allocation may reuse the memory. If another stream
  // waits, the issuer's next allocation could come too early.
  for (const auto& part : parts_) {
    if (part->issuer == current) {
      part->release();
    } else {
      cuda_->abandon(*part);
    }
  }
}

void CudaWork::synchronize() {
  with_torch_errors([&] {
    const c10::Stream current = current_stream(cuda_->device);
    wait_streams(current);
    release(current);
  });
  Work::synchronize();  // unregisters work that a compiled graph may hold
}

bool CudaWork::wait(std::chrono::milliseconds given) {
  if (host_part) host_part->wait(given);
  with_torch_errors([&] {
    check_group();
    if (blocks_host || given.count() > 0) {
      wait_host(given);
      check_group();  // a kernel that gave up has ended too
      cuda_->look();
    }
  });
  synchronize();
  return true;
}

void CudaWork::check_group() {
  try {
    cuda_->check(context());
  } catch (const Error& error) {
    for (const auto& part : parts_) FlightRecord::instance().failed(part->flight, error.what());
    throw;
  }
}

void CudaWork::abort() {
  core_->abort("the work was aborted");
}

c10::intrusive_ptr<c10::ivalue::Future> CudaWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{cuda_->device});
  // Completing the future records events on the current streams. They cover the operation and anything enqueued since,
  // which is nothing if the caller asks for the future at once.
  const c10::OptionalDeviceGuard on_device(cuda_->device);
  std::optional<c10::StreamGuard> on_stream;
  if (!parts_.empty()) {
    // Prefer a line's own stream. An issuer's stream belongs to the caller and should not wait here.
    const auto own = std::find_if(parts_.rbegin(), parts_.rend(), [](auto& part) { return part->on != part->issuer; });
    const c10::Stream stream = *(own != parts_.rend() ? (*own)->on : parts_.back()->on);
    on_stream.emplace(stream);
    for (const auto& part : parts_) {
      if (part->on != stream) part->end->block(stream);
    }
  }
  if (const auto error = failure()) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> CudaWork::getFutureResult() {
  const std::lock_guard lock(mutex_);
  if (future_result_) return future_result_;
  future_result_ = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
  auto self = c10::intrusive_ptr<CudaWork>::unsafe_reclaim_from_nonowning(this);
  core_->executor->defer([self, future = future_result_] {
    auto result = c10d::WorkResult::SUCCESS;
    try {
      self->wait_host(kNoTimeout);
      self->cuda_->check(self->context());
    } catch (const Error& error) {
      result = error.kind() == ErrorKind::timeout ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::COMM_ERROR;
    } catch (const std::exception&) {
      result = c10d::WorkResult::COMM_ERROR;
    }
    future->markCompleted(static_cast<int64_t>(result));
  });
  return future_result_;
}

float CudaWork::getDuration() const {
  TORCH_CHECK(!parts_.empty() && parts_.front()->start, "ark: [rank ", rank_,
              "] getDuration() of an operation on CUDA tensors needs timing: set ARK_TIMING=1, or call "
              "_enable_collectives_timing() on the group before it is issued (captured operations have none)");
  TORCH_CHECK(done(), "ark: [rank ", rank_, "] getDuration() before the work is complete");
  return static_cast<float>(parts_.front()->start->elapsedTime(*parts_.back()->end));
}

c10::intrusive_ptr<c10d::Work> join_cuda(const std::shared_ptr<GroupCore>& core,
                                         const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  CudaWork::Parts parts;
  std::vector<at::Tensor> outputs;
  std::shared_ptr<CudaGroup> cuda;
  std::chrono::milliseconds timeout{-1};
  bool blocks_host = false;
  for (const auto& work : works) {
    auto* on_device = dynamic_cast<CudaWork*>(work.get());
    if (on_device == nullptr) continue;
    cuda = on_device->cuda_;
    parts.insert(parts.end(), on_device->parts_.begin(), on_device->parts_.end());
    outputs.insert(outputs.end(), on_device->outputs_.begin(), on_device->outputs_.end());
    timeout = std::max(timeout, on_device->timeout);
    blocks_host |= on_device->blocks_host;
    if (on_device->host_part) on_device->host_part->wait();
    const std::lock_guard lock(on_device->mutex_);
    on_device->released_ = true;  // the joined work keeps the tensors
  }
  if (!cuda) return nullptr;
  bool waited = false;
  for (const auto& work : works) {
    if (dynamic_cast<CudaWork*>(work.get()) != nullptr) continue;
    work->wait();
    waited = true;
  }
  // Only the current stream waited for the carrier's works, but another stream may wait for the joined work.
  if (waited) {
    const uint64_t sequence = parts.empty() ? 0 : parts.back()->sequence();
    parts.push_back(cuda->mark(c10d::OpType::COALESCED, "coalesced", sequence));
  }
  auto joined = c10::make_intrusive<CudaWork>(core, cuda, c10d::OpType::COALESCED, "coalesced", std::move(outputs),
                                              std::move(parts));
  joined->timeout = timeout;
  joined->blocks_host = blocks_host;
  return joined;
}

}  // namespace ark

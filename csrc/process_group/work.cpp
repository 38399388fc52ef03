// Waiting, completion and futures of a work, and works that stand for others.
#include "process_group/work.hpp"

#include <ATen/core/ivalue.h>

#include "process_group/group_core.hpp"
#include "process_group/translate.hpp"

namespace ark {

WorkArk::WorkArk(std::shared_ptr<GroupCore> core, c10d::OpType type, const char* name, std::vector<at::Tensor> outputs)
    : Work(core->rank, type),
      core_(std::move(core)),
      outputs_(std::move(outputs)),
      group_timeout_(core_->timeout_ms.load(std::memory_order_relaxed)) {
  operation.type = type;
  operation.context.name = name;
}

bool WorkArk::isSuccess() const {
  return done() && !error_;
}
std::exception_ptr WorkArk::exception() const {
  return done() ? error_ : nullptr;
}

int WorkArk::sourceRank() const {
  TORCH_CHECK(opType_ == c10d::OpType::RECVANYSOURCE || opType_ == c10d::OpType::RECV, "ark: [rank ", rank_,
              "] sourceRank() is for the work of a recv");
  return source_rank;
}

std::chrono::milliseconds WorkArk::getTimeout() const {
  return operation.asked.count() >= 0 ? operation.asked : group_timeout_;
}

void WorkArk::synchronize() {
  wait();
}

bool WorkArk::wait(std::chrono::milliseconds timeout) {
  if (!done()) {
    // Without its own timeout the wait ends with the operation, whose deadline bounds it.
    const bool own_timeout = timeout.count() > 0;
    const auto until =
        own_timeout && timeout < std::chrono::hours(24 * 365) ? Clock::now() + timeout : Clock::time_point::max();
    const bool finished = wait_elsewhere ? wait_elsewhere(until) : core_->executor->await(*this, until, !own_timeout);
    if (!finished || !done()) {
      throw_torch(Error(ErrorKind::timeout,
                        "wait() gave up after " + std::to_string(timeout.count()) + " ms; the operation goes on",
                        ErrorContext{rank_, -1, operation.name(), operation.sequence(),
                                     "Wait again, wait longer, or abort the group."}));
    }
  }
  if (error_) std::rethrow_exception(error_);
  Work::synchronize();  // unregisters work that a compiled graph may hold
  return true;
}

void WorkArk::abort() {
  core_->abort("the work was aborted");
}

void WorkArk::execute() {
  started_ = Clock::now();
  FlightRecord::instance().started(operation.flight);
  std::exception_ptr error;
  try {
    operation.context = core_->context(operation.name(), operation.sequence(), operation.asked);
    operation.held.first(*core_->communicator, operation);
  } catch (const Error& own) {
    error = std::make_exception_ptr(own.at(rank_, operation.name(), operation.sequence()));
  } catch (...) {
    error = std::current_exception();
  }
  finish(error);
}

void WorkArk::finish(std::exception_ptr error) {
  finished_ = Clock::now();
  if (started_ == Clock::time_point{}) started_ = finished_;
  if (operation.held.second) operation.held.second->end();
  if (operation.numbered) core_->finished(*this, error);
  error_ = error ? to_torch(error) : nullptr;
  operation.held.first = nullptr;  // releases the tensors
  done_.store(true, std::memory_order_release);
}

bool WorkArk::isCompleted() {
  if (!done() && poll) poll();
  return done();
}

std::function<void()> WorkArk::take_settlement() {
  std::lock_guard lock(mutex_);
  settled_ = true;
  if (!future_ && !future_result_) return {};
  return [future = future_, result = future_result_, outputs = outputs_, error = error_] {
    if (future) error ? future->setError(error) : future->markCompleted(c10::IValue(outputs));
    if (result) {
      result->markCompleted(static_cast<int64_t>(error ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS));
    }
  };
}

void WorkArk::settle() {
  if (const auto settlement = take_settlement()) settlement();
}

c10::intrusive_ptr<c10::ivalue::Future> WorkArk::getFuture() {
  if (need_progress) need_progress();
  std::unique_lock lock(mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (settled_) {
      const auto future = future_;
      lock.unlock();
      error_ ? future->setError(error_) : future->markCompleted(c10::IValue(outputs_));
      return future;
    }
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkArk::getFutureResult() {
  std::unique_lock lock(mutex_);
  if (!future_result_) {
    future_result_ = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
    if (settled_) {
      future_result_->markCompleted(
          static_cast<int64_t>(error_ ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS));
    }
  }
  return future_result_;
}

float WorkArk::getDuration() const {
  TORCH_CHECK(done(), "ark: [rank ", rank_, "] getDuration() before the work is complete");
  return std::chrono::duration<float, std::milli>(finished_ - started_).count();
}

void follow(const c10::intrusive_ptr<WorkArk>& work, std::vector<c10::intrusive_ptr<c10d::Work>> parts,
            std::function<void()> on_success, const std::shared_ptr<Executor>& executor) {
  struct State {
    std::vector<c10::intrusive_ptr<c10d::Work>> parts;
    std::function<void()> on_success;
    std::once_flag once;
  };
  auto state = std::make_shared<State>();
  state->parts = std::move(parts);
  state->on_success = std::move(on_success);
  // The work itself holds the closures, so the raw pointer is valid whenever they run.
  auto conclude = [raw = work.get(), state] {
    std::call_once(state->once, [&] {
      std::exception_ptr error;
      for (const auto& part : state->parts) {
        try {
          part->wait();
        } catch (...) {
          if (!error) error = std::current_exception();
        }
      }
      try {
        if (!error && state->on_success) state->on_success();
      } catch (...) {
        error = std::current_exception();
      }
      raw->finish(error);
      raw->settle();
    });
  };
  work->wait_elsewhere = [state, conclude](Clock::time_point until) {
    for (const auto& part : state->parts) {
      if (until == Clock::time_point::max()) break;  // conclude() waits
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
      try {
        part->wait(std::max(left, std::chrono::milliseconds(1)));
      } catch (...) {
        if (!part->isCompleted()) return false;
      }
    }
    conclude();
    return true;
  };
  work->poll = [state, conclude] {
    for (const auto& part : state->parts) {
      if (!part->isCompleted()) return;
    }
    conclude();
  };
  work->need_progress = [raw = work.get(), executor] {
    if (raw->done()) return;
    auto held = c10::intrusive_ptr<WorkArk>::unsafe_reclaim_from_nonowning(raw);
    executor->defer([held] { held->wait_elsewhere(Clock::time_point::max()); });
  };
}

}  // namespace ark

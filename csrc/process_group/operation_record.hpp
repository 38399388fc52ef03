// The arguments of a method's call, and the record of the operation that it becomes.
//
// A Call holds views of the arguments and lives no longer than issue(). From issue() until the operation ends there is
// one OperationRecord. The executor runs it, communicators use it as their Operation, a host work holds it, and on a
// CUDA device its line and its work share it. The issuing thread writes it before publishing it; the thread that runs
// the body writes `context` and `descriptor`. Fields that other threads change later are atomic or name their guard.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/operation.hpp"
#include "process_group/cuda/cuda_streams.hpp"
#include "process_group/tensors.hpp"
#include "process_group/timeout_extension.hpp"
#include "process_group/translate.hpp"

namespace ark {

// Element counts and dtype come from the tensors.
struct Call {
  c10d::OpType type;
  Kind kind = Kind::barrier;          // collectives only
  const char* name;                   // "all_reduce", for messages and the flight record
  const char* event;                  // "allreduce", NCCL's name for the profiler
  std::chrono::milliseconds timeout;  // as requested, or unset
  bool async;
  int64_t root = -1;
  int peer = -1;  // of a message; -1: any
  Reduction reduction = {};
  TensorArgument inputs = {};
  TensorArgument outputs = {};
  const std::vector<int64_t>* input_splits = nullptr;  // all_to_all, for the profiler
  const std::vector<int64_t>* output_splits = nullptr;
  bool even = false;   // all_to_all with equal parts on all ranks
  uint64_t shape = 0;  // from debug_shape()
  // The same call to another backend, for CUDA tensors.
  std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)> carry = {};

  // All tensors of an operation share a dtype; for coalesced ones the first counts. uint8 if there are none.
  at::ScalarType dtype() const {
    const at::Tensor* first = inputs.first();
    if (first == nullptr) first = outputs.first();
    return first == nullptr ? at::kByte : first->scalar_type();
  }
};

struct OperationRecord : Operation {
  // Blocks on the host; on a device it enqueues on `stream`. It holds the tensors and is destroyed when they may go.
  using Body = std::function<void(Communicator&, Operation&)>;
  using Held = std::pair<Body, TimeoutExtension::SharePtr>;

  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::chrono::milliseconds asked{-1};  // timeout with extensions; -1: the group's, which may still change
  uint64_t flight = 0;                  // id in the flight record
  bool numbered = false;                // counted and recorded, so its end is reported too
  bool even = false;                    // as in Call
  Held held = {};                       // the body, and the timeout extension to hold until the end

  // On a CUDA device (cuda/cuda_group.hpp).
  std::optional<c10::Stream> issuer = {};  // the caller's current stream
  std::optional<c10::Stream> on = {};      // the issuer, or the line's own stream
  uint64_t capture = 0;                    // 0: eager
  SharedEvent start = {};                  // null unless timed
  SharedEvent end = {};
  Clock::time_point issued = {};
  std::mutex mutex = {};                // guards `held` once the operation is enqueued
  std::atomic<bool> abandoned = false;  // only the line still keeps the tensors
  std::atomic<bool> seen_done = false;
  bool told_started = false;  // guarded by the group's mutex

  const char* name() const { return context.name; }
  uint64_t sequence() const { return context.sequence; }
  bool done();     // the device has passed it; true for captured operations
  Held release();  // gives up the tensors; destroy the result outside locks
};

}  // namespace ark

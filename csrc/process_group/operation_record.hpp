// What a method was called with, and the one record of the operation that comes of it.
//
// Call is what a method says: views of its arguments, which live no longer than issue(). From issue() on there is one
// OperationRecord until the operation has ended: the executor runs it, communicators read it as the Operation that it
// is, a work on the host holds it, and on a CUDA device its stream's line and its work share it.
//
// Written by the thread that issues, before anybody else knows it; `context` and `descriptor` by the thread that runs
// the body. What others change later is atomic or says by what it is guarded.
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

// Element counts and the dtype are those of the tensors.
struct Call {
  c10d::OpType type;
  Kind kind = Kind::barrier;          // collectives only
  const char* name;                   // "all_reduce": messages and flight record
  const char* event;                  // "allreduce": the profiler, in NCCL's words
  std::chrono::milliseconds timeout;  // as asked, or unset
  bool async;
  int64_t root = -1;
  int peer = -1;  // of a message; -1: any
  Reduction reduction = {};
  TensorArgument inputs = {};
  TensorArgument outputs = {};
  const std::vector<int64_t>* input_splits = nullptr;  // all_to_all, for the profiler
  const std::vector<int64_t>* output_splits = nullptr;
  bool even = false;   // all_to_all: equal parts, on all ranks
  uint64_t shape = 0;  // debug_shape()
  // The same call to another backend, for CUDA tensors.
  std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)> carry = {};

  // All tensors of an operation have one dtype, or (coalesced) the first stands for them; uint8 when there are none.
  at::ScalarType dtype() const {
    const at::Tensor* first = inputs.first();
    if (first == nullptr) first = outputs.first();
    return first == nullptr ? at::kByte : first->scalar_type();
  }
};

struct OperationRecord : Operation {
  // Blocks on the host; on a device it enqueues on `stream`. Holds the tensors, and goes when they may.
  using Body = std::function<void(Communicator&, Operation&)>;
  using Held = std::pair<Body, TimeoutExtension::SharePtr>;

  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::chrono::milliseconds asked{-1};  // timeout, extensions included; -1: the group's, which may still change
  uint64_t flight = 0;                  // its id in the flight record
  bool numbered = false;                // counted and recorded: its end is told, too
  bool even = false;                    // as in Call
  Held held = {};                       // the body, and what extends timeouts until the operation has ended

  // On a CUDA device (cuda/cuda_group.hpp).
  std::optional<c10::Stream> issuer = {};  // the caller's current stream
  std::optional<c10::Stream> on = {};      // the issuer, or the line's own
  uint64_t capture = 0;                    // 0: eager
  SharedEvent start = {};                  // where timing is on, else null
  SharedEvent end = {};
  Clock::time_point issued = {};
  std::mutex mutex = {};                // `held`, once the operation is enqueued
  std::atomic<bool> abandoned = false;  // nobody but the line keeps the tensors
  std::atomic<bool> seen_done = false;
  bool told_started = false;  // under the group's mutex

  const char* name() const { return context.name; }
  uint64_t sequence() const { return context.sequence; }
  bool done();     // the device has passed it; captured ones count as done
  Held release();  // for whoever lets go of the tensors, with no lock held
};

}  // namespace ark

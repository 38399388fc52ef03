// A fake driver with streams, events, copies and stream memory operations on host memory. Copy-engine code runs on it
// without a GPU.
//
// A stream is a thread that executes its operations in order, with random pauses in between, to produce orders that are
// rare on a GPU. Words are atomics (acquire when awaited, release when written), so ThreadSanitizer reports accesses
// that nothing else orders. Waits are bounded.
//
// Streams created within a OneQueue share one thread, which executes their operations in submission order, like a GPU
// with a single hardware queue.
//
// While a thread is in copy_to_pageable(), the stream and event calls of all other threads block, because the real
// driver holds a lock of the context meanwhile.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <thread>

#include "cuda/driver.hpp"
#include "protocol/atomics.hpp"
#include "support/wait_until.hpp"

namespace ark::test {

class FakeStream {
 public:
  explicit FakeStream(uint64_t seed, FakeStream* queue = nullptr) : queue_(queue), random_(seed) {
    if (queue_ == nullptr) thread_ = std::thread([this] { run(); });
  }
  ~FakeStream() {
    if (queue_ != nullptr) {
      queue_->drain();
    } else {
      give({});
      thread_.join();
    }
  }

  void give(std::function<void()> operation) {
    if (queue_ != nullptr) return queue_->give(std::move(operation));
    const std::lock_guard lock(mutex_);
    operations_.push_back(std::move(operation));
    changed_.notify_all();
  }
  bool idle() {
    if (queue_ != nullptr) return queue_->idle();
    const std::lock_guard lock(mutex_);
    return operations_.empty();
  }
  void drain() {
    if (queue_ != nullptr) return queue_->drain();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return operations_.empty(); });
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !operations_.empty(); });
      const std::function<void()> operation = operations_.front();
      lock.unlock();
      if (random_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
      if (operation) operation();
      lock.lock();
      operations_.pop_front();
      changed_.notify_all();
      if (!operation) return;
    }
  }

  FakeStream* const queue_;
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> operations_;
  std::thread thread_;
};

struct FakeEvent {
  std::shared_ptr<std::atomic<bool>> done;
};

inline std::atomic<uint64_t> g_streams{1};
inline std::atomic<bool> g_capturing{false};
inline std::atomic<bool> g_garbage{false};  // waits were released: no bytes are moved any more, since that would race
inline FakeStream* g_queue = nullptr;       // for streams being created
inline std::shared_mutex g_context;         // held during a copy to pageable memory
inline std::atomic<int> g_calls{0};         // calls of the functions below

// Held during a call of the driver.
struct InContext {
  InContext() { ++g_calls; }
  std::shared_lock<std::shared_mutex> lock{g_context};
};

// Only one thread at a time may create such streams. The queue outlives them.
class OneQueue {
 public:
  explicit OneQueue(FakeStream* queue) { g_queue = queue; }
  ~OneQueue() { g_queue = nullptr; }
  OneQueue(const OneQueue&) = delete;
};

inline FakeStream& of(CUstream stream) {
  return *reinterpret_cast<FakeStream*>(stream);
}
inline FakeEvent& of(CUevent event) {
  return *reinterpret_cast<FakeEvent*>(event);
}
inline uint32_t& word_at(CUdeviceptr address) {
  return *reinterpret_cast<uint32_t*>(address);
}
// Runs in stream order, like a kernel.
inline void launch(CUstream stream, std::function<void()> kernel) {
  of(stream).give([kernel = std::move(kernel)] {
    if (!g_garbage) kernel();
  });
}

// Like tensor.cpu(): waits for everything in the stream. Sets `copying` while other threads must wait.
inline void copy_to_pageable(CUstream stream, std::atomic<bool>& copying) {
  const std::lock_guard lock(g_context);
  copying = true;
  of(stream).drain();
}

// One context for all devices. It has only the functions that copy engines use.
inline const Driver& fake_driver() {
  static const Driver table = [] {
    Driver made;
    made.version = kOldestDriver;
    static CUcontext const context = reinterpret_cast<CUcontext>(&g_streams);
    made.device_get = [](CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; };
    made.device_primary_ctx_retain = [](CUcontext* out, CUdevice) { return *out = context, CUDA_SUCCESS; };
    made.ctx_get_current = [](CUcontext* out) { return *out = context, CUDA_SUCCESS; };
    made.ctx_set_current = [](CUcontext) { return CUDA_SUCCESS; };
    made.ctx_get_stream_priority_range = [](int* least, int* greatest) {
      return *least = 0, *greatest = -1, CUDA_SUCCESS;
    };
    made.thread_exchange_stream_capture_mode = [](CUstreamCaptureMode*) { return CUDA_SUCCESS; };
    made.stream_create_with_priority = [](CUstream* stream, unsigned, int priority) {
      const InContext here;
      FakeStream* const queue = priority < 0 ? g_queue : nullptr;
      *stream = reinterpret_cast<CUstream>(new FakeStream(g_streams++, queue));
      return CUDA_SUCCESS;
    };
    made.stream_destroy = [](CUstream stream) { return delete &of(stream), CUDA_SUCCESS; };
    made.stream_synchronize = [](CUstream stream) { return of(stream).drain(), CUDA_SUCCESS; };
    made.stream_query = [](CUstream stream) {
      const InContext here;
      return of(stream).idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    };
    made.stream_is_capturing = [](CUstream, CUstreamCaptureStatus* status) {
      *status = g_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
      return CUDA_SUCCESS;
    };
    made.event_create = [](CUevent* event, unsigned) {
      return *event = reinterpret_cast<CUevent>(new FakeEvent), CUDA_SUCCESS;
    };
    made.event_destroy = [](CUevent event) { return delete &of(event), CUDA_SUCCESS; };
    made.event_record = [](CUevent event, CUstream stream) {
      const InContext here;
      auto done = of(event).done = std::make_shared<std::atomic<bool>>(false);
      of(stream).give([done] { done->store(true); });
      return CUDA_SUCCESS;
    };
    made.stream_wait_event = [](CUstream stream, CUevent event, unsigned) {
      const InContext here;
      of(stream).give([done = of(event).done] { wait_until("an event", [&] { return done->load(); }); });
      return CUDA_SUCCESS;
    };
    made.memcpy_async = [](CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
      const InContext here;
      of(stream).give([=] {
        if (bytes <= 1024)  // may be flag words
          for (size_t at = 0; at < bytes; at += 4)
            protocol::store_relaxed(word_at(to + at), protocol::load_relaxed(word_at(from + at)));
        else if (!g_garbage)
          std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
      });
      return CUDA_SUCCESS;
    };
    made.stream_batch_mem_op = [](CUstream stream, unsigned count, CUstreamBatchMemOpParams* given, unsigned) {
      const InContext here;
      for (unsigned i = 0; i < count; ++i) {
        const auto address = given[i].waitValue.address;
        const auto value = static_cast<uint32_t>(given[i].waitValue.value);
        if (given[i].waitValue.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32)
          of(stream).give(
              [=] { wait_until("a word", [&] { return protocol::load_acquire(word_at(address)) == value; }); });
        else
          of(stream).give([=] { protocol::store_release(word_at(address), value); });
      }
      return CUDA_SUCCESS;
    };
    return made;
  }();
  return table;
}

}  // namespace ark::test

#include "dma/rdma/gpu_transfers.hpp"

#include <algorithm>
#include <thread>

#include "cuda/device_memory.hpp"

namespace ark::rdma {

namespace {

constexpr auto kCopyPoll = std::chrono::microseconds(20);
constexpr size_t kDirectInFlight = 16;  // chunks; a peer keeps a bounded number of announcements

Error late(int peer, const char* operation) {
  return Error(ErrorKind::timeout,
               "GPU memory did not pass between this rank and rank " + std::to_string(peer) + " in time",
               ErrorContext{-1, peer, operation, 0, "Look at that rank's output."});
}

}  // namespace

// A stream, and pinned chunks that the NIC has registered. Each chunk has the message and the copy that use it.
class GpuTransfers::Lane {
 public:
  struct Slot {
    std::byte* host = nullptr;
    CUevent copied = nullptr;
    bool copying = false;
    Messages::MessagePtr message;
  };

  Lane(Messages& messages, const Setup& setup)
      : gpu_(setup.gpu), memory_(setup.gpu, setup.chunk_bytes * setup.chunks), slots_(setup.chunks) {
    held_ = messages.hold(memory_.host(), setup.chunk_bytes * setup.chunks);
    const CurrentContext context(gpu_);
    check(driver().stream_create_with_priority(&stream_, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
    for (size_t i = 0; i < slots_.size(); ++i) {
      slots_[i].host = static_cast<std::byte*>(memory_.host()) + i * setup.chunk_bytes;
      check(driver().event_create(&slots_[i].copied, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    }
  }
  ~Lane() {
    for (Slot& slot : slots_) slot.message.reset();  // ends what the NIC does with the memory
    const CurrentContext context(gpu_);
    driver().stream_synchronize(stream_);
    for (Slot& slot : slots_)
      if (slot.copied) driver().event_destroy(slot.copied);
    driver().stream_destroy(stream_);
  }

  Slot& slot(size_t chunk) { return slots_[chunk % slots_.size()]; }
  size_t slots() const { return slots_.size(); }

  void copy(Slot& slot, CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    const CurrentContext context(gpu_);
    check(driver().memcpy_async(to, from, bytes, stream_), "cuMemcpyAsync of a chunk for the NIC");
    check(driver().event_record(slot.copied, stream_), "cuEventRecord");
    slot.copying = true;
  }
  void to_host(Slot& slot, const void* from, size_t bytes) {
    copy(slot, reinterpret_cast<CUdeviceptr>(slot.host), reinterpret_cast<CUdeviceptr>(from), bytes);
  }
  void to_gpu(Slot& slot, void* to, size_t bytes) {
    copy(slot, reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(slot.host), bytes);
  }
  void finish_copy(Slot& slot, int peer, Clock::time_point deadline, const char* operation) {
    if (!slot.copying) return;
    const CurrentContext context(gpu_);
    while (true) {
      const CUresult result = driver().event_query(slot.copied);
      if (result == CUDA_SUCCESS) break;
      if (result != CUDA_ERROR_NOT_READY) check(result, "a copy between GPU and host for the NIC");
      if (Clock::now() >= deadline) throw late(peer, operation);
      std::this_thread::sleep_for(kCopyPoll);
    }
    slot.copying = false;
  }

 private:
  const int gpu_;
  PinnedMemory memory_;
  Held held_;
  std::vector<Slot> slots_;
  CUstream stream_ = nullptr;
};

GpuTransfers::GpuTransfers(std::shared_ptr<Messages> messages, Setup setup, GpuPath path)
    : messages_(std::move(messages)), setup_(setup), path_(std::move(path)) {}

GpuTransfers::~GpuTransfers() = default;

// A lane whose transfer failed is not used again: copies and messages of it may still run.
template <class Body>
void GpuTransfers::with_lane(Body&& body) {
  std::unique_ptr<Lane> lane;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      lane = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!lane) lane = std::make_unique<Lane>(*messages_, setup_);
  body(*lane);
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(lane));
}

std::vector<GpuTransfers::Piece> GpuTransfers::pieces_of(size_t bytes) const {
  std::vector<Piece> pieces;
  for (size_t begin = 0; begin < bytes; begin += setup_.chunk_bytes) {
    const size_t piece = std::min(setup_.chunk_bytes, bytes - begin);
    pieces.push_back({begin, piece, path_.direct && piece > messages_->most_small()});
  }
  return pieces;
}

// All of it once, so that no chunk is registered alone.
Held GpuTransfers::hold_all(const void* data, size_t bytes) const {
  if (!path_.direct || bytes <= messages_->most_small()) return {};
  return messages_->hold(data, bytes, true, Where::gpu);
}

void GpuTransfers::wait(Message& message, int peer, Clock::time_point deadline, const char* operation) const {
  if (!message.wait_until(deadline)) throw late(peer, operation);
}

void GpuTransfers::send(int peer, int32_t tag, const void* data, size_t bytes, Clock::time_point deadline) {
  constexpr const char* kOperation = "rdma send";
  const auto* from = static_cast<const std::byte*>(data);
  const Held held = hold_all(data, bytes);
  with_lane([&](Lane& lane) {
    std::vector<Messages::MessagePtr> direct;  // goes before the lane and the registration, if something is thrown
    const auto pieces = pieces_of(bytes);
    const auto push = [&](size_t i) {  // what was copied to the host
      Lane::Slot& slot = lane.slot(i);
      lane.finish_copy(slot, peer, deadline, kOperation);
      slot.message = messages_->send(peer, tag, slot.host, pieces[i].bytes);
    };
    size_t pushed = 0;  // pieces before this one are sent
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      if (piece.direct) {
        if (direct.size() >= kDirectInFlight)
          wait(*direct[direct.size() - kDirectInFlight], peer, deadline, kOperation);
        direct.push_back(messages_->send(peer, tag, from + piece.begin, piece.bytes, Where::gpu));
        pushed = i + 1;
        continue;
      }
      Lane::Slot& slot = lane.slot(i);
      if (slot.message) wait(*slot.message, peer, deadline, kOperation);
      slot.message.reset();
      lane.to_host(slot, from + piece.begin, piece.bytes);
      // The copy of this piece runs while the one before it is sent.
      for (; pushed < i; ++pushed) push(pushed);
    }
    for (; pushed < pieces.size(); ++pushed) push(pushed);
    for (auto& message : direct) wait(*message, peer, deadline, kOperation);
    for (size_t i = 0; i < lane.slots(); ++i) {
      Lane::Slot& slot = lane.slot(i);
      if (slot.message) wait(*slot.message, peer, deadline, kOperation);
      slot.message.reset();
    }
  });
}

void GpuTransfers::receive(int peer, int32_t tag, void* data, size_t bytes, Clock::time_point deadline) {
  constexpr const char* kOperation = "rdma receive";
  auto* to = static_cast<std::byte*>(data);
  const Held held = hold_all(data, bytes);
  with_lane([&](Lane& lane) {
    const auto pieces = pieces_of(bytes);
    std::vector<Messages::MessagePtr> messages(pieces.size());  // as in send()
    const size_t most = path_.direct ? kDirectInFlight : lane.slots();
    size_t posted = 0;
    const auto post = [&](size_t i) {
      const Piece& piece = pieces[i];
      Lane::Slot& slot = lane.slot(i);
      // A copy out of this chunk must have ended before the NIC writes to it again.
      if (!piece.direct) lane.finish_copy(slot, peer, deadline, kOperation);
      messages[i] = piece.direct ? messages_->receive(peer, tag, to + piece.begin, piece.bytes, Where::gpu)
                                 : messages_->receive(peer, tag, slot.host, piece.bytes);
    };
    for (size_t i = 0; i < pieces.size(); ++i) {
      for (; posted < std::min(pieces.size(), i + most); ++posted) post(posted);
      wait(*messages[i], peer, deadline, kOperation);
      messages[i].reset();
      if (!pieces[i].direct) lane.to_gpu(lane.slot(i), to + pieces[i].begin, pieces[i].bytes);
    }
    for (size_t i = 0; i < lane.slots(); ++i) lane.finish_copy(lane.slot(i), peer, deadline, kOperation);
  });
}

}  // namespace ark::rdma

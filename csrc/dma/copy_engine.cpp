// The pieces of copy_engine.hpp.
#include "dma/copy_engine.hpp"

#include <algorithm>
#include <utility>

#include "error.hpp"

namespace ark {

namespace {

constexpr uint64_t kHead = 4096;  // of the words
constexpr int kSets = 2;

}  // namespace

uint64_t CopyEngine::memory_bytes(int ranks) {
  return kHead + 2 * kSets * ranks * kPieceBytes;
}

void CopyEngine::prepare(const DeviceMemory& own, int ranks) {
  CUstream stream = nullptr;
  check(driver().stream_create_with_priority(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  const CUdeviceptr words = reinterpret_cast<CUdeviceptr>(own.data());
  for (Word which : {free_scatter, free_gather})
    driver().memset_d32_async(words + 4 * which * ranks * kSets, 1, static_cast<size_t>(ranks) * kSets, stream);
  const CUresult result = driver().stream_synchronize(stream);
  driver().stream_destroy(stream);
  check(result, "preparing memory for copy engines");
}

CopyEngine::CopyEngine(int rank, int device, std::vector<DeviceMemory> memory, device::EngineStatus* status)
    : rank_(rank),
      size_(static_cast<int>(memory.size())),
      device_(device),
      memory_(std::move(memory)),
      status_(status) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  int least = 0, greatest = 0;
  check(driver().ctx_get_stream_priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  for (CUstream* stream : {&scatter_, &add_, &gather_, &out_, &release_})
    check(driver().stream_create_with_priority(stream, CU_STREAM_NON_BLOCKING, greatest), "cuStreamCreateWithPriority");
  check(driver().event_create(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
}

CopyEngine::~CopyEngine() {
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    driver().event_destroy(event_);
    for (CUstream stream : {scatter_, add_, gather_, out_, release_}) driver().stream_destroy(stream);
  } catch (const Error&) {  // at exit the driver may be gone already
  }
}

CUdeviceptr CopyEngine::word(int owner, Word which, int writer, int set) const {
  return reinterpret_cast<CUdeviceptr>(memory_[owner].data()) + 4 * ((which * size_ + writer) * kSets + set);
}

char* CopyEngine::slot(int owner, bool gather, int source, int set) const {
  return memory_[owner].data() + kHead + ((gather * kSets + set) * size_ + source) * kPieceBytes;
}

void CopyEngine::await(CUstream stream, Word which, const std::vector<int>& peers, int set) {
  for (int peer : peers) {
    const CUdeviceptr address = word(rank_, which, peer, set);
    check(driver().stream_wait_value32(stream, address, 1, CU_STREAM_WAIT_VALUE_EQ), "cuStreamWaitValue32");
    check(driver().stream_write_value32(stream, address, 0, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32");
  }
}

void CopyEngine::tell(CUstream stream, Word which, int peer, int set) {
  check(driver().stream_write_value32(stream, word(peer, which, rank_, set), 1, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue32 in the memory of rank " + std::to_string(peer));
}

void CopyEngine::copy(CUstream stream, void* to, const void* from, uint64_t bytes) {
  check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes, stream),
        "cuMemcpyAsync");
}

void CopyEngine::follow(CUstream stream, CUstream before) {
  check(driver().event_record(event_, before), "cuEventRecord");
  check(driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

void CopyEngine::all_reduce(const void* in, void* out, uint64_t bytes, uint64_t element_bytes, CUstream stream,
                            const Add& add) {
  const CurrentContext context(device_);
  const uint64_t unit = std::max<uint64_t>(element_bytes, 16);
  const uint64_t units = (bytes + unit - 1) / unit, part = (units + size_ - 1) / size_ * unit;  // the last may be short
  const auto from_of = [&](int r) { return std::min(r * part, bytes); };
  const auto size_of = [&](int r) { return std::min(part, bytes - from_of(r)); };
  std::vector<int> others;
  for (int k = 1; k < size_; ++k) others.push_back((rank_ + k) % size_);

  const CUdeviceptr busy = reinterpret_cast<CUdeviceptr>(&status_->busy);
  check(driver().stream_write_value32(stream, busy, 1, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32");
  for (CUstream own : {scatter_, add_, gather_, out_}) follow(own, stream);
  const uint64_t pieces = (part + kPieceBytes - 1) / kPieceBytes;
  const uint64_t piece = ((part + pieces - 1) / pieces + unit - 1) / unit * unit;
  for (uint64_t i = 0; i < pieces; ++i) {
    const int set = static_cast<int>(i % kSets);
    const auto length = [&](int r) { return std::min(piece, size_of(r) - std::min(size_of(r), i * piece)); };
    const auto at = [&](auto* base, int r) {
      using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(base)>>, const char, char>;
      return static_cast<Byte*>(base) + from_of(r) + i * piece;
    };
    for (int peer : others) {
      if (length(peer) == 0) continue;
      await(scatter_, free_scatter, {peer}, set);
      copy(scatter_, slot(peer, false, rank_, set), at(in, peer), length(peer));
      tell(scatter_, arrived_scatter, peer, set);
    }
    if (length(rank_) != 0) {
      await(add_, arrived_scatter, others, set);
      std::vector<const void*> parts(size_);
      for (int r = 0; r < size_; ++r) parts[r] = r == rank_ ? at(in, r) : slot(rank_, false, r, set);
      add(parts.data(), at(out, rank_), length(rank_), add_);
      for (int peer : others) tell(add_, free_scatter, peer, set);
      follow(gather_, add_);
      for (int peer : others) {
        await(gather_, free_gather, {peer}, set);
        copy(gather_, slot(peer, true, rank_, set), at(out, rank_), length(rank_));
        tell(gather_, arrived_gather, peer, set);
      }
    }
    for (int k = 1; k < size_; ++k) {
      const int peer = (rank_ + size_ - k) % size_;
      if (length(peer) == 0) continue;
      await(out_, arrived_gather, {peer}, set);
      // In place this overwrites what the scatter stream has sent already: the peer's result came from it.
      copy(out_, at(out, peer), slot(rank_, true, peer, set), length(peer));
      tell(out_, free_gather, peer, set);
    }
  }
  for (CUstream own : {scatter_, add_, gather_, out_}) follow(stream, own);
  check(driver().stream_write_value32(stream, busy, 0, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32");
}

void CopyEngine::release_all() {
  const RelaxedCapture relaxed;
  const CurrentContext context(device_);
  driver().memset_d32_async(word(rank_, arrived_scatter, 0, 0), 1, static_cast<size_t>(kWords) * size_ * kSets,
                            release_);
  driver().stream_synchronize(release_);
}

}  // namespace ark

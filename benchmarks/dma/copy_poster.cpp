// Implementation of copy_poster.hpp: batched stream memory operations of the driver, and the release at abort.
#include "copy_poster.hpp"

#include <thread>

#include "util/error.hpp"

namespace ark {

namespace {

CUstreamBatchMemOpParams operation(CUstreamBatchMemOpType type, const void* at, uint32_t value, unsigned flags) {
  CUstreamBatchMemOpParams params{};
  params.waitValue.operation = type;  // a write has the same parameter layout
  params.waitValue.address = reinterpret_cast<CUdeviceptr>(at);
  params.waitValue.value = value;
  params.waitValue.flags = flags;
  return params;
}

}  // namespace

CopyPoster::CopyPoster(int device, uint32_t slots, protocol::Flag* arrived, CUstream stream)
    : device_(device),
      slots_(slots),
      arrived_(arrived),
      flags_(std::make_unique<PinnedMemory>(device, slots * sizeof(protocol::Flag))),
      own_stream_(stream == nullptr),
      stream_(stream) {
  if (slots == 0)
    throw Error(ErrorKind::invalid_argument, "a channel of posted copies has 0 slots: it takes 1 or more");
  if (!own_stream_) return;
  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  check(driver().stream_create_with_priority(&stream_, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
}

CopyPoster::~CopyPoster() {
  if (!own_stream_) return;
  try {
    constexpr std::chrono::seconds kLimit{2};
    if (!release_all(kLimit)) {  // leaking a stream and its flags is better than waiting forever
      (void)flags_.release();
      return;
    }
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    driver().stream_destroy(stream_);
  } catch (const Error&) {  // at exit the driver may already be unloaded
  }
}

void CopyPoster::post(void* to, const void* from, uint64_t bytes) {
  const CurrentContext context(device_);
  const protocol::Flag* flag = go() + next_;
  CUstreamBatchMemOpParams arm[] = {
      operation(CU_STREAM_MEM_OP_WAIT_VALUE_32, flag, 1, CU_STREAM_WAIT_VALUE_EQ),
      operation(CU_STREAM_MEM_OP_WRITE_VALUE_32, flag, 0, CU_STREAM_WRITE_VALUE_DEFAULT),
  };
  check(driver().stream_batch_mem_op(stream_, 2, arm, 0), "cuStreamBatchMemOp");
  if (bytes != 0)
    check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes, stream_),
          "cuMemcpyAsync");
  check(driver().stream_write_value32(stream_, reinterpret_cast<CUdeviceptr>(arrived_ + next_), 1,
                                      CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue32");
  next_ = next_ + 1 == slots_ ? 0 : next_ + 1;
}

void CopyPoster::synchronize() {
  const CurrentContext context(device_);
  check(driver().stream_synchronize(stream_), "posted copies");
}

bool CopyPoster::release_all(std::chrono::milliseconds limit) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device_);
  auto* flags = static_cast<protocol::Flag*>(flags_->host());
  const auto until = std::chrono::steady_clock::now() + limit;
  for (;;) {
    const CUresult result = driver().stream_query(stream_);
    if (result != CUDA_ERROR_NOT_READY) return true;  // empty, or the context is lost and nothing waits
    if (std::chrono::steady_clock::now() > until) return false;
    for (uint32_t i = 0; i < slots_; ++i) protocol::raise(flags[i]);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace ark

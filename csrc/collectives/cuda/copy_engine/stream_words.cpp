// Collects waits and writes of words, and enqueues them with one driver call (cuStreamBatchMemOp), because each call
// costs host time. A wait also resets its word, which prepares it for the next use or replay.
#include "collectives/cuda/copy_engine/stream_words.hpp"

namespace ark {

void StreamWords::await(CUdeviceptr word, uint32_t value) {
  add(CU_STREAM_MEM_OP_WAIT_VALUE_32, word, value, CU_STREAM_WAIT_VALUE_EQ);
  add(CU_STREAM_MEM_OP_WRITE_VALUE_32, word, 0, CU_STREAM_WRITE_VALUE_DEFAULT);
}

void StreamWords::tell(CUdeviceptr word, uint32_t value) {
  add(CU_STREAM_MEM_OP_WRITE_VALUE_32, word, value, CU_STREAM_WRITE_VALUE_DEFAULT);
}

void StreamWords::add(CUstreamBatchMemOpType operation, CUdeviceptr word, uint32_t value, unsigned flags) {
  CUstreamBatchMemOpParams params{};
  params.waitValue.operation = operation;  // a write's parameters have the same layout
  params.waitValue.address = word;
  params.waitValue.value = value;
  params.waitValue.flags = flags;
  operations_.push_back(params);
}

void StreamWords::enqueue() {
  if (operations_.empty()) return;
  check(driver().stream_batch_mem_op(stream_, static_cast<unsigned>(operations_.size()), operations_.data(), 0),
        "cuStreamBatchMemOp");
  operations_.clear();
}

}  // namespace ark

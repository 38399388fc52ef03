// Words that streams write and wait for themselves (stream memory operations), without using an SM.
//
// A graph captures the values as constants, so these are not counters: a word is 0 until a teller sets it, the waiter
// resets it, and it is not set again before that. The driver orders a write after its stream's copies and kernels and
// makes their results visible to readers of the word. Work after a wait starts after it. A wait has no time limit, so
// the words are in host memory, where the host can end it (copy_engine.hpp). Operations collect until enqueue() passes
// them to the driver in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/driver.hpp"

namespace ark {

class StreamWords {
 public:
  explicit StreamWords(CUstream stream) : stream_(stream) {}
  void await(CUdeviceptr word, uint32_t value = 1);  // and resets the word
  void tell(CUdeviceptr word, uint32_t value = 1);
  void enqueue();

 private:
  void add(CUstreamBatchMemOpType operation, CUdeviceptr word, uint32_t value, unsigned flags);

  const CUstream stream_;
  std::vector<CUstreamBatchMemOpParams> operations_;
};

}  // namespace ark

// Words that streams write and await by themselves (stream memory operations): no SM executes them.
//
// The values are constants once captured in a graph, so these are not counters: a word is 0 until somebody tells it a
// value, whoever waited for that value puts 0 back, and nobody tells a word again before. Ordering: the driver orders a
// write behind the copies and kernels of its stream, and makes what they wrote visible to whoever sees the word; what
// follows a wait on its stream starts behind it. A wait has no bound: somebody outside must be able to end it,
// so the words of copy engines lie in host memory (copy_engine.hpp).
//
// Operations gather until enqueue(), which hands them to the driver in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/driver.hpp"

namespace ark {

class StreamWords {
 public:
  explicit StreamWords(CUstream stream) : stream_(stream) {}
  void await(CUdeviceptr word, uint32_t value = 1);  // and puts 0 back
  void tell(CUdeviceptr word, uint32_t value = 1);
  void enqueue();

 private:
  void add(CUstreamBatchMemOpType operation, CUdeviceptr word, uint32_t value, unsigned flags);

  const CUstream stream_;
  std::vector<CUstreamBatchMemOpParams> operations_;
};

}  // namespace ark

// One collective as the layers below the process group see it: blocking, typed, torch-free.
//
// A Communicator carries out collectives for one group, one at a time, on the calling thread. Two exist: over
// shared memory (shm_communicator.hpp), and over several nodes: shared memory in each, messages of another PyTorch
// backend between them (process_group/carriers/carried_communicator.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "health/group_health.hpp"
#include "util/dtype.hpp"

namespace ark {

enum class Kind : uint8_t {
  all_reduce = 0,
  reduce = 1,
  reduce_scatter = 2,
  all_gather = 3,
  broadcast = 4,
  gather = 5,
  scatter = 6,
  all_to_all = 7,
  barrier = 8,
};
inline constexpr int kKinds = 9;
const char* name_of(Kind kind);

// What all ranks must agree on. It travels in the first slot of every operation and is compared word by word.
struct Descriptor {
  uint64_t sequence = 0;
  uint64_t count = 0;  // elements a rank (all_to_all: 0, the sizes travel apart)
  Kind kind = Kind::barrier;
  DType dtype = DType::raw8;
  ReduceOp op = ReduceOp::sum;
  uint8_t algorithm = 0;
  int32_t root = -1;
  uint64_t shape = 0;  // hash of the shapes in debug mode, else 0
};
static_assert(sizeof(Descriptor) == 32);

struct Operation {
  OperationContext context;
  Descriptor descriptor;
  double factor = 1.0;     // premul_sum: this rank's multiplier
  void* stream = nullptr;  // CUDA tensors: the CUstream that the operation is enqueued on
};

struct Bytes {
  const void* data;
  size_t size;
};
struct MutableBytes {
  void* data;
  size_t size;
};

class Communicator {
 public:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Communicator() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }

  // `count` elements of descriptor.dtype; in == out allowed.
  virtual void all_reduce(const Operation&, const void* in, void* out, size_t count) = 0;
  virtual void reduce(const Operation&, const void* in, void* out, size_t count) = 0;  // out: root only
  // ins[r]: what rank r is to receive the reduction of, `count` elements each.
  virtual void reduce_scatter(const Operation&, const void* const* ins, void* out, size_t count) = 0;
  // outs[r] receives rank r's `bytes`; outs[own] == in allowed.
  virtual void all_gather(const Operation&, const void* in, void* const* outs, size_t bytes) = 0;
  virtual void broadcast(const Operation&, void* data, size_t bytes) = 0;
  virtual void gather(const Operation&, const void* in, void* const* outs, size_t bytes) = 0;
  virtual void scatter(const Operation&, const void* const* ins, void* out, size_t bytes) = 0;
  virtual void all_to_all(const Operation&, const Bytes* ins, const MutableBytes* outs) = 0;
  virtual void barrier(const Operation&) = 0;
  // From any thread: what waits, and what begins later, ends with this error. Over shared memory GroupHealth sees to
  // it.
  virtual void abort(const Error&) {}
  // Nothing will begin any more: peers are told, threads end.
  virtual void close() {}

 protected:
  const int rank_;
  const int size_;
};

}  // namespace ark

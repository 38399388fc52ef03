// One collective as seen below the process group: blocking, typed, without torch.
//
// A Communicator runs the collectives of one group, one at a time, on the calling thread. On the CPU there are two:
// over shared memory (shm_communicator.hpp), and over several nodes, with shared memory in each and messages of a
// carrier between them (process_group/carriers/carried_communicator.hpp).
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

// What all ranks must agree on. The first slot of every operation carries it, and ranks compare it word by word.
struct Descriptor {
  uint64_t sequence = 0;
  uint64_t count = 0;  // elements per rank (all_to_all: 0, because sizes travel separately)
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
  void* stream = nullptr;  // CUDA tensors: the CUstream to enqueue on
  // Part of a training step that all ranks of the group capture together, so that the dispatch of such steps applies.
  bool captured_step = false;
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

  // `count` elements of descriptor.dtype. in == out is allowed.
  virtual void all_reduce(const Operation&, const void* in, void* out, size_t count) = 0;
  virtual void reduce(const Operation&, const void* in, void* out, size_t count) = 0;  // out: root only
  // ins[r]: this rank's contribution to rank r's result, `count` elements each.
  virtual void reduce_scatter(const Operation&, const void* const* ins, void* out, size_t count) = 0;
  // outs[r] receives rank r's `bytes`. outs[own] == in is allowed.
  virtual void all_gather(const Operation&, const void* in, void* const* outs, size_t bytes) = 0;
  virtual void broadcast(const Operation&, void* data, size_t bytes) = 0;
  virtual void gather(const Operation&, const void* in, void* const* outs, size_t bytes) = 0;
  virtual void scatter(const Operation&, const void* const* ins, void* out, size_t bytes) = 0;
  virtual void all_to_all(const Operation&, const Bytes* ins, const MutableBytes* outs) = 0;
  virtual void barrier(const Operation&) = 0;
  // From any thread. Waiting and later operations end with this error. Over shared memory GroupHealth does this
  // instead.
  virtual void abort(const Error&) {}
  // No operation may begin after this: tells the peers and ends threads.
  virtual void close() {}

 protected:
  const int rank_;
  const int size_;
};

}  // namespace ark

// A group whose ranks share no memory, carried by another PyTorch backend (Gloo; made in Python).
//
// The carrier only moves bytes, nearly all of them in messages between two ranks, from and to the tensors themselves.
// Reductions are done here, by the same kernels in the same order as over shared memory: so every dtype, operation and
// shape that ark takes works, and the bits of a result do not depend on what carried it.
//
// Every collective begins with one message from each rank to each: what it believes it is in, and its data where they
// are small. So a small collective takes one hop. Large reductions go in chunks: while one is added up, the next is on
// its way, and the sums of the last one as well.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <mutex>
#include <vector>

#include "collectives/operation.hpp"
#include "process_group/carried_messages.hpp"

namespace ark {

class CarriedCommunicator : public Communicator {
 public:
  // nodes[r]: on which machine rank r is; empty: not known.
  CarriedCommunicator(int rank, int size, c10::intrusive_ptr<c10d::Backend> carrier, const std::vector<int>& nodes);

  void all_reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce_scatter(const Operation&, const void* const* ins, void* out, size_t count) override;
  void all_gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void broadcast(const Operation&, void* data, size_t bytes) override;
  void gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void scatter(const Operation&, const void* const* ins, void* out, size_t bytes) override;
  void all_to_all(const Operation&, const Bytes* ins, const MutableBytes* outs) override;
  void barrier(const Operation&) override;
  void abort() override;

 private:
  // The first message. All have one size: a receiver knows it before it knows whether the sender is in the same
  // operation.
  struct First {
    static constexpr size_t kRoom = 976;
    Descriptor descriptor;
    double factor;   // premul_sum
    uint64_t bytes;  // all_to_all: what the sender sends behind this
    std::byte data[kRoom];
  };
  static_assert(sizeof(First) == 1024);

  struct Current;

  template <class Body>
  void guarded(const Operation& operation, Body&& body);
  // The first messages: with `bytes` of for_rank[r] to rank r (null: none), or promised[r] where they have room.
  void meet(CarriedMessages& messages, const Operation& operation, const void* const* for_rank, size_t bytes,
            const Bytes* promised = nullptr);
  const std::byte* came_from(int peer) const { return first_[peer].data; }
  void reduce_small(const Operation& operation, const void* own, void* out, size_t count);
  // Part r of every rank's `ins` is added up on rank r, chunk by chunk, into `part`; `added` hears of each chunk.
  template <class Added>
  void reduce_parts(CarriedMessages& messages, const Operation& operation, const void* const* ins,
                    const std::vector<size_t>& counts, void* part, Added&& added);
  // sources: of all ranks, or of two (then not for what takes all of them: AVG and factors).
  void add(const Operation& operation, void* out, const void* const* sources, int ranks, size_t count) const;
  static bool is_line(const std::vector<int>& nodes);
  static bool adds_in_line(const Descriptor& what);
  void reduce_in_line(CarriedMessages& messages, const Operation& operation, const void* in, void* out, size_t count);
  void gather_in_line(CarriedMessages& messages, const void* in, void* const* outs, size_t bytes);
  size_t chunk_of(const Operation& operation, size_t count) const;

  c10::intrusive_ptr<c10d::Backend> carrier_;
  const bool line_;                  // carried_line.cpp
  std::vector<First> first_, sent_;  // what came from each rank, what went to it
  std::vector<std::byte> scratch_;
  std::mutex mutex_;  // of what follows
  CarriedMessages* now_ = nullptr;
  bool aborted_ = false;
};

}  // namespace ark

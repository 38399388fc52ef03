// A group whose ranks share no memory, carried by another PyTorch backend (Gloo; made in Python).
//
// The carrier only moves bytes, in all_gather, all_to_all, broadcast, gather, scatter and barrier. Reductions are done
// here, by the same kernels in the same order as over shared memory: so every dtype, operation and shape that ark takes
// works, and the bits of a result do not depend on what carried it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives/operation.hpp"

namespace ark {

class CarriedCommunicator : public Communicator {
 public:
  CarriedCommunicator(int rank, int size, c10::intrusive_ptr<c10d::Backend> carrier)
      : Communicator(rank, size), carrier_(std::move(carrier)) {}

  void all_reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce_scatter(const Operation&, const void* const* ins, void* out, size_t count) override;
  void all_gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void broadcast(const Operation&, void* data, size_t bytes) override;
  void gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void scatter(const Operation&, const void* const* ins, void* out, size_t bytes) override;
  void all_to_all(const Operation&, const Bytes* ins, const MutableBytes* outs) override;
  void barrier(const Operation&) override;

 private:
  template <class Body>
  void guarded(const Operation& operation, Body&& body);
  void check_agreement(const Operation& operation);
  // Reduces padded[r * bytes...] of every rank into out; `premul_sum` factors are exchanged first.
  void reduce_parts(const Operation& operation, const void* parts, size_t stride, void* out, size_t count);
  at::Tensor exchange(const Operation& operation, const at::Tensor& padded);

  c10::intrusive_ptr<c10d::Backend> carrier_;
};

}  // namespace ark

// What fused operators on CUDA tensors share: where a result is stored by all ranks, and what launches have reported.
#pragma once

#include <ATen/ATen.h>

#include "collectives/cuda/tile_memory.hpp"
#include "cuda/graph_owned.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark::ops {

// A result that all ranks store into. Under capture it lies in a place of the graph's own; in registered memory, where
// the group has registered ark_torch.memory.pool(); else it is copied once from the staging place. Ranks decide each
// for itself.
struct TileResult {
  at::Tensor out;
  TileMemory::Place place;
  bool copies = false;
};

// Before the launch: memory for an eager result.
at::Tensor allocate_result(ProcessGroupArk& group, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);
// Within it; `out` is what allocate_result() gave, undefined under capture.
TileResult place_result(const at::Tensor& out, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device,
                        CudaCommunicator& communicator, TileMemory& tiles, const Capture& capture);
// Behind the kernel.
void copy_result(const TileResult& result, CUstream stream);

// How long a launch may wait for peers.
uint64_t nanoseconds_of(const OperationContext& context);

// Of a launch without peers, which stores at `place`.
device::TileLinks alone(int device, void* place);
// Throws what an earlier launch of the group, or one without peers on this device, has reported. Before the driver is
// asked for anything: what ended the context has left it with one answer for all.
void raise_earlier(ProcessGroupArk& group, c10::Device device, const char* operation);
// The error of what an earlier launch reported.
[[noreturn]] void raise_report(const device::TileReport& report, int rank, const char* operation);

}  // namespace ark::ops

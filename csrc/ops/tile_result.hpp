// Common parts of fused operators on CUDA tensors: the place where all ranks store a result, and reports of launches.
#pragma once

#include <ATen/ATen.h>

#include "collectives/cuda/tile_memory.hpp"
#include "cuda/graph_owned.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark::ops {

// A result that all ranks store into. During capture it is in a place that the graph owns. Otherwise it is in
// registered memory if the group has registered ark_torch.memory.pool(), else it is copied once from the staging place.
// Each rank decides for itself.
struct TileResult {
  at::Tensor out;
  TileMemory::Place place;
  bool copies = false;
};

// Call before the launch: allocates memory for an eager result.
at::Tensor allocate_result(ProcessGroupArk& group, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);
// Call within the launch; `out`: the result of allocate_result(), undefined during capture.
TileResult place_result(const at::Tensor& out, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device,
                        CudaCommunicator& communicator, TileMemory& tiles, const Capture& capture);
// Call after the kernel.
void copy_result(const TileResult& result, CUstream stream);

// How long a launch may wait for peers.
uint64_t nanoseconds_of(const OperationContext& context);

// Links for a launch without peers that stores at `place`.
device::TileLinks alone(int device, void* place);
// Throws what an earlier launch of the group, or one without peers on this device, has reported. Call it before any
// driver call, because after a lost context every driver call returns the same error.
void raise_earlier(ProcessGroupArk& group, c10::Device device, const char* operation);
// Throws the error that an earlier launch reported.
[[noreturn]] void raise_report(const device::TileReport& report, int rank, const char* operation);

}  // namespace ark::ops

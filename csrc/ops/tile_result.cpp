// Chooses where all ranks store an operator's result: memory owned by the graph under capture, the registered tensor
// itself, or a staging place that is copied afterwards. Also turns a launch's report into an error.
#include "ops/tile_result.hpp"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "collectives/cuda/windows.hpp"
#include "process_group/cuda/cuda_group.hpp"
#include "protocol/atomics.hpp"

namespace ark::ops {

namespace {

// The report of launches on this device without peers. Per process, because such a report ends the context.
device::TileReport& local_report(int device, bool on_device) {
  static auto* const reports = new std::map<int, std::unique_ptr<PinnedMemory>>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  auto& report = (*reports)[device];
  if (!report) report = std::make_unique<PinnedMemory>(device, sizeof(device::TileReport));
  return *static_cast<device::TileReport*>(on_device ? report->device() : report->host());
}

}  // namespace

at::Tensor allocate_result(ProcessGroupArk& group, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  if (is_capturing(device)) return {};
  at::Tensor out = group.allocate_registered(sizes, dtype, device);
  if (!out.defined() && group.getSize() > 1) group.tell_of_copies();
  return out.defined() ? out : at::empty(sizes, at::TensorOptions(dtype).device(device));
}

TileResult place_result(const at::Tensor& out, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device,
                        CudaCommunicator& communicator, TileMemory& tiles, const Capture& capture) {
  TileResult result{out, tiles.staging(), true};
  if (capture.id != 0) {
    const auto options = at::TensorOptions(dtype).device(device);
    if (auto own = tiles.take()) {
      result.place = std::move(*own), result.copies = false;
      result.out = at::from_blob(
          result.place.data, sizes, [keep = result.place.keep](void*) {}, options, device);
    } else {
      result.out = at::empty(sizes, options);
    }
    keep_with_graph(capture, result.place.keep);
  } else if (const auto window = communicator.windows().find(out.data_ptr(), out.nbytes())) {
    result.copies = false;
    result.place.data = static_cast<char*>(out.data_ptr());
    for (int r = 0; r < communicator.size(); ++r) result.place.seen[r] = window->seen[r] + window->offset;
  }
  return result;
}

void copy_result(const TileResult& result, CUstream stream) {
  if (!result.copies) return;
  ark::check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(result.out.data_ptr()),
                                   reinterpret_cast<CUdeviceptr>(result.place.data), result.out.nbytes(), stream),
             "cuMemcpyAsync");
}

uint64_t nanoseconds_of(const OperationContext& context) {
  if (context.deadline == Clock::time_point::max()) return ~uint64_t{0};
  return static_cast<uint64_t>(std::max<int64_t>(context.timeout.count(), 1)) * 1'000'000;
}

device::TileLinks alone(int device, void* place) {
  device::TileLinks links{};
  links.place[0] = reinterpret_cast<uint64_t>(place);
  links.report = &local_report(device, true);
  links.ranks = 1;
  return links;
}

void raise_earlier(ProcessGroupArk& group, c10::Device device, const char* operation) {
  if (const auto report = group.tile_failure()) raise_report(*report, group.getRank(), operation);
  const device::TileReport& local = local_report(device.index(), false);
  if (protocol::load_acquire(local.failure) != device::TileReport::none)
    raise_report(local, group.getRank(), operation);
}

void raise_report(const device::TileReport& report, int rank, const char* operation) {
  const std::string table = std::to_string(report.item);
  switch (report.failure) {
    case device::TileReport::index:
      throw Error(ErrorKind::out_of_range,
                  "index " + std::to_string(report.value) + " is out of bounds for dimension 0 with size " +
                      std::to_string(report.limit) + " of tables[" + table + "], in an earlier call",
                  ErrorContext{rank, -1, operation, 0, "Pass indices from 0 to below the number of rows."});
    case device::TileReport::offset:
      throw Error(ErrorKind::invalid_argument,
                  "offsets[" + table + "] holds " + std::to_string(report.value) +
                      " where offsets grow from 0 to at most " + std::to_string(report.limit) + ", in an earlier call",
                  ErrorContext{rank, -1, operation, 0, "Pass where each bag begins."});
    case device::TileReport::expert:
      throw Error(ErrorKind::out_of_range,
                  "topk_ids[" + std::to_string(report.item / std::max(report.peer, 1)) + "][" +
                      std::to_string(report.item % std::max(report.peer, 1)) + "] is " + std::to_string(report.value) +
                      ", and there are " + std::to_string(report.limit) + " experts, in an earlier call",
                  ErrorContext{rank, -1, operation, 0,
                               "Pass numbers from 0 to below num_experts, or -1 for a choice that goes nowhere."});
    case device::TileReport::rows:
      throw Error(
          ErrorKind::invalid_argument,
          "the experts of rank " + std::to_string(report.peer) + " get " + std::to_string(report.value) +
              " rows, and max_rows is " + std::to_string(report.limit) + ", in an earlier call",
          ErrorContext{rank, report.peer, operation, 0, "Pass a larger max_rows, or none for the most there can be."});
    default:
      throw Error(
          ErrorKind::mismatch,
          "rank " + std::to_string(report.peer) +
              " called another fused operator than this rank, or has other tables, another batch or dtype than " +
              "this rank takes it to have, in an earlier call",
          ErrorContext{rank, report.peer, operation, 0,
                       "Make the same calls on every rank, with what tables_per_rank says where it is given."});
  }
}

}  // namespace ark::ops

// Fills memory by one kernel, adds it up by another, and compares the sum with the host's. The second launch is
// cooperative, to test that mode, too. The first of two turns warms up; the second is timed.
#include "jit/probe.hpp"

#include <algorithm>
#include <chrono>

#include "cuda/driver.hpp"
#include "cuda/probe.hpp"
#include "jit/kernel.hpp"
#include "util/error.hpp"

namespace ark::jit {

namespace {

constexpr uint32 kSeed = 12345;
constexpr int kThreads = 256;

// The probe's resources, freed on every path.
struct Held {
  CUdeviceptr data = 0, sum = 0;
  CUstream stream = nullptr;
  CUevent events[3] = {};
  ~Held() {
    for (CUevent event : events)
      if (event != nullptr) driver().event_destroy(event);
    if (stream != nullptr) driver().stream_destroy(stream);
    if (sum != 0) driver().mem_free(sum);
    if (data != 0) driver().mem_free(data);
  }
};

}  // namespace

std::string probe_stub() {
  return "#include \"cuda/probe.cuh\"\n"
         "extern \"C\" __global__ void fill(const __grid_constant__ ark::ProbeFill p) { ark::probe_fill(p); }\n"
         "extern \"C\" __global__ void sum(const __grid_constant__ ark::ProbeSum p) { ark::probe_sum(p); }\n";
}

ProbeResult probe_device(int device, size_t bytes) {
  ProbeResult result;
  const Driver& cuda = driver();
  KernelLibrary& library = KernelLibrary::of(device);
  result.device = device_name(device);
  result.arch = library.target().arch;
  const auto start = std::chrono::steady_clock::now();
  const Kernel& fill = library.get(probe_stub(), "fill");
  const Kernel& sum = library.get(probe_stub(), "sum");
  result.load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result.registers = sum.registers;

  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  const uint64 chunks = std::max<uint64>(1, (bytes + 15) / 16);
  Held held;
  check(cuda.mem_alloc(&held.data, chunks * 16), "cuMemAlloc of " + std::to_string(chunks * 16) + " bytes");
  check(cuda.mem_alloc(&held.sum, 16), "cuMemAlloc of 16 bytes");
  check(cuda.stream_create_with_priority(&held.stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  for (CUevent& event : held.events) check(cuda.event_create(&event, CU_EVENT_DEFAULT), "cuEventCreate");

  const ProbeFill fill_params{reinterpret_cast<void*>(held.data), chunks, kSeed};
  const ProbeSum sum_params{reinterpret_cast<const void*>(held.data), chunks, reinterpret_cast<uint64*>(held.sum)};
  const uint64 enough = (chunks + kThreads - 1) / kThreads;
  const Dim3 grid{static_cast<unsigned>(std::min<uint64>(enough, resident_blocks(sum, kThreads, 0)))};
  // The first turn warms up; the second is timed.
  for (int turn = 0; turn < 2; ++turn) {
    check(cuda.memset_d8_async(held.sum, 0, 16, held.stream), "cuMemsetD8Async");
    check(cuda.event_record(held.events[0], held.stream), "cuEventRecord");
    launch(fill, grid, {kThreads}, 0, held.stream, fill_params);
    check(cuda.event_record(held.events[1], held.stream), "cuEventRecord");
    launch(sum, grid, {kThreads}, 0, held.stream, sum_params, LaunchMode::cooperative);  // tests this mode
    check(cuda.event_record(held.events[2], held.stream), "cuEventRecord");
  }
  uint64 found[2] = {};
  check(cuda.memcpy_async(reinterpret_cast<CUdeviceptr>(found), held.sum, sizeof found, held.stream), "cuMemcpyAsync");
  check(cuda.stream_synchronize(held.stream), "the probe kernels on device " + std::to_string(device));

  float fill_ms = 0, sum_ms = 0;
  check(cuda.event_elapsed_time(&fill_ms, held.events[0], held.events[1]), "cuEventElapsedTime");
  check(cuda.event_elapsed_time(&sum_ms, held.events[1], held.events[2]), "cuEventElapsedTime");
  result.fill_gb_per_s = static_cast<double>(chunks) * 16e-6 / std::max(fill_ms, 1e-6f);
  result.sum_gb_per_s = static_cast<double>(chunks) * 16e-6 / std::max(sum_ms, 1e-6f);

  uint64 expected = 0;
  for (uint64 i = 0; i < 4 * chunks; ++i) expected += probe_word(i, kSeed);
  if (found[0] != expected)
    throw Error(ErrorKind::system, "device " + std::to_string(device) + " (" + result.device + ") added " +
                                       std::to_string(4 * chunks) + " words to " + std::to_string(found[0]) +
                                       ", and it is " + std::to_string(expected));
  return result;
}

}  // namespace ark::jit

// A pretended libcuda. Every call succeeds and does nothing, unless a test asks for more by the pretend_... functions.
// Memory that ranks share is real host memory (tests/csrc/support/pretended_memory.cpp); other memory is addresses that
// must not be accessed. Three kinds of kernels run, within their launch: the peer test's (cuda/peer_test.cuh), those
// between nodes (cuda/between.cuh), and a loop kernel that only sums over nodes, if a test says so. Python tests load
// the library before torch's own would be loaded (__init__.py); C++ tests link it (tests/CMakeLists.txt).
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "collectives/cuda/cuda_communicator.hpp"
#include "cuda/add.cuh"
#include "cuda/between.cuh"
#include "cuda/compressed_codes.cuh"
#include "cuda/fused/embedding_rows.cuh"
#include "cuda/fused/matmul.cuh"
#include "cuda/fused/moe_product.cuh"
#include "cuda/fused/moe_rows.cuh"
#include "cuda/loop/launch.cuh"
#include "cuda/one_shot.cuh"
#include "cuda/peer_test.cuh"
#include "cuda/rendezvous.cuh"
#include "support/between_player.hpp"
#include "support/pretended_driver.hpp"

using namespace ark;

namespace {
std::atomic<int> capability{90}, version{13000}, devices{16}, reach{1}, launched{0}, tests{0}, loaded_late{0};
std::atomic<bool> meeting{false};
std::atomic<int> dma_buf{1}, ordering{100}, memory_for_nics{1};
std::atomic<int> shared{232448}, local{0}, resident{2};
std::atomic<int> loop_adds{0};
std::atomic<uint64_t> loop_added{0}, loop_sum{0}, capture{0}, next_address{uint64_t{1} << 40};
thread_local void* context = nullptr;

// Objects owned by graphs. A graph is its capture's id.
using UserObject = std::pair<CUhostFn, void*>;
std::mutex graphs_mutex;
std::multimap<uint64_t, UserObject> held;
std::string model = "pretended GPU";  // set before the threads that ask
std::atomic<bool> refuses_to_hold{false};

uint64_t take(size_t bytes) {
  constexpr uint64_t kPage = uint64_t{1} << 21;
  return next_address.fetch_add((bytes + kPage) / kPage * kPage);
}
}  // namespace

extern "C" {
// Whether GPU memory is exported as a dma-buf, and how the NIC's writes are ordered.
void pretend_dma_buf(int supported, int writes) {
  dma_buf = supported;
  ordering = writes;
}
void pretend_memory_for_nics(int offered) {
  memory_for_nics = offered;
}
void pretend_capability(int major_and_minor) {
  capability = major_and_minor;
}
void pretend_model(const char* name) {
  model = name;
}
void pretend_version(int value) {
  version = value;
}
void pretend_shared(int bytes_a_block) {
  shared = bytes_a_block;
}
void pretend_local(int bytes_a_thread) {
  local = bytes_a_thread;
}
void pretend_resident(int blocks_a_multiprocessor) {
  resident = blocks_a_multiprocessor;
}
void pretend_reach(int value) {
  reach = value;
}
void pretend_capture(uint64_t id) {
  capture = id;
}
// The capture's graph, and all its instances, are destroyed.
void pretend_graph_end(uint64_t id) {
  std::multimap<uint64_t, UserObject> its;
  {
    const std::lock_guard lock(graphs_mutex);
    for (auto found = held.find(id); found != held.end(); found = held.find(id)) its.insert(held.extract(found));
  }
  for (const auto& [graph, object] : its) object.first(object.second);
}
void pretend_refuse_to_hold(int value) {
  refuses_to_hold = value != 0;
}
// Loop kernels sum so many bytes of float32 in place over nodes of one rank; 0: they do nothing.
void pretend_loop_sum(uint64_t bytes) {
  loop_sum = bytes;
}
// Loop kernels add 1 to so many float32 of their first argument.
void pretend_loop_adds(int count) {
  loop_adds = count;
}
// Where the last one did.
uint64_t pretend_loop_added() {
  return loop_added;
}
int pretend_launches() {
  return launched;
}
// Modules and kernels that were loaded after a message's kernel had been launched, which waits for a peer's host. A GPU
// would hang there.
int pretend_loaded_late() {
  return loaded_late;
}
// Counts tests that wrote into a peer's memory to see whether values arrive.
int pretend_tests() {
  return tests;
}

CUresult cuDriverGetVersion(int* value) {
  *value = version;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = devices;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (static_cast<int>(attribute)) {
    case 75: *value = capability / 10; break;
    case 76: *value = capability % 10; break;
    case 16: *value = 132; break;
    case 97: *value = shared; break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: *value = memory_for_nics; break;
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: *value = dma_buf; break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: *value = ordering; break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int bytes, CUdevice) {
  std::snprintf(name, static_cast<size_t>(bytes), "%s", model.c_str());
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  std::memset(uuid, device + 1, sizeof *uuid);
  return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
  *can = reach;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* made, CUdevice device) {
  *reinterpret_cast<intptr_t*>(made) = 0x1000 + device;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* current) {
  *reinterpret_cast<void**>(current) = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext current) {
  context = reinterpret_cast<void*>(current);
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  loaded_late += meeting;
  *reinterpret_cast<intptr_t*>(module) = 1;
  return CUDA_SUCCESS;
}
CUresult cuFuncLoad(CUfunction) {
  loaded_late += meeting;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *reinterpret_cast<void**>(function) = strdup(name);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES ? local.load() : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetParamInfo(CUfunction function, size_t, size_t* offset, size_t* bytes) {
  const struct {
    const char* name;
    size_t bytes;
  } known[] = {{"one_shot", sizeof(device::OneShotParams)},        {"move", sizeof(device::MoveParams)},
               {"two_shot", sizeof(device::TwoShotParams)},        {"add", sizeof(device::AddParams)},
               {"loop_kernel", sizeof(loop::Launch<1>)},           {"matmul", sizeof(device::MatmulParams)},
               {"moe_dispatch", sizeof(device::MoeParams)},        {"moe_scatter", sizeof(device::MoeParams)},
               {"moe_gather", sizeof(device::MoeParams)},          {"moe_settle", sizeof(device::SettleParams)},
               {"moe_product", sizeof(device::MoeProductParams)},  {"between_move", sizeof(device::BetweenParams)},
               {"between_add", sizeof(device::BetweenParams)},     {"between_add_wide", sizeof(device::BetweenParams)},
               {"bulk_two_shot", sizeof(device::TwoShotParams)},   {"bulk_move", sizeof(device::MoveParams)},
               {"bulk_transfer", sizeof(device::MoveParams)},      {"peer_test", sizeof(device::PeerTestParams)},
               {"embedding_bag", sizeof(device::BagParams)},       {"send_gradient", sizeof(device::GradientParams)},
               {"name_rows", sizeof(device::RowSumParams)},        {"sum_rows", sizeof(device::RowSumParams)},
               {"sum_crowded_rows", sizeof(device::RowSumParams)}, {"rendezvous", sizeof(device::RendezvousParams)}};
  *offset = *bytes = 0;
  for (const auto& one : known)
    if (std::strcmp(one.name, reinterpret_cast<const char*>(function)) == 0) *bytes = one.bytes;
  if (std::strncmp(reinterpret_cast<const char*>(function), "compressed_", 11) == 0)
    *bytes = sizeof(device::CodeParams);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction function, void** params, void**) {
  const char* const name = reinterpret_cast<const char*>(function);
  for (const char* const waits : {"rendezvous", "move", "bulk_transfer"})
    if (std::strcmp(name, waits) == 0) meeting = true;
  if (std::strncmp(name, "between_", 8) == 0) {
    const auto form = std::strcmp(name, "between_move") == 0  ? device::BetweenForm::move
                      : std::strcmp(name, "between_add") == 0 ? device::BetweenForm::add
                                                              : device::BetweenForm::add_wide;
    test::play_between(*static_cast<const device::BetweenParams*>(params[0]), form);
    ++launched;
    return CUDA_SUCCESS;
  }
  if (std::strcmp(name, "loop_kernel") == 0 && loop_sum != 0)
    test::play_loop_sum(*static_cast<const loop::Launch<1>*>(params[0]), loop_sum);
  if (std::strcmp(name, "loop_kernel") == 0 && loop_adds > 0) {
    auto* const first = reinterpret_cast<float*>(static_cast<const loop::Launch<1>*>(params[0])->pointers[0]);
    loop_added = reinterpret_cast<uint64_t>(first);
    for (int i = 0; i < loop_adds; ++i) first[i] += 1;
  }
  if (std::strcmp(name, "peer_test") != 0) {
    ++launched;
    return CUDA_SUCCESS;
  }
  const auto& p = *static_cast<const device::PeerTestParams*>(params[0]);
  uint64_t words[2][2 * device::kPeerTestUnits];
  for (uint32_t way = 0; way < 2; ++way)
    for (uint32_t i = 0; i < std::size(words[way]); ++i)
      words[way][i] = device::peer_test_word(p.from_rank, p.to_rank, way, i);
  test::write_from_device(reinterpret_cast<CUdeviceptr>(p.to), words[0], sizeof words[0], test::kStores);
  test::write_from_device(reinterpret_cast<CUdeviceptr>(p.kept), words[1], sizeof words[1], test::kStores);
  tests += p.from_rank != p.to_rank;
  return CUDA_SUCCESS;
}
CUresult cuStreamQuery(CUstream) {
  return test::is_endless() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = resident;
  return CUDA_SUCCESS;
}
CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  *free = *total = size_t{1} << 36;
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  *pointer = take(bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  test::pinned(*pointer, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* pointer) {
  test::pinned(pointer, 0);
  std::free(pointer);
  return CUDA_SUCCESS;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* host, unsigned) {
  *device = reinterpret_cast<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  *reinterpret_cast<intptr_t*>(stream) = 0x77;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = static_cast<CUstreamCaptureStatus>(capture != 0);
  return CUDA_SUCCESS;
}
CUresult cuStreamGetCaptureInfo_v3(CUstream, CUstreamCaptureStatus* status, uint64_t* id, CUgraph* graph, const void**,
                                   const void**, size_t*) {
  *status = static_cast<CUstreamCaptureStatus>(capture != 0);
  *id = capture;
  if (graph != nullptr) *graph = reinterpret_cast<CUgraph>(*id);
  return CUDA_SUCCESS;
}
CUresult cuUserObjectCreate(CUuserObject* object, void* pointer, CUhostFn destroy, unsigned, unsigned) {
  *object = reinterpret_cast<CUuserObject>(new UserObject(destroy, pointer));
  return CUDA_SUCCESS;
}
CUresult cuUserObjectRelease(CUuserObject object, unsigned) {
  const std::unique_ptr<UserObject> its(reinterpret_cast<UserObject*>(object));
  its->first(its->second);
  return CUDA_SUCCESS;
}
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned, unsigned) {
  if (refuses_to_hold) return CUDA_ERROR_UNKNOWN;
  const std::unique_ptr<UserObject> its(reinterpret_cast<UserObject*>(object));
  const std::lock_guard lock(graphs_mutex);
  held.emplace(reinterpret_cast<uint64_t>(graph), *its);
  return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* event, unsigned) {
  static std::atomic<intptr_t> made{0};
  *reinterpret_cast<intptr_t*>(event) = ++made;
  return CUDA_SUCCESS;
}
CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  *milliseconds = 1.5F * static_cast<float>(reinterpret_cast<intptr_t>(end) - reinterpret_cast<intptr_t>(start));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR_PRETENDED";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "pretended";
  return CUDA_SUCCESS;
}
}

// Implementation of machine.hpp: maps the GPUs' memory for each other, loads kernels, launches them and waits.
#include "machine.hpp"

#include <algorithm>
#include <cstring>

#include "util/error.hpp"

namespace ark::channels {

namespace {

CUdeviceptr address(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

const char* const kEntries[] = {
    "store_ping",       "store_send",       "store_put",           "warp_ping", "warp_send",   "warp_put",
    "packet_ping",      "packet_send",      "packet_put",          "watch",     "look",        "packet_receive",
    "copy_engine_ping", "copy_engine_send", "copy_engine_put",     "keep",      "packet_keep", "copy_engine_keep",
    "proxy_ping",       "proxy_send",       "copy_engine_receive", "proxy_put",
};
const char* const kBulkEntries[] = {"bulk_send_2", "bulk_send_4",  "bulk_ping",   "bulk_send", "bulk_put", "stream_put",
                                    "add_f32_put", "add_bf16_put", "add_f16_put", "pull_put",  "pull_keep"};

}  // namespace

uint64_t slot_bytes(const std::string& engine, uint64_t bytes) {
  return engine == "packet" ? protocol::packet_bytes(bytes) : (bytes + 127) / 128 * 128;
}

bool by_sm(const std::string& engine) {
  return engine != "cpu" && engine != "proxy" && engine != "copy_engine";
}

Machine::Gpu::Gpu(int ordinal)
    : device(ordinal), own(DeviceMemory::allocate(ordinal, kTotal)), words(ordinal, sizeof(device::GroupStatus)) {
  const CurrentContext context(device);
  check(driver().stream_create_with_priority(&kernels, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
}

Machine::Machine(std::string stub) : stub_(std::move(stub)), random_(kMost / 8) {
  int devices = 0;
  check(driver().device_get_count(&devices), "cuDeviceGetCount");
  if (devices < 2)
    throw Error(ErrorKind::invalid_argument, "two GPUs are needed, and there is " + std::to_string(devices));
  for (int d = 0; d < 2; ++d) gpus_.push_back(std::make_unique<Gpu>(d));
  for (int d = 0; d < 2; ++d)
    gpus_[d]->peer = DeviceMemory::import(d, gpus_[1 - d]->own.export_fd(), gpus_[1 - d]->own.size());
  uint64_t x = 88172645463325252ull;
  for (uint64_t& word : random_) x ^= x << 13, x ^= x >> 7, x ^= x << 17, word = x;
  for (int d = 0; d < 2; ++d) {
    jit::KernelLibrary& library = jit::KernelLibrary::of(d);
    major_ = library.target().major;
    for (const char* entry : kEntries) gpus_[d]->entries[entry] = &library.get(stub_, entry);
    if (has_bulk())
      for (const char* entry : kBulkEntries) gpus_[d]->entries[entry] = &library.get(stub_, entry);
    write(d, kSource, random_.data(), kMost);
    const CurrentContext context(d);  // while the device is idle, because copies may load the driver's own kernels
    check(driver().memcpy_async(address(gpus_[d]->there(kSlots)), address(gpus_[d]->at(kSource)), kMost,
                                gpus_[d]->kernels),
          "a copy to the peer");
    sync(d);
  }
}

void Machine::sync(int d) {
  const CurrentContext context(d);
  check(driver().stream_synchronize(gpus_[d]->kernels), "device " + std::to_string(d));
}

void Machine::prepare(const Shape& shape, bool results) {
  const uint64_t ring = std::min(kRing, shape.slot_bytes * shape.depth * shape.lanes);
  for (int d = 0; d < 2; ++d) {
    const CurrentContext context(d);
    Gpu& gpu = *gpus_[d];
    gpu.poster.reset(), gpu.proxy.reset();
    std::memset(gpu.words.host(), 0, sizeof(device::GroupStatus));
    check(driver().memset_d8_async(address(gpu.at(0)), 0, kSource, gpu.kernels), "cuMemsetD8Async");
    check(driver().memset_d8_async(address(gpu.at(kSlots)), 0, ring, gpu.kernels), "cuMemsetD8Async");
    if (results) check(driver().memset_d8_async(address(gpu.at(kResult)), 0, kResults, gpu.kernels), "cuMemsetD8Async");
    sync(d);
  }
}

const void* Machine::source_of(int d, const Shape& shape, uint64_t number, bool first) const {
  return first ? gpus_[d]->at(kSource + number * shape.step % shape.span)
               : gpus_[d]->at(kSlots + number % shape.depth * shape.slot_bytes);
}

void Machine::post(int d, const Shape& shape, bool first) {
  Gpu& gpu = *gpus_[d];
  gpu.poster = std::make_unique<CopyPoster>(d, shape.depth, reinterpret_cast<protocol::Flag*>(gpu.there(kFlags)));
  for (uint32_t n = 0; n < shape.count; ++n)
    gpu.poster->post(gpu.there(kSlots + n % shape.depth * shape.slot_bytes), source_of(d, shape, n, first),
                     shape.bytes);
}

void Machine::start_proxy(int d) {
  Gpu& gpu = *gpus_[d];
  gpu.proxy = std::make_unique<Proxy>(d, Proxy::Window{gpu.own.data(), kTotal}, Proxy::Window{gpu.peer.data(), kTotal},
                                      std::vector{reinterpret_cast<uint64_t*>(gpu.there(kArrived))});
}

device::RunParams Machine::params(int d, const Shape& shape, bool first) const {
  const Gpu& gpu = *gpus_[d];
  const auto word = [](char* at) { return reinterpret_cast<uint64*>(at); };
  device::RunParams p{};
  p.end.to_slots = gpu.there(kSlots), p.end.slots = gpu.at(kSlots);
  p.end.to_arrived = word(gpu.there(kArrived)), p.end.arrived = word(gpu.at(kArrived));
  p.end.to_credit = word(gpu.there(kCredit)), p.end.credit = word(gpu.at(kCredit));
  p.end.state = reinterpret_cast<protocol::ChannelState*>(gpu.at(kState));
  p.end.status = static_cast<device::GroupStatus*>(gpu.words.device());
  p.end.limit_ns = limit_ns, p.end.peer = 1 - d;
  p.end.slot_bytes = shape.slot_bytes, p.end.depth = shape.depth;
  p.posted.go = gpu.poster ? gpu.poster->go() : nullptr;
  p.posted.arrived = reinterpret_cast<protocol::Flag*>(gpu.at(kFlags));
  if (gpu.proxy) p.proxy = {gpu.proxy->ring(), gpu.proxy->head(), gpu.own.data(), gpu.peer.data(), 0};
  p.source = gpu.at(kSource), p.pulled = gpu.there(kSource);
  p.result = gpu.at(kResult), p.to_result = gpu.there(kResult), p.spent = word(gpu.at(kSpent));
  p.bytes = shape.bytes, p.result_stride = shape.result_stride, p.step = shape.step, p.span = shape.span;
  p.count = shape.count, p.warm = shape.warm, p.first = first;
  return p;
}

size_t Machine::shared_bytes(const std::string& entry) const {
  if (entry == "bulk_ping" || entry == "bulk_put" || entry == "pull_keep") return sizeof(device::MessageStages);
  const auto streams = [&]<int kStreams>() {
    return kStreams *
           (major_ < 12 ? sizeof(device::StreamStagesOf<9, kStreams>) : sizeof(device::StreamStagesOf<12, kStreams>));
  };
  if (entry == "bulk_send_2") return streams.operator()<2>();
  if (entry == "bulk_send_4") return streams.operator()<4>();
  if (entry == "bulk_send" || entry == "stream_put" || entry.starts_with("add_")) return streams.operator()<1>();
  return 0;
}

void Machine::launch(int d, const std::string& entry, const Shape& shape, uint32_t blocks, uint32_t threads,
                     bool first) {
  const auto found = gpus_[d]->entries.find(entry);
  if (found == gpus_[d]->entries.end())
    throw Error(ErrorKind::invalid_argument, "there is no kernel " + entry + ": is its engine's name right?");
  const jit::Kernel& kernel = *found->second;
  const CurrentContext context(d);
  jit::launch(kernel, {blocks}, {threads}, shared_bytes(entry), gpus_[d]->kernels, params(d, shape, first));
}

std::vector<bool> Machine::finish_stuck() {
  for (int d = 0; d < 2; ++d) sync(d);  // bounded, because every wait in a kernel is
  std::vector<bool> gave_up;
  for (int d = 0; d < 2; ++d) {
    Gpu& gpu = *gpus_[d];
    if (gpu.proxy) gpu.proxy->stop(), gpu.proxy->check(), gpu.proxy->synchronize();
    gave_up.push_back(gpu.status()->gave_up != 0);
  }
  const bool stuck = gave_up[0] || gave_up[1];
  for (int d = 0; d < 2; ++d) {
    CopyPoster* poster = gpus_[d]->poster.get();
    if (poster == nullptr) continue;
    if (!stuck) poster->synchronize();
    if (stuck && !poster->release_all(std::chrono::seconds(5)))
      throw Error(ErrorKind::timeout, "posted copies on device " + std::to_string(d) + " were not released");
  }
  return gave_up;
}

void Machine::finish() {
  const std::vector<bool> gave_up = finish_stuck();
  for (int d = 0; d < 2; ++d)
    if (gave_up[d])
      throw Error(ErrorKind::timeout, "a kernel on device " + std::to_string(d) + " waited for " +
                                          std::to_string(limit_ns / 1'000'000) + " ms");
}

void Machine::host_copy(int d, const Shape& shape, uint32_t number, bool first) {
  const CurrentContext context(d);
  Gpu& gpu = *gpus_[d];
  check(driver().memcpy_async(address(gpu.there(kSlots + number % shape.depth * shape.slot_bytes)),
                              address(source_of(d, shape, number, first)), shape.bytes, gpu.kernels),
        "cuMemcpyAsync");
  check(driver().stream_synchronize(gpu.kernels), "a copy to the peer");
}

std::vector<char> Machine::read(int d, uint64_t offset, uint64_t bytes) {
  std::vector<char> found(bytes);
  const CurrentContext context(d);
  check(driver().memcpy_async(address(found.data()), address(gpus_[d]->at(offset)), bytes, gpus_[d]->kernels),
        "reading results");
  sync(d);
  return found;
}

void Machine::write(int d, uint64_t offset, const void* from, uint64_t bytes) {
  const CurrentContext context(d);
  check(driver().memcpy_async(address(gpus_[d]->at(offset)), address(from), bytes, gpus_[d]->kernels),
        "writing sources");
  sync(d);
}

double Machine::spent_ns(uint32_t lanes) {
  const std::vector<char> times = read(0, kSpent, lanes * 8);
  const auto* values = reinterpret_cast<const uint64_t*>(times.data());
  return static_cast<double>(*std::max_element(values, values + lanes));
}

}  // namespace ark::channels

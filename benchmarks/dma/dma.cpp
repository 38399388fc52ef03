// Latency and throughput of messages from one GPU to another, by engine and size: the program behind benchmarks/dma.py.
//
// usage: dma kernels=DIR stub=FILE engines=a,b,... sizes=16,1024,... blocks=8 seconds=60 [roots=DIR:DIR] [toolkit=DIR]
// One process drives both GPUs, the memory of each mapped for the other by the driver's virtual memory API. Prints one
// line of JSON a measurement. Whatever arrived last is compared with what was sent. Nothing waits without a bound: a
// kernel gives up after two seconds, and then the words that streams wait for are set.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <thread>
#include <vector>

#include "channels.cuh"
#include "error.hpp"
#include "jit/driver.hpp"
#include "jit/kernel.hpp"
#include "jit/settings.hpp"
#include "memory/device_memory.hpp"

using namespace ark;
using device::ChannelParams;
using Clock = std::chrono::steady_clock;

namespace {

constexpr uint64_t kMost = 64 << 20;  // bytes of a message
constexpr uint64_t kWords = 256 << 10, kRing = 2 * kMost, kResults = 16 << 20;
constexpr uint64_t kPiece = 64 << 10;  // a stream of larger messages goes in pieces of this size
constexpr uint64_t kMostPacketBytes = 1 << 20;
constexpr int kWarm = 20;

struct Arguments {
  std::map<std::string, std::string> given;
  std::string of(const std::string& name, const std::string& otherwise = "") const {
    const auto found = given.find(name);
    return found == given.end() ? otherwise : found->second;
  }
  std::vector<std::string> list(const std::string& name, char separator) const {
    std::vector<std::string> parts;
    std::istringstream text(of(name));
    for (std::string part; std::getline(text, part, separator);)
      if (!part.empty()) parts.push_back(part);
    return parts;
  }
};

// Offsets in each GPU's memory: words (arrived, credit, go, spent), then source, ring, results.
constexpr uint64_t kArrived = 0, kCredit = 64 << 10, kGo = 128 << 10, kSpent = 192 << 10;  // up to 512 lanes
constexpr uint64_t kSource = kWords, kSlots = kSource + kMost, kResult = kSlots + kRing, kTotal = kResult + kResults;

struct HostWords {
  device::GroupStatus status;
  alignas(64) uint64_t requests[device::kRequests][2];
  alignas(64) uint64_t taken;
};

struct Gpu {
  explicit Gpu(int ordinal)
      : device(ordinal), own(DeviceMemory::allocate(ordinal, kTotal)), words(ordinal, sizeof(HostWords)) {
    const CurrentContext context(device);
    for (CUstream* stream : {&kernels, &copies})
      check(driver().stream_create_with_priority(stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  }
  HostWords* host() { return static_cast<HostWords*>(words.host()); }
  HostWords* mapped() { return static_cast<HostWords*>(words.device()); }
  template <class T = char>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(own.data() + offset);
  }
  template <class T = char>
  T* there(uint64_t offset) const {
    return reinterpret_cast<T*>(peer.data() + offset);
  }

  const int device;
  DeviceMemory own, peer;  // peer: the other GPU's, mapped for this one
  PinnedMemory words;
  CUstream kernels = nullptr, copies = nullptr;
};

CUdeviceptr address(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

struct Shape {
  uint64_t bytes, slot_bytes;  // of a lane's message
  uint32_t lanes, slots, count, threads;
};

class Bench {
 public:
  Bench(std::string stub, double seconds)
      : stub_(std::move(stub)), ends_(Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000))) {
    for (int d = 0; d < 2; ++d) gpus_.push_back(std::make_unique<Gpu>(d));
    for (int d = 0; d < 2; ++d)
      gpu(d).peer = DeviceMemory::import(d, gpu(1 - d).own.export_fd(), gpu(1 - d).own.size());
    random_.resize(kMost / 8);
    uint64_t x = 88172645463325252ull;
    for (uint64_t& word : random_) x ^= x << 13, x ^= x >> 7, x ^= x << 17, word = x;
    for (int d = 0; d < 2; ++d) {
      const CurrentContext context(d);
      check(driver().memcpy_async(address(gpu(d).at(kSource)), address(random_.data()), kMost, gpu(d).kernels),
            "source");
      for (const std::string& entry : entries()) jit::KernelLibrary::of(d).get(stub_, entry.c_str());
      // Once in peace: copies and fills may load kernels of the driver's own.
      check(driver().memcpy_async(address(gpu(d).there(kSlots)), address(gpu(d).at(kSource)), kMost, gpu(d).copies),
            "copy");
      sync(d, gpu(d).kernels), sync(d, gpu(d).copies);
    }
  }

  bool late() const { return Clock::now() > ends_; }
  bool has_bulk() const { return jit::KernelLibrary::of(0).target().major >= 9; }

  void latency(const std::string& engine, uint64_t bytes) {
    double best = 0;
    uint32_t best_blocks = 0;
    const bool sm = by_sm(engine);
    const bool warps = engine == "warp";
    for (uint32_t lanes : warps ? std::vector<uint32_t>{1, 8, 32, 256} : std::vector<uint32_t>{1, 4, 16}) {
      if (lanes > 1 && (!sm || bytes / lanes < (warps ? 512 : 1024))) break;
      Shape shape{bytes / lanes,
                  slot_bytes(engine, bytes / lanes),
                  lanes,
                  2,
                  bytes <= kPiece      ? 500u
                  : bytes <= (4 << 20) ? 100u
                                       : 40u,
                  threads(engine, bytes / lanes, lanes)};
      if (!sm) shape.count = std::min(shape.count, 200u);
      prepare(shape, engine);
      double us = 0;
      if (engine == "cpu") {
        us = by_host(shape, true);
      } else {
        if (engine == "copy_engine")
          for (int d = 0; d < 2; ++d) post(d, shape, d == 0);
        const auto proxies = engine == "proxy" ? start_proxies(shape, true) : nullptr;
        for (int d : {1, 0})
          start(d, kernel_of(engine) + "_ping", shape, blocks_of(shape, engine), shape.threads, shared_of(engine),
                engine, d == 0);
        finish();
        us = spent(shape.lanes) / 2e3 / (shape.count - kWarm);
      }
      const uint64_t wrong = engine == "cpu" ? 0 : check_ring(0, shape, engine) + check_ring(1, shape, engine);
      wrong_ += wrong;
      if (best_blocks == 0 || us < best) best = us, best_blocks = blocks_of(shape, engine);
    }
    std::printf(
        "{\"engine\": \"%s\", \"what\": \"latency\", \"bytes\": %llu, \"us\": %.3f, \"blocks\": %u, \"wrong\": %llu}\n",
        engine.c_str(), static_cast<unsigned long long>(bytes), best, sm ? best_blocks : 0,
        static_cast<unsigned long long>(std::exchange(wrong_, 0)));
    std::fflush(stdout);
  }

  void throughput(const std::string& engine, uint64_t bytes, uint32_t blocks) {
    const bool sm = by_sm(engine);
    const uint64_t piece = sm ? std::min(bytes, kPiece) : bytes;
    const uint32_t lanes = !sm ? 1 : engine == "warp" ? 32 * blocks : blocks;
    const uint64_t each = slot_bytes(engine, piece), room = kRing / (each * lanes);
    const uint32_t slots = static_cast<uint32_t>(std::clamp<uint64_t>(room, 2, 8));
    Shape shape{piece, each, lanes, slots, 0, threads(engine, piece, lanes)};
    const uint64_t wanted = (uint64_t{512} << 20) / (piece * shape.lanes);
    shape.count = static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 32, sm ? 4000 : 250));
    double seconds = 1e9;
    for (int round = 0; round < 3; ++round) {
      prepare(shape, engine);
      if (engine == "cpu") {
        seconds = std::min(seconds, by_host(shape, false));
      } else if (sm) {
        const std::string receiver = engine == "packet" ? "packet_receive" : "watch";
        start(1, receiver, shape, shape.lanes, engine == "packet" ? shape.threads : 32, 0, engine, false);
        start(0, engine + "_send", shape, blocks_of(shape, engine), shape.threads, shared_of(engine), engine, true);
        finish();
        seconds = std::min(seconds, spent(shape.lanes) * 1e-9);
      } else {
        if (engine == "copy_engine") post(0, shape, true);
        const auto proxies = engine == "proxy" ? start_proxies(shape, false) : nullptr;
        start(1, "answer", shape, 1, 32, 0, engine, false);
        start(0, kernel_of(engine) + "_send", shape, 1, 32, 0, engine, true);
        finish();
        seconds = std::min(seconds, spent(1) * 1e-9);
      }
      if (engine != "cpu") wrong_ += check_ring(1, shape, engine);
    }
    const double total = static_cast<double>(shape.bytes) * shape.lanes * shape.count;
    std::printf(
        "{\"engine\": \"%s\", \"what\": \"throughput\", \"bytes\": %llu, \"gbps\": %.3f, \"blocks\": %u, \"messages\": "
        "%u, \"wrong\": %llu}\n",
        engine.c_str(), static_cast<unsigned long long>(bytes), total / seconds * 1e-9, sm ? blocks : 0,
        shape.count * shape.lanes, static_cast<unsigned long long>(std::exchange(wrong_, 0)));
    std::fflush(stdout);
  }

 private:
  Gpu& gpu(int d) { return *gpus_[d]; }

  // All kernels: none may have to be loaded while another one waits for it.
  std::vector<std::string> entries() const {
    std::vector<std::string> names{"store_ping", "warp_ping",   "warp_send",   "packet_ping",   "engine_ping",
                                   "proxy_ping", "store_send",  "packet_send", "watch",         "answer",
                                   "look",       "engine_send", "proxy_send",  "packet_receive"};
    if (has_bulk()) names.insert(names.end(), {"bulk_ping", "bulk_send"});
    return names;
  }

  static bool by_sm(const std::string& engine) {
    return engine == "store" || engine == "warp" || engine == "packet" || engine == "bulk";
  }
  // Warps share blocks.
  static uint32_t blocks_of(const Shape& shape, const std::string& engine) {
    return engine == "warp" ? (shape.lanes + 31) / 32 : shape.lanes;
  }
  static std::string kernel_of(const std::string& engine) { return engine == "copy_engine" ? "engine" : engine; }
  static uint64_t slot_bytes(const std::string& engine, uint64_t bytes) {
    return engine == "packet" ? (bytes + 511) / 512 * 1024 : (bytes + 127) / 128 * 128;
  }
  static uint32_t threads(const std::string& engine, uint64_t bytes, uint32_t lanes) {
    if (engine == "warp") return 32 * std::min(lanes, 32u);
    if (engine == "bulk") return 64;
    if (engine != "store" && engine != "packet") return 32;
    return static_cast<uint32_t>(std::clamp<uint64_t>((bytes / 16 + 31) / 32 * 32, 32, 1024));
  }
  static size_t shared_of(const std::string& engine) { return engine == "bulk" ? device::kStages * device::kChunk : 0; }

  void sync(int d, CUstream stream) {
    const CurrentContext context(d);
    check(driver().stream_synchronize(stream), "device " + std::to_string(d));
  }

  void prepare(const Shape& shape, const std::string& engine) {
    epoch_ += 100000;
    const uint64_t used = std::min(kRing, shape.slot_bytes * shape.slots * shape.lanes);
    for (int d = 0; d < 2; ++d) {
      const CurrentContext context(d);
      std::memset(gpu(d).words.host(), 0, sizeof(HostWords));
      check(driver().memset_d8_async(address(gpu(d).at(0)), 0, kWords, gpu(d).kernels), "memset");
      check(driver().memset_d8_async(address(gpu(d).at(kSlots)), 0, used, gpu(d).kernels), "memset");
      if (engine == "packet")
        check(driver().memset_d8_async(address(gpu(d).at(kResult)), 0, kResults, gpu(d).kernels), "memset");
      sync(d, gpu(d).kernels);
    }
  }

  ChannelParams params(int d, const Shape& shape, const std::string& engine, bool first) {
    Gpu& mine = gpu(d);
    ChannelParams p{};
    p.source = mine.at(kSource);
    p.peer_slots = mine.there(kSlots), p.own_slots = mine.at(kSlots), p.result = mine.at(kResult);
    p.peer_arrived = mine.there<uint64>(kArrived), p.own_arrived = mine.at<uint64>(kArrived);
    p.own_credit = engine == "proxy" ? reinterpret_cast<uint64*>(&mine.mapped()->taken) : mine.at<uint64>(kCredit);
    p.peer_credit = mine.there<uint64>(kCredit);
    p.go = mine.at<uint64>(kGo), p.spent = mine.at<uint64>(kSpent);
    p.requests = reinterpret_cast<uint64*>(mine.mapped()->requests);
    p.status = &mine.mapped()->status, p.limit_ns = 2'000'000'000;
    p.bytes = shape.bytes, p.slot_bytes = shape.slot_bytes, p.slots = shape.slots, p.count = shape.count;
    p.epoch = epoch_, p.warm = kWarm, p.first = first;
    return p;
  }

  void start(int d, const std::string& entry, const Shape& shape, uint32_t blocks, uint32_t threads, size_t shared,
             const std::string& engine, bool first) {
    const jit::Kernel& kernel = jit::KernelLibrary::of(d).get(stub_, entry.c_str());
    const CurrentContext context(d);
    jit::launch(kernel, {blocks}, {threads}, shared, gpu(d).kernels, params(d, shape, engine, first));
  }

  // Both devices' kernels, whatever becomes of them.
  void finish() {
    for (int d = 0; d < 2; ++d) sync(d, gpu(d).kernels);
    stop_proxies();
    for (int d = 0; d < 2; ++d) {
      if (gpu(d).host()->status.gave_up == 0) continue;
      for (int other = 0; other < 2; ++other) {  // copies still wait for the words that the kernels did not write
        const CurrentContext context(other);
        check(driver().memset_d8_async(address(gpu(other).at(kGo)), 0x7f, 8, gpu(other).kernels), "memset");
        sync(other, gpu(other).kernels);
      }
      throw Error(ErrorKind::timeout, "a kernel on device " + std::to_string(d) + " waited for two seconds");
    }
    for (int d = 0; d < 2; ++d) sync(d, gpu(d).copies);
  }

  const void* source_of(int d, const Shape& shape, uint64_t number, bool first) {
    return first ? gpu(d).at(kSource) : gpu(d).at(kSlots + number % shape.slots * shape.slot_bytes);
  }
  void copy(int d, const Shape& shape, uint64_t number, bool first) {
    check(driver().memcpy_async(address(gpu(d).there(kSlots + number % shape.slots * shape.slot_bytes)),
                                address(source_of(d, shape, number, first)), shape.bytes, gpu(d).copies),
          "cuMemcpyAsync");
    check(driver().stream_write_value32(gpu(d).copies, address(gpu(d).there(kArrived)),
                                        static_cast<uint32_t>(number + 1), CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue32");
  }

  void post(int d, const Shape& shape, bool first) {
    const CurrentContext context(d);
    for (uint64_t number = 0; number < shape.count; ++number) {
      check(driver().stream_wait_value32(gpu(d).copies, address(gpu(d).at(kGo)), static_cast<uint32_t>(number + 1),
                                         CU_STREAM_WAIT_VALUE_GEQ),
            "cuStreamWaitValue32");
      copy(d, shape, number, first);
    }
  }

  // A host thread for each device that sends.
  struct Proxies {
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
  };
  std::shared_ptr<Proxies> start_proxies(const Shape& shape, bool both) {
    proxies_ = std::make_shared<Proxies>();
    for (int d = 0; d < (both ? 2 : 1); ++d)
      proxies_->threads.emplace_back([this, d, shape, proxies = proxies_.get()] {
        try {
          serve(d, shape, *proxies);
        } catch (const Error& error) {  // the kernels give up after their two seconds
          std::fprintf(stderr, "dma: proxy of device %d: %s\n", d, error.what());
        }
      });
    return proxies_;
  }
  void serve(int d, const Shape& shape, const Proxies& proxies) {
    const CurrentContext context(d);
    HostWords& words = *gpu(d).host();
    for (uint64_t number = 0; number < shape.count && !proxies.over.load(std::memory_order_relaxed);) {
      uint64_t(&request)[2] = words.requests[number % device::kRequests];
      // A slot starts as zeros; each lap turns the top bits.
      const uint64_t parity = (number / device::kRequests & 1) == 0 ? 1 : 0;
      if (std::atomic_ref(request[1]).load(std::memory_order_acquire) >> 63 != parity) continue;
      if (std::atomic_ref(request[0]).load(std::memory_order_acquire) >> 63 != parity) continue;
      copy(d, shape, number, d == 0);
      std::atomic_ref(words.taken).store(++number, std::memory_order_release);
    }
  }
  void stop_proxies() {
    if (!proxies_) return;
    proxies_->over = true;
    for (std::thread& thread : proxies_->threads) thread.join();
    proxies_.reset();
  }

  // The host does it all: waits for the kernel that made the data, copies, waits, launches the one that needs it.
  // Microseconds one way, or seconds for all messages.
  double by_host(const Shape& shape, bool back_and_forth) {
    Clock::time_point began = Clock::now();
    for (uint32_t number = 0; number < shape.count; ++number) {
      if (number == kWarm && back_and_forth) began = Clock::now();
      for (int d = 0; d < (back_and_forth ? 2 : 1); ++d) {
        if (back_and_forth) sync(d, gpu(d).kernels);
        {
          const CurrentContext context(d);
          const uint64_t at = kSlots + number % shape.slots * shape.slot_bytes;
          check(driver().memcpy_async(address(gpu(d).there(at)), address(source_of(d, shape, number, d == 0)),
                                      shape.bytes, gpu(d).copies),
                "cuMemcpyAsync");
        }
        sync(d, gpu(d).copies);
        start(1 - d, "look", shape, 1, 256, 0, "cpu", false);
      }
    }
    for (int d = 0; d < 2; ++d) sync(d, gpu(d).kernels);
    const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
    return back_and_forth ? seconds * 1e6 / 2 / (shape.count - kWarm) : seconds;
  }

  // Nanoseconds of the slowest lane.
  double spent(uint32_t lanes) {
    std::vector<uint64_t> times(lanes);
    const CurrentContext context(0);
    check(driver().memcpy_async(address(times.data()), address(gpu(0).at(kSpent)), lanes * 8, gpu(0).kernels), "times");
    sync(0, gpu(0).kernels);
    return static_cast<double>(*std::max_element(times.begin(), times.end()));
  }

  // Bytes of the last messages in a GPU's slots (or unpacked) that are not the source's.
  uint64_t check_ring(int d, const Shape& shape, const std::string& engine) {
    const bool packets = engine == "packet";
    const uint64_t stride = packets ? shape.bytes : shape.slot_bytes, base = packets ? kResult : kSlots;
    const uint32_t slots = std::min(shape.slots, shape.count);
    std::vector<char> found(std::min<uint64_t>(stride * shape.slots * shape.lanes, packets ? kResults : kRing));
    const CurrentContext context(d);
    check(driver().memcpy_async(address(found.data()), address(gpu(d).at(base)), found.size(), gpu(d).kernels),
          "results");
    sync(d, gpu(d).kernels);
    uint64_t wrong = 0;
    for (uint32_t lane = 0; lane < shape.lanes; ++lane)
      for (uint32_t slot = 0; slot < slots; ++slot) {
        const char* at = found.data() + (static_cast<uint64_t>(lane) * shape.slots + slot) * stride;
        const char* expected = reinterpret_cast<const char*>(random_.data()) + lane * shape.bytes;
        if (std::memcmp(at, expected, shape.bytes) == 0) continue;
        for (uint64_t i = 0; i < shape.bytes; ++i) wrong += at[i] != expected[i];
      }
    return wrong;
  }

  const std::string stub_;
  const Clock::time_point ends_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
  std::vector<uint64_t> random_;
  std::shared_ptr<Proxies> proxies_;
  uint64_t epoch_ = 1, wrong_ = 0;
};

int run(const Arguments& arguments) {
  jit::Settings settings;
  settings.version = "dma benchmark";
  settings.kernels_dir = arguments.of("kernels");
  settings.cache_dir = arguments.of("cache");
  settings.library_roots = arguments.list("roots", ':');
  settings.toolkit_dirs = arguments.list("toolkit", ':');
  jit::configure(settings);
  std::ifstream file(arguments.of("stub"));
  const std::string stub{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  int devices = 0;
  check(driver().device_get_count(&devices), "cuDeviceGetCount");
  if (devices < 2)
    throw Error(ErrorKind::invalid_argument, "two GPUs are needed, and there is " + std::to_string(devices));
  Bench bench(stub, std::stod(arguments.of("seconds", "60")));
  const uint32_t blocks = static_cast<uint32_t>(std::stoul(arguments.of("blocks", "8")));
  for (const std::string& text : arguments.list("sizes", ',')) {
    const uint64_t bytes = std::stoull(text);
    for (const std::string& engine : arguments.list("engines", ',')) {
      if (engine == "packet" && bytes > kMostPacketBytes) continue;
      if (engine == "bulk" && !bench.has_bulk()) continue;
      if (bench.late()) {
        std::printf("{\"late\": true}\n");
        return 0;
      }
      bench.latency(engine, bytes);
      bench.throughput(engine, bytes, blocks);
    }
  }
  return 0;
}

}  // namespace

int main(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string text = values[i];
    const size_t at = text.find('=');
    if (at == std::string::npos) {
      std::fprintf(stderr, "dma: %s is not NAME=VALUE\n", text.c_str());
      return 2;
    }
    arguments.given[text.substr(0, at)] = text.substr(at + 1);
  }
  try {
    const int result = run(arguments);
    std::fflush(stdout);
    std::_Exit(result);  // the driver's threads and memory go with the process
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "dma: %s\n", error.what());
    std::_Exit(1);
  }
}

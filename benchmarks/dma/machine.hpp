// Two GPUs of one process with channels between them: memory, words and launches. The benchmark and the test use it.
//
// The driver's virtual memory API maps each GPU's memory for the other, as between processes. All kernels are loaded
// before the first launch, because loading can block while a kernel waits for another.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "copy_poster.hpp"
#include "cuda/driver.hpp"
#include "jit/kernel.hpp"
#include "params.cuh"
#include "proxy.hpp"

namespace ark::channels {

constexpr uint64_t kMost = 64 << 20;   // bytes per message
constexpr uint64_t kRing = 2 * kMost;  // bytes of all slots
constexpr uint64_t kResults = 2 * kMost;
constexpr uint32_t kLanes = 512;  // at most

// Offsets in each GPU's memory.
constexpr uint64_t kArrived = 0, kCredit = 64 << 10, kState = 128 << 10, kSpent = 160 << 10, kFlags = 192 << 10;
constexpr uint64_t kSource = 256 << 10, kSlots = kSource + kMost, kResult = kSlots + kRing, kTotal = kResult + kResults;
constexpr uint32_t kMostDepth = (kSource - kFlags) / sizeof(protocol::Flag);

struct Shape {
  std::string engine;
  uint64_t bytes = 0, slot_bytes = 0;  // of one lane's message
  uint32_t lanes = 1, depth = 2, count = 0, warm = 0;
  uint64_t result_stride = 0, step = 0, span = 1;
};

// Bytes that a message takes in its slot.
uint64_t slot_bytes(const std::string& engine, uint64_t bytes);
bool by_sm(const std::string& engine);  // whether SMs move the bytes

class Machine {
 public:
  explicit Machine(std::string stub);

  bool has_bulk() const { return major_ >= 9; }
  const char* random() const {
    return reinterpret_cast<const char*>(random_.data());
  }  // kMost bytes, each GPU's source

  // Zeroes words and slots, and with `results` the results, to remove traces of earlier runs.
  void prepare(const Shape& shape, bool results);
  // Posts the copies, or starts the proxies, for what GPU `d` sends. `first`: from its source, otherwise from its
  // slots.
  void post(int d, const Shape& shape, bool first);
  void start_proxy(int d);
  void launch(int d, const std::string& entry, const Shape& shape, uint32_t blocks, uint32_t threads, bool first);
  // Waits for both kernels and all copies. Throws Error(timeout) if a kernel gave up.
  void finish();
  // Same, for tests in which kernels must give up. Returns per GPU whether it did.
  std::vector<bool> finish_stuck();

  void sync(int d);
  void host_copy(int d, const Shape& shape, uint32_t number, bool first);  // driven by the host, synchronous
  std::vector<char> read(int d, uint64_t offset, uint64_t bytes);
  void write(int d, uint64_t offset, const void* from, uint64_t bytes);
  double spent_ns(uint32_t lanes);  // of GPU 0's slowest lane

  uint64_t limit_ns = 2'000'000'000;  // per wait in a kernel

 private:
  struct Gpu {
    explicit Gpu(int ordinal);
    char* at(uint64_t offset) const { return own.data() + offset; }
    char* there(uint64_t offset) const { return peer.data() + offset; }
    device::GroupStatus* status() const { return static_cast<device::GroupStatus*>(words.host()); }
    const int device;
    DeviceMemory own, peer;  // peer: the other GPU's, mapped for this one
    PinnedMemory words;
    CUstream kernels = nullptr;
    std::map<std::string, const jit::Kernel*> entries;
    std::unique_ptr<CopyPoster> poster;
    std::unique_ptr<Proxy> proxy;
  };

  const void* source_of(int d, const Shape& shape, uint64_t number, bool first) const;
  device::RunParams params(int d, const Shape& shape, bool first) const;
  size_t shared_bytes(const std::string& entry) const;

  const std::string stub_;
  int major_ = 0;
  std::vector<std::unique_ptr<Gpu>> gpus_;
  std::vector<uint64_t> random_;
};

}  // namespace ark::channels

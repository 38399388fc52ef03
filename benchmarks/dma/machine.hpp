// Two GPUs of one process with channels between them: memory, words, launches. For the benchmark and the test alike.
//
// The memory of each is mapped for the other by the driver's virtual memory API, as it would be between processes. All
// kernels are loaded before the first is launched: none may have to be loaded while another one waits for it.
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

constexpr uint64_t kMost = 64 << 20;   // bytes of a message
constexpr uint64_t kRing = 2 * kMost;  // of slots
constexpr uint64_t kResults = 2 * kMost;
constexpr uint32_t kLanes = 512;  // at most

// Offsets in each GPU's memory.
constexpr uint64_t kArrived = 0, kCredit = 64 << 10, kState = 128 << 10, kSpent = 160 << 10, kFlags = 192 << 10;
constexpr uint64_t kSource = 256 << 10, kSlots = kSource + kMost, kResult = kSlots + kRing, kTotal = kResult + kResults;
constexpr uint32_t kMostDepth = (kSource - kFlags) / sizeof(protocol::Flag);

struct Shape {
  std::string engine;
  uint64_t bytes = 0, slot_bytes = 0;  // of a lane's message
  uint32_t lanes = 1, depth = 2, count = 0, warm = 0;
  uint64_t result_stride = 0, step = 0, span = 1;
};

// Memory of a message in its slot.
uint64_t slot_bytes(const std::string& engine, uint64_t bytes);
bool by_sm(const std::string& engine);  // who moves the bytes

class Machine {
 public:
  explicit Machine(std::string stub);

  bool has_bulk() const { return major_ >= 9; }
  const char* random() const {
    return reinterpret_cast<const char*>(random_.data());
  }  // kMost bytes, each GPU's source

  // Words, slots and, with `results`, results: zero, whatever a run before left.
  void prepare(const Shape& shape, bool results);
  // Posts the copies, or starts the proxies, of what GPU `d` sends; `first`: from its source, else from its own slots.
  void post(int d, const Shape& shape, bool first);
  void start_proxy(int d);
  void launch(int d, const std::string& entry, const Shape& shape, uint32_t blocks, uint32_t threads, bool first);
  // Until both kernels and all copies are done. Error(timeout) where a kernel gave up.
  void finish();
  // The same where giving up is expected: per GPU, whether it did.
  std::vector<bool> finish_stuck();

  void sync(int d);
  void host_copy(int d, const Shape& shape, uint32_t number, bool first);  // driven by the host, waited for
  std::vector<char> read(int d, uint64_t offset, uint64_t bytes);
  void write(int d, uint64_t offset, const void* from, uint64_t bytes);
  double spent_ns(uint32_t lanes);  // of the slowest lane of GPU 0

  uint64_t limit_ns = 2'000'000'000;  // of a wait in a kernel

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

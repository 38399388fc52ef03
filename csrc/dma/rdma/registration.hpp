// Memory registrations for the NIC: registered once, held while in use and cached for a while after.
//
// Unused regions stay registered up to a bound; the one idle longest goes first. If a program returns such memory to
// the system, the region points to pages that it no longer owns, and nothing notifies us. So the bound is 0 unless the
// user vouches for the memory (ARK_RDMA_CACHE_MB). Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>

#include "dma/rdma/device.hpp"

namespace ark::rdma {

enum class Where : uint8_t { host, gpu };  // memory of the CPU, or of a CUDA device

class Registrations {
 public:
  Registrations(std::shared_ptr<Device> device, size_t most_idle_bytes);
  ~Registrations();  // release all Use objects first

  // A user's hold on a region that covers at least the requested range.
  class Use {
   public:
    Use() = default;
    Use(Use&& other) noexcept { swap(other); }
    Use& operator=(Use&& other) noexcept {
      Use taken(std::move(other));
      swap(taken);
      return *this;
    }
    ~Use() { reset(); }
    void reset();
    Use again() const;  // a further hold, without a call of the driver's or the system's
    explicit operator bool() const { return of_ != nullptr; }
    uint32_t local_key() const { return region_->lkey; }
    uint32_t remote_key() const { return region_->rkey; }

   private:
    friend class Registrations;
    Use(Registrations* of, ibv_mr* region) : of_(of), region_(region) {}
    void swap(Use& other) noexcept {
      std::swap(of_, other.of_);
      std::swap(region_, other.region_);
    }
    Registrations* of_ = nullptr;
    ibv_mr* region_ = nullptr;
  };

  // Throws Error(system), naming the limit in force, if the system refuses.
  // GPU memory goes to the NIC as a dma-buf (gpu_memory.hpp says whether both sides can do so).
  Use hold(const void* address, size_t bytes, Where where = Where::host);

  struct Counts {
    size_t held = 0, idle = 0, idle_bytes = 0;
    uint64_t registered = 0, reused = 0;  // totals
  };
  Counts counts() const;

 private:
  struct Region {
    uintptr_t begin = 0;  // ibv_mr::addr is an offset for a dma-buf
    size_t uses = 0;
    uint64_t buffer = 0;                // GPU memory: the driver's id of the allocation, which is never used again
    std::list<ibv_mr*>::iterator idle;  // valid if uses is 0
  };
  void release(ibv_mr* region);
  void drop_oldest() { drop(idle_.front()); }
  void drop(ibv_mr* region);  // an idle one
  Use take(ibv_mr* region);
  ibv_mr* find(uintptr_t begin, size_t bytes, uint64_t buffer);

  const std::shared_ptr<Device> device_;
  const size_t most_idle_bytes_;
  mutable std::mutex mutex_;
  std::map<ibv_mr*, Region> regions_;
  std::multimap<uintptr_t, ibv_mr*> by_address_;
  std::list<ibv_mr*> idle_;  // oldest first
  size_t idle_bytes_ = 0;
  uint64_t registered_ = 0, reused_ = 0;
};

}  // namespace ark::rdma

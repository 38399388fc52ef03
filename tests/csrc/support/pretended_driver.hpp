// The test interface of the pretended driver (pretended_memory.cpp).
#pragma once

#include <cstdint>

namespace ark::test {

// What this process has not released.
struct Pretended {
  int allocations;  // handles, own and imported
  int mappings;
  int addresses;   // reserved ranges
  int registered;  // ranges of host memory
  bool operator==(const Pretended&) const = default;
};

__attribute__((visibility("default"))) Pretended pretended();
// How peer access fails, and for which accesses: pretend_lie(how, ways, only). `only` selects the nth mapping of a
// peer's memory in this process, counted from 1; 0 selects all.
enum Lie { kHonest = 0, kLost = 1, kWrong = 2, kEndless = 3 };
enum LyingWay { kStores = 1, kCopies = 2 };
// A write by a device to any memory. `way` is one of the above.
__attribute__((visibility("default"))) void write_from_device(unsigned long long to, const void* from,
                                                              unsigned long bytes, int way);
bool is_endless();                             // a device operation started that never ends
void pinned(void* host, unsigned long bytes);  // 0: no longer pinned
// Allocations that were asked to be for NICs, too; and whether such are refused although the attribute offers them.
__attribute__((visibility("default"))) int allocated_for_nics();
__attribute__((visibility("default"))) void refuse_nics(bool refused);
// The next `count` mappings or registrations of this process fail.
__attribute__((visibility("default"))) void fail_mappings(int count);

}  // namespace ark::test

// In tests/support/pretended/driver.cpp: whether streams are captured and by which capture, the end of a capture's
// graph, and whether graphs refuse to own what launches use.
extern "C" void pretend_lie(int how, int ways, int only);
extern "C" void pretend_capture(uint64_t id);
extern "C" void pretend_graph_end(uint64_t id);
extern "C" void pretend_refuse_to_hold(int value);
extern "C" void pretend_dma_buf(int supported, int writes);
extern "C" void pretend_memory_for_nics(int offered);

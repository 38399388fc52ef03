// What tests ask of the pretended driver (pretended_memory.cpp).
#pragma once

#include <cstdint>

namespace ark::test {

// What this process has not given back.
struct Pretended {
  int allocations;  // handles, own and imported
  int mappings;
  int addresses;   // reserved ranges
  int registered;  // ranges of host memory
  bool operator==(const Pretended&) const = default;
};

__attribute__((visibility("default"))) Pretended pretended();
// How peer access lies, and for what: pretend_lie(how, ways, only). `only`: the so-manieth mapping of a peer's memory
// in this process, from 1 on; 0: all.
enum Lie { kHonest = 0, kLost = 1, kWrong = 2, kEndless = 3 };
enum LyingWay { kStores = 1, kCopies = 2 };
// What a device does to memory, whosever; `way`: one of those.
__attribute__((visibility("default"))) void write_from_device(unsigned long long to, const void* from,
                                                              unsigned long bytes, int way);
bool is_endless();                             // a device has begun what does not end
void pinned(void* host, unsigned long bytes);  // 0: no more
// The next `count` mappings or registrations of this process fail.
__attribute__((visibility("default"))) void fail_mappings(int count);

}  // namespace ark::test

// tests/support/pretended/driver.cpp: whether streams are captured, and by whom; the end of a capture's graph; whether
// graphs refuse to hold what launches use.
extern "C" void pretend_lie(int how, int ways, int only);
extern "C" void pretend_capture(uint64_t id);
extern "C" void pretend_graph_end(uint64_t id);
extern "C" void pretend_refuse_to_hold(int value);
extern "C" void pretend_dma_buf(int supported, int writes);

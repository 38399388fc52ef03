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
// The next `count` mappings or registrations of this process fail.
__attribute__((visibility("default"))) void fail_mappings(int count);

}  // namespace ark::test

// tests/support/pretended/driver.cpp: whether streams are captured, and by whom; the end of a capture's graph; whether
// graphs refuse to hold what launches use.
extern "C" void pretend_capture(uint64_t id);
extern "C" void pretend_graph_end(uint64_t id);
extern "C" void pretend_refuse_to_hold(int value);

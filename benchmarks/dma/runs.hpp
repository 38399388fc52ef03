// What the program does with its machine: measure engines (measure.cpp), or see that they carry what was put
// (check.cpp).
#pragma once

#include "machine.hpp"

namespace ark::channels {

// One line of JSON each: half a round trip, the best of several numbers of blocks; a stream of messages one way, on
// `blocks` SMs, the best of three.
void measure_latency(Machine& machine, const std::string& engine, uint64_t bytes);
void measure_throughput(Machine& machine, const std::string& engine, uint64_t bytes, uint32_t blocks);

// One line of JSON each, with the number of wrong bytes. Engines as in dma.py; further `stream`, `pull`, `add_f32`,
// `add_bf16`, `add_f16`, and with `stuck` a peer that never comes: both ends must give up in time.
void check_contents(Machine& machine, const std::string& engine, uint64_t bytes, uint64_t seed);
void check_sums(Machine& machine, const std::string& engine, uint64_t elements, uint64_t seed);
void check_stuck(Machine& machine, const std::string& engine);

}  // namespace ark::channels

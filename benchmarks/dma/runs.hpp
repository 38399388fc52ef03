// The two modes of the program: measure engines (measure.cpp), or check that they deliver what was put (check.cpp).
#pragma once

#include "machine.hpp"

namespace ark::channels {

// Each prints a line of JSON. Latency: half a round trip, the best of several block counts. Throughput: a one-way
// stream of messages on `blocks` SMs, the best of three.
void measure_latency(Machine& machine, const std::string& engine, uint64_t bytes);
void measure_throughput(Machine& machine, const std::string& engine, uint64_t bytes, uint32_t blocks);

// Each prints a line of JSON with the number of wrong bytes. Engines are those of dma.py, plus `stream`, `pull`,
// `add_f32`, `add_bf16`, `add_f16`, and `stuck`, whose peer never comes: both ends must give up in time.
void check_contents(Machine& machine, const std::string& engine, uint64_t bytes, uint64_t seed);
void check_sums(Machine& machine, const std::string& engine, uint64_t elements, uint64_t seed);
void check_stuck(Machine& machine, const std::string& engine);

}  // namespace ark::channels

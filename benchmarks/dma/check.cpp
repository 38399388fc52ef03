// Checks that channels deliver what was put, for every message of a run. Kernels keep the messages, and the host
// compares all bytes, because latency and bandwidth of wrong data mean nothing.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "runs.hpp"
#include "util/error.hpp"

namespace ark::channels {

namespace {

using Clock = std::chrono::steady_clock;

unsigned long long printed(uint64_t value) {
  return value;
}

uint32_t sender_threads(const std::string& engine, std::mt19937_64& random) {
  if (engine == "warp" || engine == "copy_engine" || engine == "proxy" || engine == "pull" || engine == "bulk")
    return 32;
  if (engine == "stream" || engine.starts_with("add_")) return 64;
  return 32u << random() % 6;
}

std::string receiver_of(const std::string& engine) {
  if (engine == "packet" || engine == "copy_engine" || engine == "pull") return engine + "_keep";
  return engine.starts_with("add_") ? "watch" : "keep";
}

void begin(Machine& machine, const Shape& shape, std::mt19937_64& random) {
  machine.prepare(shape, true);
  if (shape.engine == "copy_engine") machine.post(0, shape, true);
  if (shape.engine == "proxy") machine.start_proxy(0);
  const std::string receiver = receiver_of(shape.engine);
  const uint32_t threads = receiver == "pull_keep" || receiver == "watch" ? 32 : 32u << random() % 6;
  machine.launch(1, receiver, shape, 1, threads, false);
}

float decode(const std::string& type, const char* at) {
  uint16_t half = 0;
  std::memcpy(&half, at, 2);
  uint32_t bits = uint32_t{half} << 16;
  float value = 0;
  if (type == "add_f32") std::memcpy(&value, at, 4);
  if (type == "add_bf16") std::memcpy(&value, &bits, 4);
  if (type == "add_f16") {  // integers, which avoids subnormals and infinities
    const int exponent = half >> 10 & 31;
    value = exponent == 0 ? 0 : std::ldexp(1024.0f + (half & 1023), exponent - 25) * ((half >> 15) != 0 ? -1 : 1);
  }
  return value;
}

void encode(const std::string& type, int number, char* at) {
  const float value = static_cast<float>(number);
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  if (type == "add_f32") {
    std::memcpy(at, &bits, 4);
    return;
  }
  uint16_t half = static_cast<uint16_t>(bits >> 16);
  if (type == "add_f16")
    half = number == 0
               ? 0
               : static_cast<uint16_t>((bits >> 31) << 15 | ((bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 1023));
  std::memcpy(at, &half, 2);
}

}  // namespace

void check_contents(Machine& machine, const std::string& engine, uint64_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed * 1000003 + bytes);
  Shape shape{engine, bytes};
  shape.slot_bytes = slot_bytes(engine, bytes);
  shape.result_stride = (bytes + 15) / 16 * 16 + 16 * (random() % 3);
  shape.depth = static_cast<uint32_t>(1 + random() % 9);
  shape.count = static_cast<uint32_t>(
      std::clamp<uint64_t>((uint64_t{48} << 20) / shape.result_stride, 10, CopyPoster::kMostPosted));
  shape.span = (kMost - bytes) / 16 * 16, shape.step = (random() % shape.span) / 16 * 16 + 16;
  begin(machine, shape, random);
  machine.launch(0, engine + "_put", shape, 1, sender_threads(engine, random), true);
  machine.finish();
  const std::vector<char> kept = machine.read(1, kResult, shape.count * shape.result_stride);
  uint64_t wrong = 0;
  for (uint32_t n = 0; n < shape.count; ++n) {
    const char* at = kept.data() + n * shape.result_stride;
    const char* expected = machine.random() + n * shape.step % shape.span;
    if (std::memcmp(at, expected, bytes) != 0)
      for (uint64_t i = 0; i < bytes; ++i) wrong += at[i] != expected[i];
    for (uint64_t i = bytes; i < shape.result_stride; ++i) wrong += at[i] != 0;  // nothing is written past the end
  }
  std::printf(
      "{\"engine\": \"%s\", \"what\": \"contents\", \"bytes\": %llu, \"depth\": %u, \"messages\": %u, "
      "\"wrong\": %llu}\n",
      engine.c_str(), printed(bytes), shape.depth, shape.count, printed(wrong));
  std::fflush(stdout);
}

// Uses small integers, whose sums are exact in every format, so that the order of additions does not matter.
void check_sums(Machine& machine, const std::string& engine, uint64_t elements, uint64_t seed) {
  std::mt19937_64 random(seed * 1000003 + elements);
  const uint64_t each = engine == "add_f32" ? 4 : 2;
  Shape shape{engine, elements * each};
  shape.slot_bytes = 128, shape.depth = static_cast<uint32_t>(1 + random() % 4), shape.count = 7;
  shape.step = (shape.bytes + 15) / 16 * 16, shape.span = shape.step * shape.count;
  std::vector<char> sources(shape.span);
  std::vector<float> sums(elements + 16 / each);
  for (uint64_t n = 0; n < shape.count; ++n)
    for (uint64_t i = 0; i < elements; ++i) {
      const int number = static_cast<int>(random() % 33) - 16;
      encode(engine, number, &sources[n * shape.step + i * each]);
      sums[i] += static_cast<float>(number);
    }
  machine.write(0, kSource, sources.data(), sources.size());
  begin(machine, shape, random);
  machine.launch(0, engine + "_put", shape, 1, 64, true);
  machine.finish();
  machine.write(0, kSource, machine.random(), sources.size());
  const std::vector<char> found = machine.read(1, kResult, sums.size() * each);
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < sums.size(); ++i) wrong += decode(engine, &found[i * each]) == sums[i] ? 0 : each;
  std::printf(
      "{\"engine\": \"%s\", \"what\": \"contents\", \"bytes\": %llu, \"depth\": %u, \"messages\": %u, "
      "\"wrong\": %llu}\n",
      engine.c_str(), printed(shape.bytes), shape.depth, shape.count, printed(wrong));
  std::fflush(stdout);
}

void check_stuck(Machine& machine, const std::string& engine) {
  constexpr uint64_t kLimitMs = 300;
  std::mt19937_64 random(1);
  machine.limit_ns = kLimitMs * 1'000'000;
  for (const int alone : {0, 1}) {  // a sender whose messages nobody takes, then a receiver to which nobody sends
    Shape shape{engine, engine.starts_with("add_") ? uint64_t{4096} : uint64_t{10000}};
    shape.slot_bytes = slot_bytes(engine, shape.bytes), shape.result_stride = 16384;
    shape.depth = 4, shape.count = 20, shape.step = 16, shape.span = 1 << 20;
    machine.prepare(shape, false);
    if (engine == "copy_engine") machine.post(0, shape, true);
    if (engine == "proxy") machine.start_proxy(0);
    const Clock::time_point began = Clock::now();
    if (alone == 0)
      machine.launch(0, engine + "_put", shape, 1, sender_threads(engine, random), true);
    else
      machine.launch(1, receiver_of(engine), shape, 1, 32, false);
    const std::vector<bool> gave_up = machine.finish_stuck();
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - began).count();
    std::printf(
        "{\"engine\": \"%s\", \"what\": \"stuck\", \"alone\": \"%s\", \"gave_up\": %s, \"other_gave_up\": %s, "
        "\"ms\": %.1f, \"limit_ms\": %llu}\n",
        engine.c_str(), alone == 0 ? "sender" : "receiver", gave_up[alone] ? "true" : "false",
        gave_up[1 - alone] ? "true" : "false", ms, printed(kLimitMs));
    std::fflush(stdout);
  }
  machine.limit_ns = 2'000'000'000;
}

}  // namespace ark::channels

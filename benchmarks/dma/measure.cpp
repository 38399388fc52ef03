// Measures latency and throughput of an engine, and prints them as JSON.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "runs.hpp"
#include "util/error.hpp"

namespace ark::channels {

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kPiece = 64 << 10;  // streams split larger messages into pieces of this size
constexpr uint32_t kWarm = 20;

// Several warps share a block.
uint32_t blocks_of(const Shape& shape) {
  return shape.engine == "warp" ? (shape.lanes + 31) / 32 : shape.lanes;
}

// Kernels by the number of threads per block that drive a lane each.
const std::pair<const char*, uint32_t> kStreams[] = {{"bulk_send", 1}, {"bulk_send_2", 2}, {"bulk_send_4", 4}};

uint32_t threads_of(const Shape& shape) {
  if (shape.engine == "warp") return 32 * std::min(shape.lanes, 32u);
  if (shape.engine == "bulk" || !by_sm(shape.engine)) return 32;
  return static_cast<uint32_t>(std::clamp<uint64_t>((shape.bytes / 16 + 31) / 32 * 32, 32, 1024));
}

// Counts bytes of the last messages in a GPU's slots (or unpacked) that differ from the source.
uint64_t wrong_bytes(Machine& machine, int d, const Shape& shape) {
  const bool packets = shape.engine == "packet";
  const uint64_t stride = packets ? shape.result_stride : shape.slot_bytes;
  const uint32_t slots = packets ? 1 : std::min(shape.depth, shape.count);
  const std::vector<char> found =
      machine.read(d, packets ? kResult : kSlots,
                   std::min(packets ? kResults : kRing, stride * (packets ? 1 : shape.depth) * shape.lanes));
  uint64_t wrong = 0;
  for (uint32_t lane = 0; lane < shape.lanes; ++lane)
    for (uint32_t slot = 0; slot < slots; ++slot) {
      const char* at = found.data() + (uint64_t{lane} * (packets ? 1 : shape.depth) + slot) * stride;
      const char* expected = machine.random() + lane * shape.bytes;
      if (std::memcmp(at, expected, shape.bytes) == 0) continue;
      for (uint64_t i = 0; i < shape.bytes; ++i) wrong += at[i] != expected[i];
    }
  return wrong;
}

// The host drives everything: it waits for the producing kernel, copies, waits, and launches the consuming kernel.
// Returns microseconds one way, or seconds for all messages.
double by_host(Machine& machine, const Shape& shape, bool back_and_forth) {
  Clock::time_point began = Clock::now();
  for (uint32_t number = 0; number < shape.count; ++number) {
    if (number == kWarm && back_and_forth) began = Clock::now();
    for (int d = 0; d < (back_and_forth ? 2 : 1); ++d) {
      if (back_and_forth) machine.sync(d);
      machine.host_copy(d, shape, number, d == 0);
      machine.launch(1 - d, "look", shape, 1, 256, false);
    }
  }
  for (int d = 0; d < 2; ++d) machine.sync(d);
  const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
  return back_and_forth ? seconds * 1e6 / 2 / (shape.count - kWarm) : seconds;
}

double round_trips(Machine& machine, const Shape& shape) {
  if (shape.engine == "cpu") return by_host(machine, shape, true);
  for (int d = 0; d < 2; ++d) {
    if (shape.engine == "copy_engine") machine.post(d, shape, d == 0);
    if (shape.engine == "proxy") machine.start_proxy(d);
  }
  for (int d : {1, 0}) machine.launch(d, shape.engine + "_ping", shape, blocks_of(shape), threads_of(shape), d == 0);
  machine.finish();
  return machine.spent_ns(shape.lanes) / 2e3 / (shape.count - kWarm);
}

double stream(Machine& machine, const Shape& shape, uint32_t blocks) {
  if (shape.engine == "cpu") return by_host(machine, shape, false);
  if (shape.engine == "copy_engine") machine.post(0, shape, true);
  if (shape.engine == "proxy") machine.start_proxy(0);
  const bool unpacks = shape.engine == "packet";
  const std::string receiver = unpacks || shape.engine == "copy_engine" ? shape.engine + "_receive" : "watch";
  machine.launch(1, receiver, shape, shape.lanes, unpacks ? threads_of(shape) : 32, false);
  std::string sender = shape.engine + "_send";
  uint32_t threads = threads_of(shape);
  for (const auto& [entry, streams] : kStreams)
    if (shape.engine == "bulk" && shape.lanes == blocks * streams) sender = entry, threads = 64 * streams;
  machine.launch(0, sender, shape, shape.engine == "bulk" ? blocks : blocks_of(shape), threads, true);
  machine.finish();
  return machine.spent_ns(shape.lanes) * 1e-9;
}

unsigned long long printed(uint64_t value) {
  return value;
}

}  // namespace

void measure_latency(Machine& machine, const std::string& engine, uint64_t bytes) {
  double best = 0;
  uint32_t best_blocks = 0;
  uint64_t wrong = 0;
  const bool sm = by_sm(engine), warps = engine == "warp";
  for (uint32_t lanes : warps ? std::vector<uint32_t>{1, 8, 32, 256} : std::vector<uint32_t>{1, 4, 16}) {
    if (lanes > 1 && (!sm || bytes / lanes < (warps ? 512 : 1024))) break;
    Shape shape{engine, bytes / lanes};
    shape.slot_bytes = slot_bytes(engine, shape.bytes), shape.result_stride = shape.bytes;
    shape.lanes = lanes, shape.warm = kWarm;
    shape.depth = static_cast<uint32_t>(std::clamp<uint64_t>(kRing / (shape.slot_bytes * lanes), 2, 32));
    shape.count = bytes > (4 << 20) ? 40 : bytes > kPiece ? 100 : sm ? 500 : 160;
    machine.prepare(shape, engine == "packet");
    const double us = round_trips(machine, shape);
    if (engine != "cpu")
      for (int d = 0; d < 2; ++d) wrong += wrong_bytes(machine, d, shape);
    if (best_blocks == 0 || us < best) best = us, best_blocks = blocks_of(shape);
  }
  std::printf(
      "{\"engine\": \"%s\", \"what\": \"latency\", \"bytes\": %llu, \"us\": %.3f, \"blocks\": %u, \"wrong\": %llu}\n",
      engine.c_str(), printed(bytes), best, sm ? best_blocks : 0, printed(wrong));
  std::fflush(stdout);
}

void measure_throughput(Machine& machine, const std::string& engine, uint64_t bytes, uint32_t blocks) {
  const bool sm = by_sm(engine);
  std::vector<uint32_t> choices{!sm ? 1 : engine == "warp" ? 32 * blocks : blocks};
  if (engine == "bulk") choices = {blocks, 2 * blocks, 4 * blocks};
  double best = 0;
  uint32_t lanes = 0;
  uint64_t messages = 0, wrong = 0;
  for (uint32_t choice : choices) {
    Shape shape{engine, sm ? std::min(bytes, kPiece) : bytes};
    shape.slot_bytes = slot_bytes(engine, shape.bytes), shape.result_stride = shape.bytes;
    shape.lanes = choice;
    // Enough slots for a megabyte per lane in flight, so that late signals do not stall the stream.
    const uint64_t room = std::min<uint64_t>(sm ? 1 << 20 : kRing, kRing / shape.lanes);
    shape.depth = static_cast<uint32_t>(std::clamp<uint64_t>(room / shape.slot_bytes, 2, sm ? 256 : 64));
    const uint64_t wanted = (uint64_t{512} << 20) / (shape.bytes * shape.lanes);
    shape.count = static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 32, sm ? 4000 : CopyPoster::kMostPosted));
    for (int round = 0; round < 3; ++round) {
      machine.prepare(shape, engine == "packet");
      const double seconds = stream(machine, shape, blocks);
      if (engine != "cpu") wrong += wrong_bytes(machine, 1, shape);
      const double gbps = static_cast<double>(shape.bytes) * shape.lanes * shape.count / seconds * 1e-9;
      if (gbps > best) best = gbps, lanes = choice, messages = uint64_t{shape.count} * choice;
    }
  }
  std::printf(
      "{\"engine\": \"%s\", \"what\": \"throughput\", \"bytes\": %llu, \"gbps\": %.3f, \"blocks\": %u, \"lanes\": %u, "
      "\"messages\": %llu, \"wrong\": %llu}\n",
      engine.c_str(), printed(bytes), best, sm ? blocks : 0, lanes, printed(messages), printed(wrong));
  std::fflush(stdout);
}

}  // namespace ark::channels

// Runs a libFuzzer entry point for a bounded time without libFuzzer: a seeded loop that mutates valid inputs.
//
//   handle_fuzz [seconds [seed]]        a failure aborts; the same seed and build reproduce it
//   handle_fuzz file...                 runs each of these inputs once (like libFuzzer)
//
// With clang: -fsanitize=fuzzer -DARK_LIBFUZZER, and this file adds nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Valid inputs to start from. Each fuzz target defines it.
std::vector<std::vector<uint8_t>> fuzz_seeds();

#ifndef ARK_LIBFUZZER

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>

namespace {

void mutate(std::vector<uint8_t>& bytes, std::mt19937_64& random) {
  const size_t size = bytes.size();
  const auto anywhere = [&] { return size == 0 ? 0 : random() % size; };
  switch (random() % 7) {
    case 0:  // a bit
      if (size > 0) bytes[anywhere()] ^= static_cast<uint8_t>(1 << random() % 8);
      break;
    case 1:  // a byte, often an extreme value
      if (size > 0) bytes[anywhere()] = static_cast<uint8_t>(random() % 3 == 0 ? random() : (random() % 2 ? 0xff : 0));
      break;
    case 2:  // a 32-bit number
      for (size_t i = 0, at = anywhere(), value = random() % 2 ? random() : ~uint64_t{0}; i < 4 && at + i < size; ++i)
        bytes[at + i] = static_cast<uint8_t>(value >> (8 * i));
      break;
    case 3: bytes.resize(anywhere()); break;
    case 4: bytes.resize(size + random() % 64, static_cast<uint8_t>(random())); break;
    case 5:  // moves a piece
      for (size_t i = 0, from = anywhere(), to = anywhere(), n = random() % 16; i < n; ++i)
        if (from + i < size && to + i < size) bytes[to + i] = bytes[from + i];
      break;
    case 6:
      for (uint8_t& byte : bytes)
        if (random() % 16 == 0) byte = static_cast<uint8_t>(random());
      break;
  }
}

}  // namespace

int main(int argc, char** argv) {
  char* end = nullptr;
  const double limit = argc > 1 ? std::strtod(argv[1], &end) : 5.0;
  if (argc > 1 && *end != '\0') {
    for (int i = 1; i < argc; ++i) {
      std::ifstream file(argv[i], std::ios::binary);
      const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
      LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    return 0;
  }
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const auto seeds = fuzz_seeds();
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  uint64_t runs = 0;
  for (const auto& seed : seeds) LLVMFuzzerTestOneInput(seed.data(), seed.size());
  while (elapsed() < limit)
    for (int i = 0; i < 1000; ++i, ++runs) {
      std::vector<uint8_t> bytes = seeds[random() % seeds.size()];
      for (uint64_t n = 1 + random() % 4; n > 0; --n) mutate(bytes, random);
      LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
  std::printf("%llu inputs in %.1f s, no failure\n", static_cast<unsigned long long>(runs), elapsed());
  return 0;
}

#endif

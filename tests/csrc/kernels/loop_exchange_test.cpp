// Tests the loop kernels' collectives with threads as blocks: several workers per rank, tiles that are cut differently
// on every rank, and many steps that only each rank's own launches separate.
#include "cuda/loop/exchange.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace ark::loop {
namespace {

using device::DType;
using device::ReduceOp;

// One thread in place of a block's threads. It pauses at random where others could overtake it.
struct OneThread {
  static constexpr int kThreads = 1;
  std::mt19937& random;
  int thread() const { return 0; }
  device::Unit load(const char* from, uint64 unit, uint64 bytes) {
    if (random() % 512 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
    device::Unit value{0, 0};
    std::memcpy(&value, from + unit * 16, std::min<uint64>(16, bytes - unit * 16));
    return value;
  }
  void store(char* to, uint64 unit, uint64 bytes, const device::Unit& value) {
    std::memcpy(to + unit * 16, &value, std::min<uint64>(16, bytes - unit * 16));
  }
  bool over(int, uint64) {
    std::this_thread::yield();
    return false;
  }
};

struct Collective {
  Exchange what;
  int elements;  // per part
};

float value_of(int step, size_t collective, int rank, int element) {
  return static_cast<float>((step * 7 + static_cast<int>(collective) * 13 + rank * 5 + element) % 1013);
}

template <int kRanks>
class World {
 public:
  // `turns`: all collectives share two places, and each waits for the end of the one before it.
  explicit World(std::vector<Collective> collectives, bool turns = false)
      : collectives_(std::move(collectives)), turns_(turns) {
    for (const Collective& one : collectives_)
      place_ = std::max<uint64>(place_, kRanks * protocol::packet_bytes(4 * one.elements));
    half_ = place_ * (turns ? 2 : collectives_.size());
    for (int rank = 0; rank < kRanks; ++rank) {
      packets_.emplace_back(2 * half_ / 16, std::array<uint64, 2>{});
      at_[rank] = reinterpret_cast<char*>(packets_.back().data());
    }
  }

  // Returns how many results were wrong.
  int run(int steps) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back([=, this] { run_rank(rank, steps); });
    for (std::thread& one : ranks) one.join();
    return wrong_;
  }

 private:
  using Tensors = std::vector<std::vector<float>>;

  void run_rank(int rank, int steps) {
    const int workers = 2 + rank % 3;
    Tensors in, out;
    for (const Collective& one : collectives_) {
      in.emplace_back(one.elements * kRanks);
      out.emplace_back(one.elements * kRanks);
    }
    std::barrier launches(workers);
    const auto work = [&](int worker) {
      std::mt19937 random(static_cast<unsigned>(rank * 10 + worker));
      for (int step = 1; step <= steps; ++step) {
        if (worker == 0) {
          for (size_t k = 0; k < in.size(); ++k)
            for (size_t i = 0; i < in[k].size(); ++i) in[k][i] = value_of(step, k, rank, static_cast<int>(i));
        }
        launches.arrive_and_wait();
        for (size_t k = 0; k < in.size(); ++k) {
          run_tile(rank, worker, workers, step, k, in[k], out[k], random);
          if (turns_) launches.arrive_and_wait();
        }
        launches.arrive_and_wait();
        if (worker == 0)
          for (size_t k = 0; k < in.size(); ++k) check(rank, step, k, out[k]);
      }
    };
    std::vector<std::thread> others;
    for (int worker = 1; worker < workers; ++worker) others.emplace_back(work, worker);
    work(0);
    for (std::thread& one : others) one.join();
  }

  void run_tile(int rank, int worker, int workers, int step, size_t k, const std::vector<float>& in,
                std::vector<float>& out, std::mt19937& random) {
    const int elements = collectives_[k].elements, rows = (elements + 127) / 128, tiles = std::min(rows, workers);
    const int tile = (worker + static_cast<int>(k)) % workers;
    if (tile >= tiles) return;
    const auto bound = [&](int of) { return 4 * static_cast<uint64>(std::min(elements, rows * of / tiles * 128)); };
    OneThread block{random};
    const uint64 place = place_ * (turns_ ? k % 2 : k) + static_cast<uint64>(step % 2) * half_;
    const Exchanged with{at_.data(), place, rank, static_cast<uint64>(step) << 32 | (k + 1)};
    const auto go = [&](auto what, auto op) {
      exchange<what(), DType::f32, op(), kRanks>(block, with, in.data(), out.data(), 4 * elements, bound(tile),
                                                 bound(tile + 1));
    };
    switch (collectives_[k].what) {
      case Exchange::all_reduce: return go(is<Exchange::all_reduce>, is<ReduceOp::avg>);
      case Exchange::all_gather: return go(is<Exchange::all_gather>, is<ReduceOp::sum>);
      case Exchange::reduce_scatter: return go(is<Exchange::reduce_scatter>, is<ReduceOp::max>);
      case Exchange::all_to_all: return go(is<Exchange::all_to_all>, is<ReduceOp::sum>);
    }
  }
  template <auto kValue>
  static constexpr auto is = [] { return kValue; };

  void check(int rank, int step, size_t k, const std::vector<float>& out) {
    const int elements = collectives_[k].elements;
    for (int i = 0; i < elements; ++i) {
      float sum = 0, most = 0;
      bool same = true;
      for (int peer = 0; peer < kRanks; ++peer) {
        const float whole = value_of(step, k, peer, i), mine = value_of(step, k, peer, rank * elements + i);
        sum += whole;
        most = std::max(most, mine);
        if (collectives_[k].what == Exchange::all_gather) same = same && out[peer * elements + i] == whole;
        if (collectives_[k].what == Exchange::all_to_all) same = same && out[peer * elements + i] == mine;
      }
      if (collectives_[k].what == Exchange::all_reduce) same = out[i] == sum / kRanks;
      if (collectives_[k].what == Exchange::reduce_scatter) same = out[i] == most;
      if (!same) ++wrong_;
    }
  }

  const std::vector<Collective> collectives_;
  const bool turns_;
  uint64 place_ = 0, half_ = 0;
  std::vector<std::vector<std::array<uint64, 2>>> packets_;
  std::array<char*, kRanks> at_{};
  std::atomic<int> wrong_{0};
};

TEST(LoopExchangeTest, EveryCollectiveOfManySteps) {
  const std::vector<Collective> all = {{Exchange::all_reduce, 1000},
                                       {Exchange::all_gather, 333},
                                       {Exchange::reduce_scatter, 1024},
                                       {Exchange::all_to_all, 1},
                                       {Exchange::all_reduce, 513}};
  EXPECT_EQ(World<1>(all).run(5), 0);
  EXPECT_EQ(World<2>(all).run(40), 0);
  EXPECT_EQ(World<4>(all).run(20), 0);
  EXPECT_EQ(World<7>(all).run(10), 0);
  EXPECT_EQ(World<4>(all, true).run(20), 0);
}

// Nothing else holds back a rank that is one step ahead.
TEST(LoopExchangeTest, OneCollectiveAlone) {
  EXPECT_EQ(World<3>({{Exchange::all_reduce, 1000}}).run(300), 0);
}

}  // namespace
}  // namespace ark::loop

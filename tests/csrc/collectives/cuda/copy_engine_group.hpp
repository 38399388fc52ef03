// Simulates the ranks of a group with copy engines in one process. It draws operations, issues them from a thread per
// rank and knows the expected results.
#pragma once

#include <gtest/gtest.h>

#include <deque>

#include "collectives/cuda/copy_engine/copy_engine.hpp"
#include "collectives/cuda/fake_driver.hpp"

namespace ark::test {

using Values = std::vector<uint32_t>;

constexpr uint64_t kSlot = 4096;
constexpr uint64_t kBytes =
    4096 + 4 * (2 * 7 + 1) * kSlot;  // per rank: slots of 4 KB for eight ranks, larger ones for fewer

// The memory of all ranks, initially zero and aligned like device memory.
struct Memory {
  explicit Memory(int ranks) : bytes(new uint32_t[ranks * kBytes / 4]()), ranks(ranks) {}
  std::vector<char*> seen() const {
    std::vector<char*> made;
    for (int r = 0; r < ranks; ++r) made.push_back(reinterpret_cast<char*>(bytes.get()) + r * kBytes);
    return made;
  }
  std::unique_ptr<uint32_t[]> bytes;
  const int ranks;
};

// The tensors that one rank passes to the operations of a plan. All ranks know them, so that they can write to
// "registered" ones.
struct Tensors {
  Values in, out;
};

enum class Collective { all_reduce, reduce_scatter, all_gather, broadcast, all_to_all };
constexpr int kKinds = 5;

struct Step {
  Collective kind;
  uint64_t count;  // in words
  bool in_place;
  int root;
  uint64_t seed;
  bool registered;  // whether this step's output is
};

inline uint32_t value_of(uint64_t seed, int rank, uint64_t i) {
  return static_cast<uint32_t>((seed * 1000003 + rank * 7919 + i) * 2654435761u >> 7);
}

// Words that one rank sends to another in an all_to_all.
inline uint64_t count_of(const Step& step, int from, int to) {
  return (from * 3 + to * 5 + step.seed) % 4 == 0 ? 0 : step.count * (1 + (from + 2 * to) % 3) / 3;
}

// Either each stream has its own queue, or a rank's streams share one, including the user's.
enum class Queues { own, shared };

class Group {
 public:
  Group(int ranks, uint64_t seed, bool windows, Queues queues = Queues::own)
      : ranks_(ranks), windows_(windows), memory_(ranks), random_(seed) {
    use_driver(fake_driver());
    status_.resize(ranks);
    words_.resize(ranks);
    CopyEngine::Words words;
    for (int r = 0; r < ranks; ++r) {
      words_[r].resize(CopyEngine::words_bytes(ranks) / sizeof(uint32_t));
      CopyEngine::prepare(words_[r].data(), r, ranks);
      words.of.push_back(reinterpret_cast<CUdeviceptr>(words_[r].data()));
      words.host.push_back(words_[r].data());
    }
    constexpr uint64_t kPullBelow[] = {0, 20'000, 1 << 30};
    for (int r = 0; r < ranks; ++r) {
      if (queues != Queues::own) queues_.push_back(std::make_unique<FakeStream>(g_streams++));
      const OneQueue shared(queues != Queues::own ? queues_.back().get() : nullptr);
      engines_.push_back(std::make_unique<CopyEngine>(r, r, memory_.seen(), kBytes, words, &status_[r], &status_[r]));
      engines_.back()->pull_below = kPullBelow[seed % 3];
      engines_.back()->tail_bytes = 512;
      engines_.back()->apart_from = seed % 2 == 0 ? 0 : 6;
      engines_.back()->in_line_to = seed % 3 == 0 && r % 2 == 0 ? 0 : 1 << 30;  // ranks may choose differently
      check(driver().stream_create_with_priority(&streams_.emplace_back(), 0, -1), "stream");
    }
  }
  ~Group() {
    for (CUstream stream : streams_) driver().stream_synchronize(stream);
    engines_.clear();
    for (CUstream stream : streams_) driver().stream_destroy(stream);
  }

  Step draw() {
    Step step{};
    step.kind = static_cast<Collective>(random_() % kKinds);
    step.count = 1 + random_() % (random_() % 2 ? 40'000 : 900);
    step.in_place = random_() % 2;
    step.root = static_cast<int>(random_() % ranks_);
    step.seed = random_() % 1000;
    step.registered = windows_ && step.kind != Collective::all_to_all && random_() % 2;
    return step;
  }

  void prepare(const Step& step) {
    std::vector<Tensors>& made = tensors_.emplace_back(ranks_);
    for (int r = 0; r < ranks_; ++r) {
      uint64_t in = step.count, out = step.count;
      if (step.kind == Collective::reduce_scatter) in *= ranks_;
      if (step.kind == Collective::all_gather) out *= ranks_;
      if (step.kind == Collective::all_to_all) {
        in = out = 0;
        for (int p = 0; p < ranks_; ++p) in += count_of(step, r, p), out += count_of(step, p, r);
      }
      made[r].in.resize(in);
      for (uint64_t i = 0; i < in; ++i) made[r].in[i] = value_of(step.seed, r, i);
      made[r].out.assign(out, 0xdeadbeef);
      if (step.kind == Collective::broadcast && r == step.root) made[r].out = made[r].in;
      if (step.kind == Collective::all_reduce && step.in_place) made[r].out = made[r].in;
      if (step.kind == Collective::all_gather && step.in_place)
        std::copy(made[r].in.begin(), made[r].in.end(), made[r].out.begin() + r * step.count);
    }
    steps_.push_back(step);
  }

  // Issues all steps, with one thread per rank.
  void run() {
    std::vector<std::thread> issuers;
    for (int r = 0; r < ranks_; ++r)
      issuers.emplace_back([&, r] {
        for (size_t i = 0; i < steps_.size(); ++i) issue(r, steps_[i], tensors_[i]);
        driver().stream_synchronize(streams_[r]);
      });
    for (std::thread& issuer : issuers) issuer.join();
  }

  void check_results() const {
    for (size_t i = 0; i < steps_.size(); ++i)
      for (int r = 0; r < ranks_; ++r)
        ASSERT_EQ(tensors_[i][r].out, expected(steps_[i], r))
            << "step " << i << " kind " << static_cast<int>(steps_[i].kind) << " rank " << r << " of " << ranks_ << ", "
            << steps_[i].count << " words" << (steps_[i].registered ? ", registered" : "");
  }

  void issue(int rank, const Step& step, std::vector<Tensors>& all) {
    CopyEngine& engine = *engines_[rank];
    const CUstream stream = streams_[rank];
    Tensors& own = all[rank];
    const uint64_t bytes = 4 * step.count;
    const auto add = [this](const void* const* parts, void* sum, void* handed_out, uint64_t many, CUstream on) {
      const std::vector<const void*> from(parts, parts + ranks_);
      launch(on, [=] {
        for (uint64_t i = 0; i < many / 4; ++i) {
          uint32_t total = 0;
          for (const void* part : from) total += static_cast<const uint32_t*>(part)[i];
          static_cast<uint32_t*>(sum)[i] = total;
          if (handed_out != nullptr) static_cast<uint32_t*>(handed_out)[i] = total;
        }
      });
    };
    CopyEngine::Outputs outputs;
    outputs.mark = 2 + static_cast<uint32_t>(step.seed * 8 + static_cast<int>(step.kind)) * 2 + step.registered;
    const uint64_t place = step.kind == Collective::all_gather ? rank * bytes : 0;
    for (int r = 0; r < ranks_ && step.registered; ++r)
      outputs.at.push_back(reinterpret_cast<char*>(all[r].out.data()) + place);
    const CopyEngine::Outputs* const given = windows_ ? &outputs : nullptr;
    switch (step.kind) {
      case Collective::all_reduce:
        return engine.all_reduce(step.in_place ? own.out.data() : own.in.data(), own.out.data(), bytes, 4, stream, add,
                                 given);
      case Collective::reduce_scatter: {
        std::vector<const void*> ins;
        for (int r = 0; r < ranks_; ++r) ins.push_back(own.in.data() + r * step.count);
        return engine.reduce_scatter(ins.data(), own.out.data(), bytes, 4, stream, add);
      }
      case Collective::all_gather: {
        std::vector<CopyEngine::Message> sends;
        std::vector<CopyEngine::Place> receives;
        for (int r = 0; r < ranks_; ++r) {
          sends.push_back({step.in_place ? own.out.data() + rank * step.count : own.in.data(), bytes});
          receives.push_back({own.out.data() + r * step.count, bytes});
        }
        return engine.move(sends.data(), receives.data(), true, stream, given);
      }
      case Collective::broadcast: return engine.broadcast(own.out.data(), bytes, step.root, stream, given);
      case Collective::all_to_all: break;
    }
    std::vector<CopyEngine::Message> sends;
    std::vector<CopyEngine::Place> receives;
    uint64_t from = 0, to = 0;
    for (int r = 0; r < ranks_; ++r) {
      sends.push_back({own.in.data() + from, 4 * count_of(step, rank, r)});
      receives.push_back({own.out.data() + to, 4 * count_of(step, r, rank)});
      from += count_of(step, rank, r), to += count_of(step, r, rank);
    }
    engine.move(sends.data(), receives.data(), step.seed % 2 == 0, stream, given);
  }

  Values expected(const Step& step, int rank) const {
    Values made;
    const auto sum = [&](uint64_t i) {
      uint32_t total = 0;
      for (int r = 0; r < ranks_; ++r) total += value_of(step.seed, r, i);
      return total;
    };
    const auto put = [&](int source, uint64_t from, uint64_t count) {
      for (uint64_t i = 0; i < count; ++i) made.push_back(value_of(step.seed, source, from + i));
    };
    switch (step.kind) {
      case Collective::all_reduce:
        for (uint64_t i = 0; i < step.count; ++i) made.push_back(sum(i));
        break;
      case Collective::reduce_scatter:
        for (uint64_t i = 0; i < step.count; ++i) made.push_back(sum(rank * step.count + i));
        break;
      case Collective::all_gather:
        for (int r = 0; r < ranks_; ++r) put(r, 0, step.count);
        break;
      case Collective::broadcast: put(step.root, 0, step.count); break;
      case Collective::all_to_all:
        for (int r = 0; r < ranks_; ++r) {
          uint64_t from = 0;
          for (int p = 0; p < rank; ++p) from += count_of(step, r, p);
          put(r, from, count_of(step, r, rank));
        }
    }
    return made;
  }

  void release(const std::vector<int>& ranks) {
    std::atomic<bool> drained{false};
    std::thread releasing([&] {
      while (!drained)
        for (int r : ranks) engines_[r]->release_all();
    });
    for (int r : ranks) driver().stream_synchronize(streams_[r]);
    drained = true;
    releasing.join();
  }

  const int ranks_;
  const bool windows_;
  Memory memory_;
  std::mt19937_64 random_;
  std::vector<device::EngineStatus> status_;
  std::vector<std::vector<uint32_t>> words_;
  std::vector<std::unique_ptr<FakeStream>> queues_;
  std::vector<std::unique_ptr<CopyEngine>> engines_;
  std::vector<CUstream> streams_;
  std::vector<Step> steps_;
  std::deque<std::vector<Tensors>> tensors_;
};

}  // namespace ark::test

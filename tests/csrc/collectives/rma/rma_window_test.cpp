// Windows, ranks as threads: of one node over shared memory, of several over a pretended NIC; what is refused, what
// ends a wait, and what a rank that is gone leaves.
#include <cstring>
#include <thread>

#include "collectives/cpu/ranks.hpp"
#include "collectives/rma/rma_window.hpp"
#include "dma/rdma/support.hpp"
#include "support/pretended_driver.hpp"
#include "support/processes.hpp"

namespace ark::test {
namespace {

using std::chrono::milliseconds;
using Words = std::vector<uint32_t>;

OperationContext context_of(const char* name, milliseconds timeout = milliseconds(20000)) {
  return {name, 1, Clock::now() + timeout, timeout};
}

RmaWindow::Memory memory_of(uint64_t elements, bool shared, Words& own) {
  RmaWindow::Memory memory;
  memory.elements = elements;
  memory.item = sizeof(uint32_t);
  memory.type = 7;
  if (shared) {
    memory.segment = std::make_shared<SharedMemory>(SharedMemory::create("test", elements * sizeof(uint32_t) + 64));
    memory.data = memory.segment->data() + 64;  // not at its beginning
  } else {
    own.resize(elements);
    memory.data = reinterpret_cast<std::byte*>(own.data());
  }
  return memory;
}

// One rank of a group whose ranks are on these nodes.
struct Member {
  int rank = 0;
  ShmCommunicator* node = nullptr;
  std::shared_ptr<RmaWindow> window;
  Words* memory = nullptr;  // where no node shares it
  RmaWindow::Memory offered;
  std::optional<Error> failed;  // told to the group
  uint32_t* words() const { return reinterpret_cast<uint32_t*>(offered.data); }
};

using Body = std::function<void(Member&)>;

// The ranks' threads; what one throws is in its place.
std::vector<std::optional<Error>> run(
    const std::vector<int>& node_of, const Body& body,
    const std::function<uint64_t(int)>& elements = [](int) { return 1000; }, const Body& instead_of_offer = {},
    const std::function<RmaWindow::Memory(int)>& offer_of = {}) {
  const int size = static_cast<int>(node_of.size());
  const int nodes = *std::max_element(node_of.begin(), node_of.end()) + 1;
  TemporaryDirectory directory;
  std::vector<Job> jobs;
  std::vector<std::vector<int>> members(nodes);
  for (int rank = 0; rank < size; ++rank) members[node_of[rank]].push_back(rank);
  for (int node = 0; node < nodes; ++node) jobs.push_back(make_job(static_cast<int>(members[node].size())));
  std::unique_ptr<rdma_test::Group> network;
  if (nodes > 1) network = std::make_unique<rdma_test::Group>(size);
  std::vector<std::optional<Error>> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const int node = node_of[rank];
      const std::vector<int>& own = members[node];
      const int local = static_cast<int>(std::find(own.begin(), own.end(), rank) - own.begin());
      ShmOptions options = default_options();
      options.names = own;
      ShmCommunicator group(local, static_cast<int>(own.size()), std::move(jobs[node].ranks[local]), options);
      Member member;
      Words words;
      member.rank = rank;
      member.node = &group;
      member.memory = &words;
      try {
        RmaWindow::Setup setup;
        setup.rank = rank;
        setup.size = size;
        setup.own = own;
        setup.health = &group.health();
        setup.store = std::make_shared<DirectoryStore>(directory.path());
        setup.prefix = "window";
        setup.number = 1;
        setup.timeout = milliseconds(20000);
        setup.fail = [&](const Error& error) {
          group.health().fail(error);
          member.failed = error;
        };
        if (network) setup.messages = network->ranks[rank];
        std::string why;
        if (own.size() > 1) {
          setup.meeting = MemoryMeeting::join(
              *setup.store,
              {local, static_cast<int>(own.size()), milliseconds(20000), "meet/" + std::to_string(node), [] {}}, why);
          if (!setup.meeting) throw Error(ErrorKind::system, why);
        }
        const auto offer = [&] {
          if (instead_of_offer) instead_of_offer(member);
          if (offer_of) return member.offered = offer_of(rank);
          return member.offered = memory_of(elements(rank), own.size() > 1, words);
        };
        member.window = RmaWindow::open(std::move(setup), offer);
        body(member);
        if (!member.failed) member.window->close();
        group.health().say_goodbye();
      } catch (const Error& error) {
        errors[rank] = error;
      }
      member.window.reset();
      group.point_to_point().stop();
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

// Every rank writes to every other one, many times, by signals alone.
void exchange(Member& member, int size, int rounds) {
  RmaWindow& window = *member.window;
  const auto context = context_of("exchange");
  Words data(40);
  for (int round = 0; round < rounds; ++round) {
    std::vector<RmaWindow::Transfer> transfers;
    for (int peer = 0; peer < size; ++peer) {
      std::fill(data.begin(), data.end(), 1000u * round + member.rank);
      if (const auto transfer = window.put(context, peer, 7, data.data(), data.size(), 40 * member.rank))
        while (!window.wait(context, peer, *transfer, Clock::now() + milliseconds(100))) {
        }
      window.signal(context, peer);
    }
    for (int peer = 0; peer < size; ++peer) {
      const uint64_t signal = window.expect(context, peer);
      EXPECT_TRUE(window.wait(context, peer, signal, Clock::time_point::max()));
      EXPECT_TRUE(window.arrived(peer, signal));
      for (int i = 0; i < 40; ++i) EXPECT_EQ(member.words()[40 * peer + i], 1000u * round + peer);
    }
    // Nobody writes the next round before all have read this one.
    for (int peer = 0; peer < size; ++peer) window.signal(context, peer);
    for (int peer = 0; peer < size; ++peer)
      window.wait(context, peer, window.expect(context, peer), Clock::time_point::max());
  }
  for (int peer = 0; peer < size; ++peer) EXPECT_FALSE(window.arrived(peer, 2 * rounds + 1));
}

// Without close() or goodbye.
void leave() {
  throw Error(ErrorKind::aborted, "gone");
}

class RmaWindowTest : public rdma_test::RdmaTest {
 protected:
  void SetUp() override {
    static const bool warm = run({0, 0}, [](Member&) {}).empty();  // the process's monitor of peers keeps a descriptor
    (void)warm;
    RdmaTest::SetUp();
  }
};

TEST_F(RmaWindowTest, PutsAreThereWhenTheirSignalsAre) {
  for (const auto& nodes : {std::vector<int>{0, 0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 1}, {0}}) {
    const int size = static_cast<int>(nodes.size());
    expect_no_errors(run(nodes, [&](Member& member) { exchange(member, size, 20); }));
  }
}

TEST_F(RmaWindowTest, SignalsOverABadLink) {
  control().loss = 200;
  control().lose_completions = 3;
  control().swap_completions = 1;
  expect_no_errors(run({0, 1}, [&](Member& member) { exchange(member, 2, 20); }));
}

TEST_F(RmaWindowTest, LargePutsAndManySignals) {
  constexpr uint64_t kElements = 700'000;
  for (const auto& nodes : {std::vector<int>{0, 0}, {0, 1}}) {
    expect_no_errors(run(
        nodes,
        [&](Member& member) {
          RmaWindow& window = *member.window;
          const auto context = context_of("large");
          const int peer = 1 - member.rank;
          Words data(kElements);
          for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint32_t>(i * 7 + member.rank);
          std::vector<RmaWindow::Transfer> transfers;
          for (uint64_t at = 0; at < kElements; at += 100'000)
            transfers.push_back(window.put(context, peer, 7, data.data() + at, 100'000, static_cast<int64_t>(at)));
          for (int n = 0; n < 300; ++n) window.signal(context, peer);  // more than slots
          for (int n = 0; n < 300; ++n)
            EXPECT_TRUE(window.wait(context, peer, window.expect(context, peer), Clock::time_point::max()));
          for (size_t i = 0; i < data.size(); ++i)
            ASSERT_EQ(member.words()[i], static_cast<uint32_t>(i * 7 + peer)) << i;
          // What was put is held until it is there.
          for (auto& transfer : transfers) {
            if (transfer) {
              EXPECT_TRUE(window.wait(context, peer, *transfer, Clock::time_point::max()));
            }
          }
        },
        [](int) { return kElements; }));
  }
}

std::string refused(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_FALSE(error.context().remedy.empty()) << error.what();
    return std::string(name_of(error.kind())) + ": " + error.message();
  }
  return "nothing";
}

TEST_F(RmaWindowTest, WhatDoesNotFitIsRefusedBeforeAByteMoves) {
  for (const auto& nodes : {std::vector<int>{0, 0}, {0, 1}}) {
    expect_no_errors(run(
        nodes,
        [&](Member& member) {
          RmaWindow& window = *member.window;
          const auto context = context_of("put");
          Words data(20);
          if (member.rank == 0) {
            const auto put = [&](int peer, uint32_t type, uint64_t elements, int64_t offset) {
              return refused([&] { window.put(context, peer, type, data.data(), elements, offset); });
            };
            EXPECT_EQ(put(1, 7, 20, 0),
                      std::string(name_of(ErrorKind::invalid_argument)) +
                          ": 20 elements from target_offset_nelems 0 on are beyond the window of rank 1, which has 12");
            EXPECT_NE(put(1, 7, 3, 10).find("3 elements from target_offset_nelems 10"), std::string::npos);
            EXPECT_NE(put(1, 7, 1, -1).find("target_offset_nelems -1"), std::string::npos);
            EXPECT_NE(put(1, 7, 1, INT64_MAX).find("beyond the window"), std::string::npos);
            EXPECT_NE(put(1, 6, 1, 0).find("another dtype"), std::string::npos);
            EXPECT_NE(put(2, 7, 1, 0).find("rank is 2"), std::string::npos);
            EXPECT_NE(put(-1, 7, 1, 0).find("rank is -1"), std::string::npos);
            EXPECT_EQ(window.put(context, 1, 7, data.data(), 0, 12), nullptr);
          }
          EXPECT_FALSE(member.failed);  // the caller's mistakes are nobody else's
          window.signal(context, 1 - member.rank);
          window.wait(context, 1 - member.rank, window.expect(context, 1 - member.rank), Clock::time_point::max());
          for (uint64_t i = 0; i < member.offered.elements; ++i) EXPECT_EQ(member.words()[i], 0u);
          EXPECT_EQ(window.of(1).elements, 12u);
        },
        [](int rank) { return rank == 1 ? 12 : 5; }));
  }
}

// In a node copy engines write it; to other nodes the NIC, from the memory that the node maps.
TEST_F(RmaWindowTest, GpuMemory) {
  driver();
  pretend_dma_buf(1, 100);
  const test::Pretended before = test::pretended();
  for (const auto& nodes : {std::vector<int>{0, 0}, {0, 0, 0}, {0, 0, 1, 1}}) {
    const int size = static_cast<int>(nodes.size());
    std::vector<void*> pools(size);
    const auto offer = [&](int rank) {
      RmaWindow::Memory memory;
      memory.elements = 1000, memory.item = sizeof(uint32_t), memory.type = 7;
      pools[rank] = ark_pool_alloc(8192, rank, nullptr);
      memory.where = rdma::Where::gpu;
      memory.device = rank;
      memory.data = static_cast<std::byte*>(pools[rank]) + 256;
      memory.gpu = find_shareable(memory.data, 4000);
      return memory;
    };
    expect_no_errors(run(
        nodes,
        [&](Member& member) {
          RmaWindow& window = *member.window;
          const auto context = context_of("exchange");
          void* const staged = ark_pool_alloc(4096, member.rank, nullptr);
          auto* const words = static_cast<uint32_t*>(staged);
          for (uint32_t round = 0; round < 5; ++round) {
            std::fill(words, words + 100, 1000 * round + member.rank);
            for (int peer = 0; peer < size; ++peer) {
              const auto transfer =
                  window.put(context, peer, 7, words, 100, 100 * member.rank, nullptr, rdma::Where::gpu);
              while (transfer && !window.wait(context, peer, *transfer, Clock::now() + milliseconds(100))) {
              }
              window.signal(context, peer);
            }
            for (int peer = 0; peer < size; ++peer) {
              EXPECT_TRUE(window.wait(context, peer, window.expect(context, peer), Clock::time_point::max()));
              for (int i = 0; i < 100; ++i) EXPECT_EQ(member.words()[100 * peer + i], 1000 * round + peer);
            }
            for (int peer = 0; peer < size; ++peer) window.signal(context, peer);
            for (int peer = 0; peer < size; ++peer)
              window.wait(context, peer, window.expect(context, peer), Clock::time_point::max());
          }
          for (int peer = 0; peer < size; ++peer)
            EXPECT_EQ(window.mapped(peer).first != nullptr, nodes[peer] == nodes[member.rank]);
          ark_pool_free(staged, 4096, member.rank, nullptr);
        },
        [](int) { return 1000; }, {}, offer));
    for (int rank = 0; rank < size; ++rank) ark_pool_free(pools[rank], 8192, rank, nullptr);
  }
  EXPECT_EQ(test::pretended(), before);
}

TEST_F(RmaWindowTest, ANodesRanksOfferOneKindOfMemory) {
  driver();
  std::vector<uint32_t> own;
  void* const pool = ark_pool_alloc(8192, 1, nullptr);
  const auto offer = [&](int rank) {
    if (rank == 0) return memory_of(1000, true, own);
    RmaWindow::Memory memory;
    memory.elements = 1000, memory.item = sizeof(uint32_t), memory.type = 7;
    memory.where = rdma::Where::gpu, memory.device = 1;
    memory.data = static_cast<std::byte*>(pool);
    memory.gpu = find_shareable(pool, 4000);
    return memory;
  };
  for (const auto& error : run(
           {0, 0}, [](Member&) { FAIL() << "there is no window"; }, [](int) { return 1000; }, {}, offer)) {
    ASSERT_TRUE(error);
    EXPECT_NE(std::string(error->what()).find("that of rank 0 on the CPU, that of rank 1 on a GPU"), std::string::npos)
        << error->what();
  }
  ark_pool_free(pool, 8192, 1, nullptr);
}

TEST_F(RmaWindowTest, WhatOneRankLacksIsEveryRanksError) {
  for (const auto& nodes : {std::vector<int>{0, 0}, {0, 1}, {0, 0, 1, 1}}) {
    const auto errors = run(
        nodes, [](Member&) { FAIL() << "there is no window"; }, [](int) { return 10; },
        [](Member& member) {
          if (member.rank == 1)
            throw Error(ErrorKind::invalid_argument, "tensor is not contiguous",
                        ErrorContext{1, -1, "", 0, "Make it so."});
        });
    for (const auto& error : errors) {
      ASSERT_TRUE(error);
      EXPECT_NE(std::string(error->what()).find("tensor is not contiguous"), std::string::npos) << error->what();
      EXPECT_EQ(error->kind(), ErrorKind::invalid_argument);
    }
  }
}

TEST_F(RmaWindowTest, AWaitEndsAtItsDeadlineAndNamesTheRank) {
  for (const auto& nodes : {std::vector<int>{0, 0}, {0, 1}}) {
    const auto errors = run(nodes, [](Member& member) {
      RmaWindow& window = *member.window;
      if (member.rank == 1) {
        std::this_thread::sleep_for(milliseconds(600));
        leave();
      }
      const auto context = context_of("wait_signal", milliseconds(100));
      const uint64_t signal = window.expect(context, 1);
      EXPECT_FALSE(window.wait(context, 1, signal, Clock::now()));  // an own, shorter patience ends nothing
      window.wait(context, 1, signal, Clock::time_point::max());
    });
    ASSERT_TRUE(errors[0]);
    EXPECT_EQ(errors[0]->kind(), ErrorKind::timeout);
    EXPECT_EQ(errors[0]->context().peer, 1);
    EXPECT_NE(std::string(errors[0]->what()).find("rank 1 sent no signal within 100 ms"), std::string::npos)
        << errors[0]->what();
  }
}

TEST_F(RmaWindowTest, ARankThatIsGoneEndsTheWaitForIt) {
  const auto errors = run({0, 0}, [&](Member& member) {
    if (member.rank == 1) leave();
    const auto context = context_of("wait_signal");
    member.window->wait(context, 1, member.window->expect(context, 1), Clock::time_point::max());
  });
  ASSERT_TRUE(errors[0]);
  EXPECT_EQ(errors[0]->kind(), ErrorKind::peer_lost) << errors[0]->what();
  EXPECT_EQ(errors[0]->context().peer, 1);
}

// It sends nothing, and the link is gone: the waiting rank asks, and what it put before fails as well.
TEST_F(RmaWindowTest, ALinkThatIsGoneEndsTheWait) {
  const auto errors = run({0, 1}, [&](Member& member) {
    const auto context = context_of("wait_signal");
    exchange(member, 2, 1);
    if (member.rank == 1) {
      std::this_thread::sleep_for(milliseconds(1500));
      leave();
    }
    control().link_down = 1;
    EXPECT_THROW(member.window->wait(context, 1, member.window->expect(context, 1), Clock::time_point::max()), Error);
    ASSERT_TRUE(member.failed);
    EXPECT_EQ(member.failed->kind(), ErrorKind::peer_lost) << member.failed->what();
    EXPECT_EQ(member.failed->context().peer, 1);
    EXPECT_THROW(member.window->signal(context, 1), Error);  // the group has failed
    throw *member.failed;
  });
  ASSERT_TRUE(errors[0]);
  control().link_down = 0;
}

// Another rank's failure, told through the node's health, ends a wait on a third one.
TEST_F(RmaWindowTest, AGroupThatFailsEndsItsWaits) {
  const auto errors = run({0, 0, 1}, [&](Member& member) {
    const auto context = context_of("wait_signal");
    if (member.rank == 1) {
      std::this_thread::sleep_for(milliseconds(50));
      member.node->health().fail(Error(ErrorKind::aborted, "abort() was called", ErrorContext{1, 1, "abort", 0, ""}));
      leave();
    }
    if (member.rank == 2) {
      std::this_thread::sleep_for(milliseconds(1500));
      leave();
    }
    for (const int peer : {1, 2})
      EXPECT_THROW(member.window->wait(context, peer, member.window->expect(context, peer), Clock::time_point::max()),
                   Error);
    throw *member.failed;
  });
  ASSERT_TRUE(errors[0]);
  EXPECT_NE(std::string(errors[0]->what()).find("abort() was called"), std::string::npos) << errors[0]->what();
}

}  // namespace
}  // namespace ark::test

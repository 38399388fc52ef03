// Tests channels over a pretended NIC: order, credits, batches, lost or swapped completions, and every kind of failure.
#include <cstring>
#include <thread>

#include "dma/rdma/status.hpp"
#include "support.hpp"

namespace ark::rdma_test {
namespace {

using ChannelTest = RdmaTest;

// Writes a number to slot n of the peer's inbox and signals it.
void send_number(Channel& channel, uint64_t n) {
  std::byte* slot = channel.outbox(n);
  std::memcpy(slot, &n, sizeof n);
  channel.put_with_signal(slot, channel.outbox_key(), sizeof n, channel.remote_slot(n), channel.remote_key(),
                          static_cast<uint32_t>(n & 0xffffff));
}

uint64_t receive_number(Channel& channel, uint64_t n) {
  EXPECT_EQ(channel.wait(soon()), n & 0xffffff);
  uint64_t found;
  std::memcpy(&found, channel.inbox(n), sizeof found);
  channel.release();
  return found;
}

TEST_F(ChannelTest, SignalsComeInOrderWithWhatWasPutBefore) {
  ChannelPair pair;
  auto target = std::vector<uint8_t>(3 << 20);
  const auto source = pattern(target.size(), 5);
  auto there = pair.engines[1]->memory().hold(target.data(), target.size());
  auto here = pair.engines[0]->memory().hold(source.data(), source.size());
  // Longer than this NIC's largest message, so it goes in pieces.
  pair[0].put(source.data(), here.local_key(), source.size(), reinterpret_cast<uint64_t>(target.data()),
              there.remote_key());
  const uint64_t last = pair[0].signal(7);
  EXPECT_EQ(pair[1].wait(soon()), 7u);
  EXPECT_EQ(target, source);
  pair[0].flush(soon());
  EXPECT_TRUE(pair[0].done(last));
}

// A fast sender stops when it runs out of credits. A receive is never missing.
TEST_F(ChannelTest, AReceiverIsNeverNotReady) {
  const uint64_t before = pretend_counts()->not_ready;
  ChannelPair pair({8, 256});
  constexpr uint64_t kMessages = 600;
  std::thread sender([&] {
    for (uint64_t n = 0; n < kMessages; ++n) {
      // By the credits, a slot may be refilled once its last write is done and the peer has released it.
      pair[0].flush(soon());
      send_number(pair[0], n);
    }
    pair[0].flush(soon());
  });
  for (uint64_t n = 0; n < kMessages; ++n) EXPECT_EQ(receive_number(pair[1], n), n);
  sender.join();
  EXPECT_EQ(pretend_counts()->not_ready, before);
  EXPECT_GE(pair[0].counts().least_credits, 1u);  // the last one was reserved for returning credits
  EXPECT_GT(pair[1].counts().credit_signals, 0u);
}

// Both sides only send, and release messages late. The reserved credit keeps them going.
TEST_F(ChannelTest, TwoThatOnlySendDoNotStop) {
  ChannelPair pair({4, 256});
  constexpr uint64_t kMessages = 400;
  const auto run = [&](int rank) {
    uint64_t sent = 0, received = 0;
    while (received < kMessages) {
      for (int burst = 0; burst < 16 && sent < kMessages; ++burst, ++sent) pair[rank].signal(sent & 0xffffff);
      EXPECT_EQ(pair[rank].wait(soon()), received & 0xffffff);
      pair[rank].release();
      ++received;
    }
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
}

TEST_F(ChannelTest, RequestsArePostedTogetherAndFewAskForCompletions) {
  auto engines = std::array{new_engine(), new_engine()};
  Channel a(engines[0], 0, 1, 2, {}), b(engines[1], 1, 0, 2, {});
  for (uint32_t n = 0; n < 60; ++n) a.signal(n);  // before they are connected
  a.connect(b.endpoint(), 4096);
  b.connect(a.endpoint(), 4096);
  for (uint32_t n = 0; n < 60; ++n) {
    EXPECT_EQ(b.wait(soon()), n);
    b.release();
  }
  a.flush(soon());
  const auto counts = a.counts();
  EXPECT_LE(counts.calls, 6u) << counts.posted;
  EXPECT_LE(counts.asked, 10u);
}

class Completions : public RdmaTest, public ::testing::WithParamInterface<const char*> {};

// A later completion covers lost ones. Swapped ones must not reduce what is known to be done.
TEST_P(Completions, LostAndSwappedOnesDoNoHarm) {
  const std::string which = GetParam();
  if (which != "swapped") control().lose_completions = 2;
  if (which != "lost") control().swap_completions = 1;
  ChannelPair pair({16, 256});
  std::thread sender([&] {
    for (uint64_t n = 0; n < 300; ++n) {
      if (n % 5 == 0) pair[0].flush(soon());
      pair[0].signal(static_cast<uint32_t>(n));
    }
    pair[0].flush(soon());
  });
  for (uint64_t n = 0; n < 300; ++n) {
    EXPECT_EQ(pair[1].wait(soon()), n);
    pair[1].release();
  }
  sender.join();
}
INSTANTIATE_TEST_SUITE_P(Of, Completions, ::testing::Values("lost", "swapped", "both"));

TEST_F(ChannelTest, AReceiverThatIsNotReadyIsTriedAgain) {
  control().receiver_not_ready = 3;
  const uint64_t before = pretend_counts()->not_ready;
  ChannelPair pair;
  pair[0].signal(1);
  EXPECT_EQ(pair[1].wait(soon()), 1u);
  EXPECT_EQ(pretend_counts()->not_ready - before, 3u);
  pair[0].flush(soon());
}

TEST_F(ChannelTest, AReceiverThatStaysNotReadyIsAnErrorWhereTriesAreBounded) {
  auto options = pretended_options();
  options.rnr_retry = 2;
  ChannelPair pair({}, options);
  control().receiver_not_ready = 1000;
  pair[0].signal(1);
  try {
    pair[0].flush(soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("not ready to receive"), std::string::npos) << error.what();
    EXPECT_EQ(error.context().peer, 1);
  }
}

TEST_F(ChannelTest, AWrongKeyIsRefusedAndEndsBothSides) {
  ChannelPair pair;
  pair[0].signal(1);
  EXPECT_EQ(pair[1].wait(soon()), 1u);
  pair[1].release();
  control().wrong_keys = 1;
  // Too long to be sent inline, and registered on both sides.
  pair[0].put(pair[0].outbox(0), pair[0].outbox_key(), 4096, pair[0].remote_slot(0), pair[0].remote_key());
  try {
    pair[0].flush(soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("refused access"), std::string::npos) << error.what();
    EXPECT_EQ(error.context().rank, 0);
    EXPECT_EQ(error.context().peer, 1);
    EXPECT_EQ(error.context().operation, "rdma write");
    EXPECT_FALSE(error.context().remedy.empty());
  }
  EXPECT_THROW(pair[1].wait(soon()), Error);
  EXPECT_TRUE(pair[0].drain(soon()));
}

TEST_F(ChannelTest, LossIsSurvived) {
  control().loss = 500;  // 5%
  const uint64_t before = pretend_counts()->sent_again;
  auto options = pretended_options();
  options.timeout = 11;  // 8 ms
  ChannelPair pair({8, 256}, options);
  std::thread sender([&] {
    for (uint64_t n = 0; n < 400; ++n) {
      pair[0].flush(soon());
      send_number(pair[0], n);
    }
    pair[0].flush(soon());
  });
  for (uint64_t n = 0; n < 400; ++n) EXPECT_EQ(receive_number(pair[1], n), n);
  sender.join();
  EXPECT_GT(pretend_counts()->lost, 0u);
  EXPECT_GT(pretend_counts()->sent_again, before);
}

TEST_F(ChannelTest, ALinkThatComesBackIsSurvivedAndOneThatStaysAwayIsNot) {
  auto options = pretended_options();
  options.timeout = 15;  // 134 ms, repeated seven times
  ChannelPair pair({}, options);
  control().link_down = 1;
  pair[0].signal(9);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_FALSE(pair[0].failure());
  control().link_down = 0;
  EXPECT_EQ(pair[1].wait(soon()), 9u);
  pair[1].release();
  pair[0].flush(soon());
  control().link_down = 1;
  pair[1].probe();  // how a rank that only waits detects the failure
  try {
    pair[1].wait(soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::peer_lost);
    EXPECT_EQ(error.context().peer, 0);
    EXPECT_NE(std::string(error.what()).find("did not answer"), std::string::npos) << error.what();
  }
}

TEST_F(ChannelTest, APeerThatIsGoneIsNoticed) {
  ChannelPair pair;
  pair.ends[1].reset();
  pair[0].signal(1);
  try {
    pair[0].flush(soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::peer_lost) << error.what();
  }
}

TEST_F(ChannelTest, AFlushedQueueIsAnErrorOnce) {
  ChannelPair pair;
  pretend_break_pairs();
  EXPECT_THROW(pair[0].wait(soon()), Error);
  const auto failure = pair[0].failure();
  ASSERT_TRUE(failure);
  EXPECT_NE(std::string(failure->what()).find("had failed before"), std::string::npos) << failure->what();
  pair[0].fail(Error(ErrorKind::system, "another"));
  EXPECT_STREQ(pair[0].failure()->what(), failure->what());
}

TEST_F(ChannelTest, ADeviceThatFailsEndsItsChannels) {
  ChannelPair pair;
  pretend_device_fatal();
  for (int r = 0; r < 2; ++r) {
    try {
      pair[r].wait(soon());
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("device pretend0 failed"), std::string::npos) << error.what();
    }
  }
}

TEST_F(ChannelTest, WaitAndFlushEndAtTheirDeadline) {
  ChannelPair pair;
  EXPECT_THROW(pair[0].wait(Clock::now() + std::chrono::milliseconds(1)), Error);
  control().link_down = 1;
  pair[0].signal(1);
  try {
    pair[0].flush(Clock::now() + std::chrono::milliseconds(1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::timeout);
  }
}

TEST_F(ChannelTest, StatesAreEnteredInTheirOrder) {
  auto engine = new_engine();
  Channel a(engine, 0, 1, 2, {}), b(engine, 1, 0, 2, {});
  EXPECT_THROW(a.connect(a.endpoint(), 4096), Error);  // this endpoint is for another rank
  auto wrong = b.endpoint();
  wrong.slots /= 2;
  EXPECT_THROW(a.connect(wrong, 4096), Error);
  a.connect(b.endpoint(), 4096);
  EXPECT_THROW(a.connect(b.endpoint(), 4096), Error);  // connected twice
  b.fail(Error(ErrorKind::aborted, "given up"));
  EXPECT_THROW(b.connect(a.endpoint(), 4096), Error);  // after a failure
  EXPECT_THROW(a.signal(1u << 24), Error);
}

TEST_F(ChannelTest, OptionsReachTheQueuePair) {
  rdma::Options options = pretended_options();
  options.gid_index = 2, options.traffic_class = 104, options.service_level = 3, options.pkey_index = 1;
  options.timeout = 15, options.retry_count = 4, options.rnr_retry = 5;
  const auto engine = new_engine(options);
  Channel a(engine, 0, 1, 2, {}), b(engine, 1, 0, 2, {});
  a.connect(b.endpoint(), 2048);
  const pretended::Given& given = *pretend_given();
  EXPECT_EQ(given.pkey_index, 1u);
  EXPECT_EQ(given.port, 1u);
  EXPECT_EQ(given.mtu, 2048u);
  EXPECT_EQ(given.gid_index, 2u);
  EXPECT_EQ(given.traffic_class, 104u);
  EXPECT_EQ(given.service_level, 3u);
  EXPECT_EQ(given.timeout, 15u);
  EXPECT_EQ(given.retry_count, 4u);
  EXPECT_EQ(given.rnr_retry, 5u);
}

TEST_F(ChannelTest, AnAddressThatCannotBeReachedIsTold) {
  auto engine = new_engine();
  Channel a(engine, 0, 1, 2, {}), b(engine, 1, 0, 2, {});
  control().unreachable = 1;
  try {
    a.connect(b.endpoint(), 4096);
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.message() + " " + error.context().remedy;
    EXPECT_NE(text.find("the connection to rank 1 cannot become ready to receive on pretend0"), std::string::npos)
        << text;
    EXPECT_NE(text.find("`ping` 10.77.0.1 from the NIC's interface"), std::string::npos) << text;
  }
}

TEST_F(ChannelTest, ADeviceWithoutQueuePairsSaysSo) {
  auto engine = new_engine();
  control().refuse_pairs = 1;
  try {
    Channel channel(engine, 0, 1, 2, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no queue pair for rank 1 on pretend0"), std::string::npos);
  }
}

TEST_F(ChannelTest, EveryStatusHasWordsAndARemedy) {
  for (uint32_t status = IBV_WC_LOC_LEN_ERR; status <= IBV_WC_GENERAL_ERR + 1; ++status) {
    ibv_wc completion{};
    completion.status = static_cast<ibv_wc_status>(status);
    completion.vendor_err = 0x81;
    const Error error = rdma::error_of(completion, 2, 3, "write", "mlx5_0");
    const std::string text = error.what();
    EXPECT_NE(text.find("rank 3"), std::string::npos) << text;
    EXPECT_NE(text.find("status " + std::to_string(status) + ","), std::string::npos) << text;
    EXPECT_EQ(error.context().rank, 2);
    EXPECT_FALSE(error.context().remedy.empty());
  }
  EXPECT_EQ(rdma::retry_budget(18, 7), "8.59 s");
  EXPECT_EQ(rdma::retry_budget(0, 7), "for ever");
}

}  // namespace
}  // namespace ark::rdma_test

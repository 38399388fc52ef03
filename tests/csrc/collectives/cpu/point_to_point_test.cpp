// Tests send and recv between threads as ranks: matching, order, sizes, backpressure and failure.
#include <algorithm>
#include <atomic>
#include <memory>

#include "collectives/cpu/ranks.hpp"

namespace ark::test {
namespace {

struct Request {
  TransferPtr transfer = std::make_shared<Transfer>();
  // Not an exception_ptr, because ThreadSanitizer does not see libstdc++'s reference counts.
  std::shared_ptr<std::optional<Error>> error = std::make_shared<std::optional<Error>>();

  bool finish(ShmCommunicator& group, milliseconds limit = milliseconds(20000)) {
    if (!group.point_to_point().wait(*transfer, Clock::now() + limit)) return false;
    if (*error) throw **error;
    return true;
  }
};

Request post(ShmCommunicator& group, bool is_send, int peer, int tag, std::vector<float>& data,
             milliseconds timeout = milliseconds(20000)) {
  Request request;
  request.transfer->is_send = is_send;
  request.transfer->peer = peer;
  request.transfer->tag = tag;
  request.transfer->data = data.data();
  request.transfer->bytes = data.size() * sizeof(float);
  request.transfer->context = {is_send ? "send" : "recv", 1, Clock::now() + timeout, timeout};
  request.transfer->done = [error = request.error](std::exception_ptr failure) {
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const Error& told) {
      *error = told;
    }
  };
  group.point_to_point().post(request.transfer);
  return request;
}
Request send(ShmCommunicator& group, int peer, int tag, std::vector<float>& data) {
  return post(group, true, peer, tag, data);
}
Request recv(ShmCommunicator& group, int peer, int tag, std::vector<float>& data) {
  return post(group, false, peer, tag, data);
}

constexpr size_t kLarge = 1 << 19;  // floats: four times the capacity of a channel

TEST(PointToPoint, LargeMessagesCrossWithoutBlocking) {
  expect_no_errors(run_ranks(2, [&](ShmCommunicator& group, int rank) {
    auto mine = random_floats(kLarge, rank);
    std::vector<float> theirs(kLarge, -1);
    Request sending = send(group, 1 - rank, 0, mine);  // both send first, so neither may block
    Request receiving = recv(group, 1 - rank, 0, theirs);
    EXPECT_TRUE(sending.finish(group));
    EXPECT_TRUE(receiving.finish(group));
    EXPECT_EQ(theirs, random_floats(kLarge, 1 - rank));
  }));
}

TEST(PointToPoint, TagsOutOfOrderAndEqualTagsInOrder) {
  expect_no_errors(run_ranks(2, [&](ShmCommunicator& group, int rank) {
    constexpr int kMessages = 40;
    std::vector<std::vector<float>> data(kMessages);
    std::vector<Request> requests;
    auto size_of_message = [](int i) { return static_cast<size_t>(i % 7 == 0 ? 50000 : i); };
    if (rank == 0) {
      for (int i = 0; i < kMessages; ++i) {
        data[i].assign(size_of_message(i), static_cast<float>(i));
        requests.push_back(send(group, 1, i % 5, data[i]));
      }
    } else {
      // Receives tags in reverse order, and the messages of a tag in send order.
      for (int tag = 4; tag >= 0; --tag) {
        for (int i = tag; i < kMessages; i += 5) {
          data[i].assign(size_of_message(i), -1.f);
          requests.push_back(recv(group, 0, tag, data[i]));
          if (i % 3 == 0) {
            EXPECT_TRUE(requests.back().finish(group));
          }
        }
      }
    }
    for (Request& request : requests) EXPECT_TRUE(request.finish(group));
    for (int i = 0; i < kMessages; ++i)
      EXPECT_EQ(data[i], std::vector<float>(size_of_message(i), static_cast<float>(i)));
  }));
}

TEST(PointToPoint, AnySourceTellsTheSource) {
  expect_no_errors(run_ranks(4, [&](ShmCommunicator& group, int rank) {
    std::vector<float> value(3, static_cast<float>(rank));
    if (rank != 0) {
      EXPECT_TRUE(send(group, 0, 9, value).finish(group));
      return;
    }
    std::vector<bool> heard(4, false);
    for (int i = 0; i < 3; ++i) {
      Request request = recv(group, kAnySource, 9, value);
      EXPECT_TRUE(request.finish(group));
      EXPECT_EQ(value, std::vector<float>(3, static_cast<float>(request.transfer->source)));
      heard[request.transfer->source] = true;
    }
    EXPECT_EQ(heard, (std::vector<bool>{false, true, true, true}));
  }));
}

TEST(PointToPoint, ProgressesWithoutAWaiter) {
  expect_no_errors(run_ranks(2, [&](ShmCommunicator& group, int rank) {
    std::vector<float> data = rank == 0 ? random_floats(kLarge, 5) : std::vector<float>(kLarge, -1);
    Request request = rank == 0 ? send(group, 1, 0, data) : recv(group, 0, 0, data);
    const auto until = Clock::now() + milliseconds(20000);
    while (!request.transfer->finished.load() && Clock::now() < until) std::this_thread::sleep_for(milliseconds(1));
    ASSERT_TRUE(request.transfer->finished.load());
    EXPECT_EQ(data, random_floats(kLarge, 5));
  }));
}

TEST(PointToPoint, WrongSizeFailsTheRecvOnly) {
  expect_no_errors(run_ranks(2, [&](ShmCommunicator& group, int rank) {
    for (size_t sent : {size_t{10}, kLarge}) {
      std::vector<float> data(sent, 2), small(4, -1), right(sent, -1);
      if (rank == 0) {
        Request first = send(group, 1, 0, data), second = send(group, 1, 0, data);
        EXPECT_TRUE(first.finish(group) && second.finish(group));
      } else {
        try {
          recv(group, 0, 0, small).finish(group);
          ADD_FAILURE() << "a message of another size was taken";
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::mismatch);
          EXPECT_EQ(error.context().peer, 0);
        }
        EXPECT_EQ(small, std::vector<float>(4, -1));
        EXPECT_TRUE(recv(group, 0, 0, right).finish(group));
        EXPECT_EQ(right, data);
      }
    }
  }));
}

TEST(PointToPoint, TimeoutNamesThePeer) {
  const auto errors = run_ranks(2, [&](ShmCommunicator& group, int rank) {
    std::vector<float> data(4);
    if (rank == 0)
      post(group, false, 1, 0, data, milliseconds(100)).finish(group);
    else
      std::this_thread::sleep_for(milliseconds(400));
  });
  ASSERT_TRUE(errors[0]);
  EXPECT_EQ(errors[0]->kind(), ErrorKind::timeout);
  EXPECT_EQ(errors[0]->context().peer, 1);
}

// A peer's memory is not trusted beyond the tensor: this frame claims more bytes than its message has.
TEST(PointToPoint, AFrameThatClaimsTooMuchStaysWithinTheTensor) {
  struct Frame {  // as in point_to_point_frames.cpp
    uint64_t message_bytes = 0, offset = 0;
    uint32_t frame_bytes = 0;
    int32_t tag = 0;
    uint64_t reserved[5] = {};
    std::byte payload[64] = {};
  };
  constexpr uint32_t kMessage = 32;
  ControlBlock own{}, theirs{};
  GroupHealth health(0, {&own, &theirs}, nullptr);
  protocol::Counter published{}, released{}, unused{};
  Frame slots[2];
  const auto layout = [&](protocol::Counter& counter, int writer) {
    return ChannelLayout{&counter, {{&released, 1 - writer}}, reinterpret_cast<std::byte*>(slots), sizeof(Frame), 2,
                         writer};
  };
  const std::vector<Channel> to{Channel(ChannelLayout{}), Channel(layout(unused, 0))};
  const std::vector<Channel> from{Channel(ChannelLayout{}), Channel(layout(published, 1))};
  PointToPoint messages(health, to, from, {&own.doorbell, &theirs.doorbell}, SpinPolicy{}, [](int) {});
  uint64_t number = 0;
  for (const uint32_t claimed : {kMessage, kMessage + 16, 1u << 30}) {
    Frame& frame = slots[number % 2];
    frame.message_bytes = kMessage;
    frame.frame_bytes = claimed;
    std::fill_n(frame.payload, sizeof frame.payload, std::byte{7});
    std::vector<std::byte> memory(sizeof frame.payload, std::byte{1});
    auto transfer = std::make_shared<Transfer>();
    transfer->peer = 1;
    transfer->data = memory.data();
    transfer->bytes = kMessage;
    transfer->context = {"recv", number + 1, Clock::now() + milliseconds(20000), milliseconds(20000)};
    messages.post(transfer);
    advance_and_wake(published, ++number);
    ASSERT_TRUE(messages.wait(*transfer, Clock::now() + milliseconds(20000)));
    std::vector<std::byte> expected(sizeof frame.payload, std::byte{1});
    std::fill_n(expected.begin(), kMessage, std::byte{7});
    EXPECT_EQ(memory, expected) << claimed;
  }
}

TEST(PointToPoint, ManyThreadsOfARank) {
  expect_no_errors(run_ranks(2, [&](ShmCommunicator& group, int rank) {
    std::vector<std::thread> threads;
    for (int tag = 0; tag < 4; ++tag) {
      threads.emplace_back([&, tag] {
        for (int i = 0; i < 50; ++i) {
          std::vector<float> out(100 * tag + i, static_cast<float>(tag)), in(out.size(), -1);
          Request sending = send(group, 1 - rank, tag, out), receiving = recv(group, 1 - rank, tag, in);
          EXPECT_TRUE(receiving.finish(group) && sending.finish(group));
          EXPECT_EQ(in, out);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }));
}

}  // namespace
}  // namespace ark::test

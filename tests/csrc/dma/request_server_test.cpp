// Tests the request ring and its thread, with host threads in place of GPU threads.
#include "dma/request_server.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "proxy.hpp"
#include "support/wait_until.hpp"
#include "util/error.hpp"

namespace ark {
namespace {

using protocol::Request;
using std::chrono::milliseconds;
using Moment = std::chrono::steady_clock;

// Posts like a kernel, within a time limit.
bool post_within(protocol::RequestRing& ring, uint64_t& head, const Request& request, uint64_t& known,
                 milliseconds bound = std::chrono::seconds(60)) {
  const uint64_t number = protocol::take_number(head);
  const auto until = Moment::now() + bound;
  while (!protocol::has_room(ring, number, known)) {
    if (Moment::now() > until) return false;
    std::this_thread::yield();
  }
  protocol::post(ring, number, request);
  return true;
}

TEST(RequestRing, EveryFieldSurvivesAtItsLimits) {
  using protocol::kMostRequestBytes;
  using protocol::kMostRequestOffset;
  for (const Request& request :
       {Request{Request::put, 0, 0, 0, 0}, Request{Request::put_with_signal, 255, kMostRequestOffset, 0, 0},
        Request{Request::signal, 1, 0, kMostRequestOffset, kMostRequestBytes},
        Request{Request::put_with_signal, 170, 0x5555555555, 0xaaaaaaaaaa, 0x2aaaaaaaa},
        Request{Request::put, 85, 12345, 67890, 0x5555555ull << 3}}) {
    for (uint64_t number : {uint64_t{0}, protocol::kRequests, 5 * protocol::kRequests}) {
      const auto words = protocol::packed(request, number);
      const Request back = protocol::unpacked(words);
      EXPECT_EQ(back.kind, request.kind);
      EXPECT_EQ(back.channel, request.channel);
      EXPECT_EQ(back.to, request.to);
      EXPECT_EQ(back.from, request.from);
      EXPECT_EQ(back.bytes, request.bytes);
      EXPECT_EQ(words.low >> 63, words.high >> 63);
      EXPECT_EQ(words.low >> 63, (number / protocol::kRequests + 1) % 2) << "the parity turns with each lap";
    }
  }
}

TEST(RequestRing, NoHalfIsTakenEarly) {
  protocol::RequestRing ring{};
  Request request;
  EXPECT_FALSE(protocol::take(ring, 0, request)) << "a new ring is empty";
  for (uint64_t number : {uint64_t{0}, protocol::kRequests, 2 * protocol::kRequests}) {
    const auto words = protocol::packed({Request::put, 3, 16, 32, 48}, number);
    const bool low_first = number == protocol::kRequests;
    (low_first ? ring.requests[0].low : ring.requests[0].high) = low_first ? words.low : words.high;
    EXPECT_FALSE(protocol::take(ring, number, request));
    ring.requests[0] = words;
    EXPECT_TRUE(protocol::take(ring, number, request));
    EXPECT_FALSE(protocol::take(ring, number + protocol::kRequests, request)) << "the next lap's is another one";
  }
}

TEST(RequestServer, ServesAllPostersInOrderOverManyLaps) {
  constexpr uint64_t kEach = 3000;
  constexpr uint32_t kPosters = 3;
  protocol::RequestRing ring{};
  uint64_t head = 0;
  std::vector<uint64_t> source(kPosters * kEach), there(kPosters * kEach);
  std::vector<uint64_t> last(kPosters);
  uint64_t wrong = 0;
  RequestServer server(ring, [&](const Request& request) {
    // Reads without atomics, like a copy engine, what the poster wrote before its post.
    there[request.to] = source[request.from];
    wrong += request.bytes != last[request.channel]++;
  });
  std::vector<std::thread> posters;
  for (uint32_t p = 0; p < kPosters; ++p)
    posters.emplace_back([&, p] {
      uint64_t known = 0;
      for (uint64_t n = 0; n < kEach; ++n) {
        const uint64_t at = p * kEach + n;
        source[at] = at * at + 1;
        ASSERT_TRUE(post_within(ring, head, {Request::put, p, at, at, n}, known));
      }
    });
  for (std::thread& poster : posters) poster.join();
  const auto until = Moment::now() + std::chrono::seconds(60);
  while (server.served() < kPosters * kEach && Moment::now() < until) std::this_thread::yield();
  server.stop();
  EXPECT_EQ(server.served(), kPosters * kEach);
  EXPECT_EQ(wrong, 0u) << "a poster's requests are served in its order";
  for (uint64_t at = 0; at < there.size(); ++at) ASSERT_EQ(there[at], at * at + 1);
}

// Each ring is in its own order, none waits for another, and what fails in a pause ends the thread.
TEST(RequestServer, SeveralRings) {
  constexpr size_t kRings = 3;
  constexpr uint64_t kEach = 5 * protocol::kRequests;
  std::vector<protocol::RequestRing> rings(kRings);
  std::vector<uint64_t> next(kRings);
  uint64_t wrong = 0;
  std::atomic<bool> ends{false};
  RequestServer server(
      rings, [&](size_t ring, const Request& request) { wrong += request.bytes != next[ring]++ || request.to != ring; },
      {std::chrono::microseconds(0), std::chrono::microseconds(50)},
      [&] {
        if (ends) throw std::runtime_error("in a pause");
      });
  std::vector<std::thread> posters;
  for (size_t r = 0; r + 1 < kRings; ++r)  // nobody posts to the last
    posters.emplace_back([&, r] {
      uint64_t head = 0, known = 0;
      for (uint64_t n = 0; n < kEach; ++n) ASSERT_TRUE(post_within(rings[r], head, {Request::put, 0, r, 0, n}, known));
    });
  for (std::thread& poster : posters) poster.join();
  test::wait_until("the last request", [&] { return server.served() == (kRings - 1) * kEach; });
  server.check();
  ends = true;
  test::wait_until("the thread's end", [&] {
    try {
      server.check();
      return false;
    } catch (const std::runtime_error& error) {
      return std::string(error.what()) == "in a pause";
    }
  });
  server.stop();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(next, (std::vector<uint64_t>{kEach, kEach, 0}));
}

TEST(RequestServer, FinishesWhatWasPosted) {
  for (int time = 0; time < 50; ++time) {
    protocol::RequestRing ring{};
    uint64_t head = 0, known = 0, sum = 0;
    RequestServer server(ring, [&](const Request& request) { sum += request.bytes; });
    for (uint64_t n = 1; n <= 100; ++n) ASSERT_TRUE(post_within(ring, head, {Request::put, 0, 0, 0, n}, known));
    server.finish();
    EXPECT_EQ(sum, 5050u);
  }
}

// After a request was served, its poster may reuse the memory. An ordinary read there must come before this ordinary
// write, ordered by the release of `served`.
TEST(RequestServer, WhatWasServedMayBeWrittenOver) {
  constexpr uint64_t kPosts = 5 * protocol::kRequests;
  protocol::RequestRing ring{};
  uint64_t head = 0, known = 0, wrong = 0;
  std::vector<uint64_t> told(protocol::kRequests);
  RequestServer server(ring, [&](const Request& request) { wrong += told[request.from] != request.bytes; });
  for (uint64_t n = 0; n < kPosts; ++n) {
    const uint64_t number = protocol::take_number(head), place = number % protocol::kRequests;
    test::wait_until("a free place", [&] { return protocol::has_room(ring, number, known); });
    told[place] = 3 * n;
    protocol::post(ring, number, {Request::put, 0, 0, place, 3 * n});
  }
  test::wait_until("the last request", [&] { return server.served() == kPosts; });
  server.stop();
  EXPECT_EQ(wrong, 0u);
}

TEST(RequestServer, AFullRingHoldsThePosterUntilARequestIsServed) {
  protocol::RequestRing ring{};
  uint64_t head = 0, known = 0;
  std::atomic<bool> go{false};
  RequestServer server(ring, [&](const Request&) { test::wait_until("leave to serve", [&] { return go.load(); }); });
  const Request request{Request::signal, 0, 0, 0, 0};
  for (uint64_t n = 0; n < protocol::kRequests; ++n)
    ASSERT_TRUE(post_within(ring, head, request, known, milliseconds(0))) << "there is room without waiting";
  const uint64_t number = protocol::take_number(head);
  EXPECT_FALSE(protocol::has_room(ring, number, known));
  go = true;
  const auto until = Moment::now() + std::chrono::seconds(60);
  while (!protocol::has_room(ring, number, known) && Moment::now() < until) std::this_thread::yield();
  EXPECT_TRUE(protocol::has_room(ring, number, known));
}

TEST(RequestServer, StopsWhilePostersAreStuckAndTheyGiveUp) {
  protocol::RequestRing ring{};
  uint64_t head = 0, known = 0;
  {
    RequestServer server(ring, [](const Request&) {}, {std::chrono::microseconds(0), std::chrono::microseconds(50)});
    ASSERT_TRUE(post_within(ring, head, {Request::signal, 0, 0, 0, 0}, known));
    std::this_thread::sleep_for(milliseconds(5));  // the server sleeps meanwhile
    server.stop();
    server.stop();
    EXPECT_LE(server.served(), 1u);
  }
  const uint64_t served = protocol::load_acquire(ring.served);
  for (uint64_t n = 1; n < protocol::kRequests + served; ++n)
    ASSERT_TRUE(post_within(ring, head, {Request::signal, 0, 0, 0, 0}, known, milliseconds(0)));
  EXPECT_FALSE(post_within(ring, head, {Request::signal, 0, 0, 0, 0}, known, milliseconds(20)));
}

TEST(RequestServer, TellsWhatWentWrongAndServesNoMore) {
  protocol::RequestRing ring{};
  uint64_t head = 0, known = 0;
  RequestServer server(ring, [](const Request& request) {
    if (request.to == 2) throw Error(ErrorKind::invalid_argument, "no such place");
  });
  server.check();
  for (uint64_t to = 0; to < 5; ++to) ASSERT_TRUE(post_within(ring, head, {Request::put, 0, to, 0, 0}, known));
  const auto failed = [&] {
    try {
      server.check();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("no such place"), std::string::npos);
      return true;
    }
    return false;
  };
  const auto until = Moment::now() + std::chrono::seconds(60);
  while (!failed() && Moment::now() < until) std::this_thread::yield();
  EXPECT_TRUE(failed());
  EXPECT_EQ(server.served(), 2u);
}

TEST(Proxy, RefusesWhatIsBeyondItsWindows) {
  const Request good{Request::put_with_signal, 1, 100, 50, 50};
  EXPECT_EQ(why_refused(good, 100, 150, 2), "");
  EXPECT_EQ(why_refused({Request::signal, 1, 0, 0, 99}, 0, 0, 2), "") << "a signal moves nothing";
  EXPECT_EQ(why_refused(good, 99, 150, 2), "it reads 50 bytes at 50 of a window of 99");
  EXPECT_EQ(why_refused(good, 100, 149, 2), "it writes 50 bytes at 100 of a window of 149");
  EXPECT_EQ(why_refused(good, 100, 150, 1), "it signals channel 1 of 1");
  EXPECT_EQ(why_refused({Request::put, 9, 0, 101, 0}, 100, 150, 2), "it reads 0 bytes at 101 of a window of 100");
  EXPECT_EQ(why_refused({static_cast<Request::Kind>(0), 0, 0, 0, 0}, 9, 9, 9), "it is of the unknown kind 0");
}

}  // namespace
}  // namespace ark

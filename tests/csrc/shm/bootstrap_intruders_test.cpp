// Tests that foreign, malformed, oversized and silent connections to the bootstrap's sockets are dropped while the job
// continues, and that a thousand groups leak nothing.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cstring>
#include <random>

#include "shm/handle.hpp"
#include "shm/hello_message.hpp"
#include "shm/support.hpp"
#include "util/local_socket.hpp"

namespace ark::test {
namespace bootstrap_intruders_test {

constexpr int kSize = 3;

// Waits until some rank has published its record. The record's key contains the nonce of this start.
HandleRecord find_record(const TemporaryDirectory& directory, int rank) {
  const auto until = Clock::now() + milliseconds(10000);
  while (Clock::now() < until) {
    for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
      const std::string name = entry.path().filename();
      if (name.find("+record+") == name.npos || !name.ends_with("+" + std::to_string(rank))) continue;
      std::ifstream file(entry.path(), std::ios::binary);
      const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
      return HandleRecord::decode(bytes);
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  throw Error(ErrorKind::timeout, "no record");
}

UniqueFd call(const HandleRecord& record) {
  ConnectAttempt attempt = connect_to(record.socket_name);
  return attempt.status == ConnectAttempt::Status::connected ? std::move(attempt.fd) : UniqueFd();
}

// Returns true if the other end closes the connection within `patience` without sending anything.
bool is_dropped(int socket, milliseconds patience) {
  pollfd polled{socket, POLLIN, 0};
  if (::poll(&polled, 1, static_cast<int>(patience.count())) <= 0) return false;
  char byte;
  return ::recv(socket, &byte, 1, MSG_DONTWAIT) <= 0 && errno != EAGAIN;
}

HelloMessage genuine_hello(const HandleRecord& to) {
  HelloMessage hello;
  hello.nonce = to.nonce;
  hello.from = 2;
  hello.to = to.rank;
  hello.size = kSize;
  hello.segment_bytes = segment_bytes_of(2);
  return hello;
}

// Starts three ranks. The last one does not connect before the intruders are done, so that rank 0 stays in its exchange
// loop while they attack it. The group must come up all the same.
void expect_group_survives(const std::function<void(const HandleRecord&)>& intrude) {
  TemporaryDirectory directory;
  const auto done = directory.path() / "key-intruders-are-through";
  Ranks ranks(kSize, [&](int rank) {
    bool published = false;
    WatchedStore store(directory.path(), [&](const char* operation, const std::string& key) {
      if (std::string(operation) == "was set" && key.find("record") != key.npos) published = true;
      // The last rank stays in the store until the intruders are done.
      while (rank == kSize - 1 && published && !std::filesystem::exists(done))
        std::this_thread::sleep_for(milliseconds(5));
    });
    return connect_and_talk(store, options_for(rank, kSize));
  });
  const HandleRecord record = find_record(directory, 0);
  find_record(directory, kSize - 1);
  intrude(record);
  std::ofstream(done).put('1');
  expect_all(ranks.wait(), "shared");
}

TEST(BootstrapIntruders, RandomBytes) {
  expect_group_survives([](const HandleRecord& record) {
    std::mt19937 random(7);
    for (int i = 0; i < 200; ++i) {
      UniqueFd socket = call(record);
      ASSERT_TRUE(socket);
      std::vector<uint8_t> bytes(random() % 600);
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
      send_message(socket.get(), bytes, -1);
    }
  });
}

TEST(BootstrapIntruders, SilentOnesAndAQueueFullOfThem) {
  expect_group_survives([](const HandleRecord& record) {
    std::vector<UniqueFd> silent;
    for (int i = 0; i < 600; ++i)
      if (UniqueFd socket = call(record)) silent.push_back(std::move(socket));
    ASSERT_GT(silent.size(), 300u);
    EXPECT_TRUE(is_dropped(silent.front().get(), milliseconds(1000)));  // dropped to make room for later ones
    EXPECT_TRUE(is_dropped(silent.back().get(), milliseconds(4000)));   // took too long
  });
}

TEST(BootstrapIntruders, HalfAHello) {
  expect_group_survives([](const HandleRecord& record) {
    UniqueFd socket = call(record);
    const auto bytes = genuine_hello(record).encode();
    send_message(socket.get(), std::span(bytes).first(40), -1);
    EXPECT_FALSE(is_dropped(socket.get(), milliseconds(200)));  // it could still become valid
    EXPECT_TRUE(is_dropped(socket.get(), milliseconds(4000)));
  });
}

TEST(BootstrapIntruders, AlmostGenuineHellos) {
  expect_group_survives([](const HandleRecord& record) {
    const UniqueFd fd(::memfd_create("foreign", MFD_CLOEXEC));
    std::vector<HelloMessage> wrong(6, genuine_hello(record));
    wrong[0].nonce[15] ^= 1;
    wrong[1].nonce = {};
    wrong[2].size = kSize + 1;
    wrong[3].segment_bytes += 1;
    wrong[4].to = 1;
    wrong[5].from = 0;
    wrong[5].to = 2;
    wrong[5].kind = HelloMessage::Kind::answer;
    for (const HelloMessage& hello : wrong) {
      UniqueFd socket = call(record);
      ASSERT_EQ(send_message(socket.get(), hello.encode(), fd.get()), 0);
      EXPECT_TRUE(is_dropped(socket.get(), milliseconds(1000)));
    }
    // A valid hello with an extra byte at the end.
    UniqueFd socket = call(record);
    auto bytes = genuine_hello(record).encode();
    bytes.push_back(0);
    ASSERT_EQ(send_message(socket.get(), bytes, fd.get()), 0);
    EXPECT_TRUE(is_dropped(socket.get(), milliseconds(1000)));
  });
}

// Another user who knows everything: name, nonce, sizes.
TEST(BootstrapIntruders, AnotherUserWithTheRightNonce) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  expect_group_survives([](const HandleRecord& record) {
    Ranks other(1, [&](int) {
      // A direct system call, because the library's setuid() would have to signal every thread.
      if (::syscall(SYS_setuid, 65534) != 0) return std::string("cannot become another user");
      UniqueFd socket = call(record);
      if (!socket) return std::string("cannot connect");
      const UniqueFd fd(::memfd_create("foreign", MFD_CLOEXEC));
      send_message(socket.get(), genuine_hello(record).encode(), fd.get());
      return std::string(is_dropped(socket.get(), milliseconds(1000)) ? "dropped" : "heard");
    });
    EXPECT_EQ(other.wait()[0].text, "dropped");
  });
}

// A hello with the correct nonce, but a descriptor that must not be mapped. Only a member of the group can send it: it
// takes rank 2's place. All ranks must get an error about the refusal, instead of crashing by SIGBUS later.
TEST(BootstrapIntruders, ASegmentThatIsNotSealed) {
  TemporaryDirectory directory;
  const auto done = directory.path() / "key-done";
  Ranks ranks(kSize, [&](int rank) {
    bool published = false;
    WatchedStore store(directory.path(), [&](const char* operation, const std::string& key) {
      if (std::string(operation) == "was set" && key.find("record") != key.npos) published = true;
      while (rank == kSize - 1 && published && !std::filesystem::exists(done))
        std::this_thread::sleep_for(milliseconds(5));
    });
    return connect_and_talk(store, options_for(rank, kSize));
  });
  const HandleRecord record = find_record(directory, 0);
  UniqueFd socket = call(record);
  const UniqueFd fd(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), static_cast<off_t>(segment_bytes_of(2))), 0);
  ASSERT_EQ(send_message(socket.get(), genuine_hello(record).encode(), fd.get()), 0);
  EXPECT_TRUE(is_dropped(socket.get(), milliseconds(5000)));  // and it got no descriptor from us
  std::ofstream(done).put('1');
  const auto& results = ranks.wait();
  for (int rank = 0; rank < kSize; ++rank) {
    const std::string& text = results[rank].text;
    EXPECT_TRUE(text.starts_with("Error(system, peer ")) << text;
    EXPECT_NE(text.find("a peer's shared segment is refused: its size is not sealed"), text.npos) << text;
    EXPECT_EQ(text.find("because rank 0 failed") != text.npos, rank != 0) << text;
  }
}

int count_lines(const char* path, const char* part) {
  std::ifstream file(path);
  int count = 0;
  for (std::string line; std::getline(file, line);) count += line.find(part) != line.npos;
  return count;
}

int count_open_files() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// Two ranks as two threads, so that one process's tables show every leak.
TEST(BootstrapLeaks, AThousandGroupsLeaveNothing) {
  TemporaryDirectory directory;
  auto one_group = [&](int i) {
    const auto keys = directory.path() / std::to_string(i);
    std::filesystem::create_directory(keys);
    auto rank_body = [&](int rank) {
      DirectoryStore store(keys);
      ConnectOptions options = options_for(rank, 2);
      options.allow_sharing = i % 10 != 9 || rank == 0;  // some do not share
      const ConnectResult result = connect(store, options);
      EXPECT_EQ(result.neighbourhood.has_value(), i % 10 != 9) << result.reason;
    };
    std::thread other(rank_body, 1);
    rank_body(0);
    other.join();
    const auto names = published_sockets(keys);
    EXPECT_FALSE(names.empty());
    EXPECT_EQ(count_living(names), 0);
    std::filesystem::remove_all(keys);
  };
  one_group(0);
  const int files = count_open_files();
  const int mappings = count_lines("/proc/self/maps", "memfd:ark");
  EXPECT_EQ(mappings, 0);
  for (int i = 1; i <= 1000; ++i) one_group(i);
  EXPECT_EQ(count_open_files(), files);
  EXPECT_EQ(count_lines("/proc/self/maps", "memfd:ark"), 0);
}

}  // namespace bootstrap_intruders_test
}  // namespace ark::test

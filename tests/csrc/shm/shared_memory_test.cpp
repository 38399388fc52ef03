// Tests segments between real processes, descriptors that must be refused, and shortages that must be errors.
#include "shm/shared_memory.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>

#include <cstring>

#include "support/processes.hpp"

namespace ark::test {
namespace shared_memory_test {

std::string error_of(const std::function<void()>& work, ErrorKind kind = ErrorKind::system) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != text.npos;
}

UniqueFd memfd(off_t bytes, unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING, int seals = 0) {
  UniqueFd fd(::memfd_create("test", flags));
  EXPECT_EQ(::ftruncate(fd.get(), bytes), 0);
  EXPECT_TRUE(seals == 0 || ::fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

size_t resident_bytes(const SharedMemory& memory) {
  struct stat status {};
  EXPECT_EQ(::fstat(memory.fd(), &status), 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

TEST(SharedMemory, IsZeroAndSeenByBothSides) {
  SharedMemory mine = SharedMemory::create("test", 10001);
  EXPECT_EQ(mine.size(), 10001u);
  for (size_t i = 0; i < mine.size(); ++i) ASSERT_EQ(mine.data()[i], std::byte(0));
  SharedMemory theirs = SharedMemory::attach(UniqueFd(::dup(mine.fd())), 10001);
  EXPECT_NE(theirs.data(), mine.data());
  mine.data()[10000] = std::byte(7);
  EXPECT_EQ(theirs.data()[10000], std::byte(7));
  theirs.close_fd();
  mine = SharedMemory();
  EXPECT_EQ(theirs.data()[10000], std::byte(7));  // lives as long as any process maps it
}

TEST(SharedMemory, SizeIsSealed) {
  SharedMemory memory = SharedMemory::create("test", 8192);
  EXPECT_NE(::ftruncate(memory.fd(), 4096), 0);
  EXPECT_NE(::ftruncate(memory.fd(), 16384), 0);
  EXPECT_NE(::fcntl(memory.fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_NE(::fcntl(memory.fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(SharedMemory, MovesKeepOneOwner) {
  SharedMemory a = SharedMemory::create("a", 4096);
  std::byte* address = a.data();
  SharedMemory b = std::move(a);
  EXPECT_EQ(a.data(), nullptr);
  EXPECT_EQ(a.size(), 0u);
  EXPECT_EQ(b.data(), address);
  b = SharedMemory::create("b", 8192);
  EXPECT_EQ(b.size(), 8192u);
  SharedMemory& same = b;
  b = std::move(same);
  EXPECT_EQ(b.size(), 8192u);
  b.data()[8191] = std::byte(1);
}

TEST(SharedMemory, UntrustedDescriptorsAreRefused) {
  const int sealed = F_SEAL_SHRINK | F_SEAL_GROW;
  const auto flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  auto attach = [](UniqueFd fd, size_t bytes) { return error_of([&] { SharedMemory::attach(std::move(fd), bytes); }); };
  EXPECT_TRUE(contains(attach(UniqueFd(), 4096), "no descriptor"));
  EXPECT_TRUE(contains(attach(memfd(4096, flags, sealed), 0), "no size"));
  EXPECT_TRUE(contains(attach(memfd(4096), 4096), "not sealed"));
  EXPECT_TRUE(contains(attach(memfd(4096, flags, F_SEAL_GROW), 4096), "not sealed"));
  EXPECT_TRUE(contains(attach(memfd(4096, flags, sealed), 4095), "4096 bytes where 4095 were announced"));
  EXPECT_TRUE(contains(attach(memfd(4096, flags, sealed), 8192), "4096 bytes where 8192"));
  EXPECT_TRUE(contains(attach(memfd(4096, flags, sealed | F_SEAL_WRITE), 4096), "Operation not permitted"));
  EXPECT_TRUE(contains(attach(UniqueFd(::open("/dev/zero", O_RDWR | O_CLOEXEC)), 4096), "not a memfd"));
  EXPECT_TRUE(contains(attach(UniqueFd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)), 4096), "not a memfd"));
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  UniqueFd other(ends[1]);
  EXPECT_TRUE(contains(attach(UniqueFd(ends[0]), 4096), "not a memfd"));
  // Read-only: reopened through /proc.
  UniqueFd writable = memfd(4096, flags, sealed);
  const std::string path = "/proc/self/fd/" + std::to_string(writable.get());
  EXPECT_TRUE(contains(attach(UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)), 4096), "Permission denied"));
  EXPECT_EQ(SharedMemory::attach(std::move(writable), 4096).size(), 4096u);
}

TEST(SharedMemory, WrongArguments) {
  EXPECT_TRUE(contains(error_of([] { SharedMemory::create("x", 0); }, ErrorKind::invalid_argument), "got 0"));
  SharedMemory memory = SharedMemory::create(std::string(1000, 'n'), 4096);  // too long for the kernel: cut
  auto commit = [&](size_t offset, size_t bytes) {
    return error_of([&] { memory.commit(offset, bytes); }, ErrorKind::invalid_argument);
  };
  EXPECT_TRUE(contains(commit(0, 4097), "commit of bytes 0 + 4097 in a segment of 4096"));
  EXPECT_TRUE(contains(commit(4097, 0), "commit of bytes"));
  EXPECT_TRUE(contains(commit(1, SIZE_MAX), "commit of bytes"));
  memory.commit(4096, 0);
  memory.close_fd();
  error_of([&] { memory.commit(0, 1); }, ErrorKind::closed);
}

TEST(SharedMemory, CommitMakesPagesAndKeepsContents) {
  SharedMemory memory = SharedMemory::create("test", size_t{4} << 20);
  EXPECT_EQ(resident_bytes(memory), 0u);
  memory.data()[5] = std::byte(9);
  memory.commit(0, size_t{1} << 20);
  EXPECT_GE(resident_bytes(memory), size_t{1} << 20);
  EXPECT_LT(resident_bytes(memory), size_t{4} << 20);
  EXPECT_EQ(memory.data()[5], std::byte(9));
  memory.commit(0, size_t{4} << 20);
  memory.commit(0, size_t{4} << 20);
  EXPECT_EQ(resident_bytes(memory), size_t{4} << 20);
  EXPECT_EQ(memory.data()[5], std::byte(9));
}

void ignore_signal(int) {}

// A profiler's timer interrupts fallocate repeatedly. It must still succeed.
TEST(SharedMemory, CommitUnderSteadySignals) {
  Ranks ranks(1, [](int) -> std::string {
    struct sigaction action {};
    action.sa_handler = ignore_signal;
    ::sigaction(SIGALRM, &action, nullptr);
    const itimerval often{{0, 500}, {0, 500}};
    ::setitimer(ITIMER_REAL, &often, nullptr);
    SharedMemory memory = SharedMemory::create("test", size_t{96} << 20);
    memory.commit(0, memory.size());
    return resident_bytes(memory) == memory.size() ? "right" : "incomplete";
  });
  EXPECT_EQ(ranks.wait()[0].text, "right");
}

void limit(__rlimit_resource resource, rlim_t value) {
  rlimit limits{};
  ::getrlimit(resource, &limits);
  limits.rlim_cur = value;
  if (::setrlimit(resource, &limits) != 0) throw system_error("setrlimit", errno);
}

TEST(SharedMemory, TooLargeForTheMachine) {
  EXPECT_TRUE(contains(error_of([] { SharedMemory::create("x", SIZE_MAX); }), "File too large"));
  const std::string said = error_of([] { SharedMemory::create("x", size_t{1} << 60); });
  EXPECT_TRUE(contains(said, "1152921504606846976 bytes")) << said;
}

TEST(SharedMemory, NoDescriptors) {
  Ranks ranks(1, [](int) -> std::string {
    limit(RLIMIT_NOFILE, 0);
    SharedMemory::create("x", 4096);
    return "no error";
  });
  const std::string& said = ranks.wait()[0].text;
  EXPECT_TRUE(contains(said, "4096 bytes: Too many open files. Raise the limit of open files")) << said;
}

TEST(SharedMemory, FileSizeLimitIsAnErrorNotASignal) {
  Ranks ranks(1, [](int) -> std::string {
    limit(RLIMIT_FSIZE, 4096);
    SharedMemory::create("x", 4097);
    return "no error";
  });
  const auto& results = ranks.wait();
  EXPECT_TRUE(contains(results[0].text, "4097 bytes: File too large. Raise the limit of file size")) << results[0].text;
}

// A request for four times the memory must be refused before the kernel's OOM killer acts.
TEST(SharedMemory, CommitBeyondTheMemoryOfTheMachine) {
  const size_t all = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  SharedMemory memory = SharedMemory::create("test", 4 * all);
  const std::string said = error_of([&] { memory.commit(0, 4 * all); });
  EXPECT_TRUE(contains(said, "find pages") && contains(said, "Free memory")) << said;
  EXPECT_EQ(resident_bytes(memory), 0u);  // refused before any memory was taken
  memory.commit(0, 1 << 20);              // the segment stays usable
}

}  // namespace shared_memory_test
}  // namespace ark::test

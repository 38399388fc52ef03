// Tests the cache of compiled kernels with a pretended compiler: hits, no trust in altered files, one compilation for
// many processes, and disk failures that do not stop a kernel.
#include "jit/kernel_cache.hpp"

#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "temp_folder.hpp"
#include "util/error.hpp"

namespace ark::jit {
namespace {

using Origin = CachedKernel::Origin;
namespace fs = std::filesystem;

const Source kSource{"stub text", "sm_90a", {"-DX=1"}};
const std::string kKey = cache_key("1.0", "nvrtc 13.0", kSource, {{"cuda/a.cuh", "text"}});

class KernelCacheTest : public ::testing::Test {
 protected:
  // Asks a new cache on `folder` once. Its messages go to said_.
  CachedKernel ask(const std::string& folder) {
    KernelCache cache(
        folder, [this](const std::string& line) { said_.push_back(line); }, lock_wait_);
    return ask(cache);
  }
  CachedKernel ask(KernelCache& cache) {
    return cache.get(kKey, "1.0", "nvrtc 13.0", kSource, [this] {
      ++compilations_;
      Compiled compiled;
      compiled.cubin.assign(cubin_.begin(), cubin_.end());
      compiled.resources = {{"fill", 40, 0, 8, 16, 1024}};
      return compiled;
    });
  }
  std::string text_of(const CachedKernel& kernel) { return {kernel.cubin.begin(), kernel.cubin.end()}; }
  std::string in(const char* name) const { return (temp_.path / name).string(); }

  // Stores an entry, then `spoil` alters it. It must be compiled again, and then be found again.
  template <class Spoil>
  void expect_recompiled(Spoil&& spoil) {
    ASSERT_EQ(ask(in("k")).origin, Origin::compiled);
    spoil();
    cubin_ = "another cubin";  // another cubin shows that no part of the old one is used
    const CachedKernel again = ask(in("k"));
    EXPECT_EQ(again.origin, Origin::compiled);
    EXPECT_EQ(text_of(again), "another cubin");
    const CachedKernel found = ask(in("k"));
    EXPECT_EQ(found.origin, Origin::cache);
    EXPECT_EQ(text_of(found), "another cubin");
    EXPECT_EQ(compilations_, 2);
    EXPECT_TRUE(said_.empty());
  }

  // The folder is unusable: it compiles in memory each time, and each cache logs one line that contains `why`.
  void expect_in_memory(const std::string& folder, const std::string& why) {
    KernelCache cache(
        folder, [this](const std::string& line) { said_.push_back(line); }, lock_wait_);
    for (int i = 1; i <= 2; ++i) {
      const CachedKernel kernel = ask(cache);
      EXPECT_EQ(kernel.origin, Origin::memory);
      EXPECT_EQ(text_of(kernel), cubin_);
      EXPECT_EQ(compilations_, i);
    }
    ASSERT_EQ(said_.size(), 1u);
    EXPECT_NE(said_[0].find(why), std::string::npos) << said_[0];
    EXPECT_NE(said_[0].find(folder), std::string::npos) << said_[0];
    EXPECT_NE(said_[0].find("ARK_CACHE"), std::string::npos) << said_[0];
  }

  TempFolder temp_;
  std::string cubin_ = std::string(
      "\x7f"
      "ELF cubin\0with a zero",
      22);
  int compilations_ = 0;
  std::vector<std::string> said_;
  std::chrono::milliseconds lock_wait_{30'000};
};

TEST_F(KernelCacheTest, FreshThenFound) {
  const std::string folder = in("deep/er/k");
  EXPECT_EQ(ask(folder).origin, Origin::compiled);
  const CachedKernel found = ask(folder);
  EXPECT_EQ(found.origin, Origin::cache);
  EXPECT_EQ(text_of(found), cubin_);
  EXPECT_EQ(compilations_, 1);
  EXPECT_TRUE(said_.empty());
  struct stat status {};
  ASSERT_EQ(::stat(folder.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
    ASSERT_EQ(::stat(entry.path().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u) << entry.path();
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{kKey + ".cu", kKey + ".cubin", kKey + ".lock", kKey + ".meta.json"}));
  EXPECT_EQ(temp_.read("deep/er/k/" + kKey + ".cu"), kSource.stub);
  const std::string meta = temp_.read("deep/er/k/" + kKey + ".meta.json");
  for (const char* part : {"\"arch\":\"sm_90a\"", "\"compiler\":\"nvrtc 13.0\"", "\"ark_torch\":\"1.0\"", "\"-DX=1\"",
                           "\"name\":\"fill\"", "\"registers\":40", "\"spill_store_bytes\":8"})
    EXPECT_NE(meta.find(part), std::string::npos) << part << " in " << meta;
}

TEST_F(KernelCacheTest, NoFolderNoCache) {
  EXPECT_EQ(ask("").origin, Origin::memory);
  EXPECT_TRUE(said_.empty()) << "nobody asked for one";
}

TEST_F(KernelCacheTest, KeyHoldsAllThatCounts) {
  const std::vector<Header> headers{{"a", "text"}, {"b", "text"}};
  const std::string key = cache_key("1.0", "nvrtc 13.0", kSource, headers);
  EXPECT_EQ(key, cache_key("1.0", "nvrtc 13.0", kSource, headers));
  EXPECT_EQ(key.size(), 64u);
  std::vector<std::string> others{key};
  others.push_back(cache_key("1.1", "nvrtc 13.0", kSource, headers));
  others.push_back(cache_key("1.0", "nvrtc 13.1", kSource, headers));
  others.push_back(cache_key("1.0", "nvrtc 13.0", {"stub texT", "sm_90a", {"-DX=1"}}, headers));
  others.push_back(cache_key("1.0", "nvrtc 13.0", {"stub text", "sm_90", {"-DX=1"}}, headers));
  others.push_back(cache_key("1.0", "nvrtc 13.0", {"stub text", "sm_90a", {"-DX=2"}}, headers));
  others.push_back(cache_key("1.0", "nvrtc 13.0", {"stub text", "sm_90a", {"-D", "X=1"}}, headers));
  others.push_back(cache_key("1.0", "nvrtc 13.0", kSource, {{"a", "text"}, {"b", "texT"}}));
  others.push_back(cache_key("1.0", "nvrtc 13.0", kSource, {{"a", "text"}, {"c", "text"}}));
  others.push_back(cache_key("1.0", "nvrtc 13.0", kSource, {{"a", "text"}}));
  Source spilling = kSource;
  spilling.may_spill = !spilling.may_spill;
  others.push_back(cache_key("1.0", "nvrtc 13.0", spilling, headers));
  // The host compiler's output depends on the machine, which no option names.
  for (const char* machine : {"native-1", "native-2"}) {
    Source host{"stub text", machine, {"-march=native"}};
    host.language = Language::cpp;
    others.push_back(cache_key("1.0", "g++ 12", host, headers));
  }
  std::sort(others.begin(), others.end());
  EXPECT_EQ(std::unique(others.begin(), others.end()), others.end()) << "two different sources share a key";
}

TEST_F(KernelCacheTest, TruncatedCubin) {
  expect_recompiled([&] { fs::resize_file(temp_.path / "k" / (kKey + ".cubin"), cubin_.size() - 1); });
}
TEST_F(KernelCacheTest, EmptyCubin) {
  expect_recompiled([&] { fs::resize_file(temp_.path / "k" / (kKey + ".cubin"), 0); });
}
TEST_F(KernelCacheTest, TamperedCubin) {
  expect_recompiled([&] {
    std::string bytes = cubin_;
    bytes[5] ^= 1;
    temp_.write("k/" + kKey + ".cubin", bytes);
  });
}
TEST_F(KernelCacheTest, TamperedHash) {
  expect_recompiled([&] {
    std::string meta = temp_.read("k/" + kKey + ".meta.json");
    char& digit = meta[meta.find("cubin_sha256\":\"") + 20];
    digit = digit == '0' ? '1' : '0';
    temp_.write("k/" + kKey + ".meta.json", meta);
  });
}
TEST_F(KernelCacheTest, TruncatedMeta) {
  expect_recompiled([&] { fs::resize_file(temp_.path / "k" / (kKey + ".meta.json"), 60); });
}
TEST_F(KernelCacheTest, MetaMissing) {
  expect_recompiled([&] { fs::remove(temp_.path / "k" / (kKey + ".meta.json")); });
}
TEST_F(KernelCacheTest, EntryOfAnotherKey) {
  // Consistent in itself, but copied from another key, so it is another kernel.
  expect_recompiled([&] {
    const std::string other(64, 'e');
    std::string meta = temp_.read("k/" + kKey + ".meta.json");
    meta.replace(meta.find(kKey), kKey.size(), other);
    temp_.write("k/" + kKey + ".meta.json", meta);
  });
}
TEST_F(KernelCacheTest, CubinIsALink) {
  const std::string first = cubin_;
  expect_recompiled([&] {
    const std::string real = temp_.write("elsewhere", first);
    fs::remove(temp_.path / "k" / (kKey + ".cubin"));
    fs::create_symlink(real, temp_.path / "k" / (kKey + ".cubin"));
  });
  EXPECT_EQ(temp_.read("elsewhere"), first) << "the link was written through";
}
TEST_F(KernelCacheTest, LeftoverOfAHolderThatDied) {
  temp_.write("k/" + kKey + ".cubin.part", "half");
  fs::permissions(temp_.path / "k", fs::perms::owner_all);
  EXPECT_EQ(ask(in("k")).origin, Origin::compiled);
  EXPECT_EQ(ask(in("k")).origin, Origin::cache);
  EXPECT_FALSE(fs::exists(temp_.path / "k" / (kKey + ".cubin.part")));
}

TEST_F(KernelCacheTest, FolderIsALink) {
  fs::create_directory(temp_.path / "real");
  fs::permissions(temp_.path / "real", fs::perms::owner_all);
  fs::create_directory_symlink(temp_.path / "real", temp_.path / "link");
  expect_in_memory(in("link"), "a link");
  for (const char* disguise : {"link/", "link/.", "link//"}) {
    said_.clear();
    compilations_ = 0;
    expect_in_memory(in(disguise), "a link");
  }
  EXPECT_TRUE(fs::is_empty(temp_.path / "real"));
}
TEST_F(KernelCacheTest, OthersMayWrite) {
  for (const unsigned mode : {0770u, 0702u}) {
    said_.clear();
    compilations_ = 0;
    fs::create_directories(temp_.path / "k");
    ASSERT_EQ(::chmod(in("k").c_str(), mode), 0);
    expect_in_memory(in("k"), "others may write");
  }
}
TEST_F(KernelCacheTest, AFileInTheWay) {
  temp_.write("file");
  expect_in_memory(in("file"), "no folder");
  said_.clear();
  compilations_ = 0;
  expect_in_memory(in("file/k"), "Not a directory");
}

TEST_F(KernelCacheTest, FullDisk) {
  // A file size limit makes every write fail, like a full disk.
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit former{};
  ::getrlimit(RLIMIT_FSIZE, &former);
  const rlimit none{0, former.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
  expect_in_memory(in("k"), "cannot write");
  ::setrlimit(RLIMIT_FSIZE, &former);
  for (const auto& entry : fs::directory_iterator(temp_.path / "k"))
    EXPECT_EQ(entry.path().extension(), ".lock") << "half an entry stayed: " << entry.path();
  EXPECT_EQ(ask(in("k")).origin, Origin::compiled) << "once there is room, it is kept";
}

TEST_F(KernelCacheTest, CompilerFails) {
  KernelCache cache(in("k"), nullptr);
  auto fail = []() -> Compiled { throw Error(ErrorKind::system, "does not compile"); };
  EXPECT_THROW(cache.get(kKey, "1.0", "nvrtc 13.0", kSource, fail), Error);
  EXPECT_EQ(ask(cache).origin, Origin::compiled) << "the lock was not given back, or a failure was kept";
}

TEST_F(KernelCacheTest, HolderOfTheLockDoesNotFinish) {
  fs::create_directory(temp_.path / "k");
  fs::permissions(temp_.path / "k", fs::perms::owner_all);
  const UniqueFd held(::open((in("k/") + kKey + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::flock(held.get(), LOCK_EX), 0);
  lock_wait_ = std::chrono::milliseconds(20);
  expect_in_memory(in("k"), "has held the lock");
  EXPECT_FALSE(fs::exists(temp_.path / "k" / (kKey + ".cubin")));
}

// Runs `body` in a child and returns its exit code, or -1.
template <class Body>
pid_t start_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = body();
    } catch (...) {
    }
    ::_exit(code);
  }
  return child;
}
int exit_code(pid_t child) {
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST_F(KernelCacheTest, ReadOnlyOrForeignFolder) {
  if (::geteuid() != 0) {
    fs::create_directory(temp_.path / "k");
    fs::permissions(temp_.path / "k", fs::perms::owner_read | fs::perms::owner_exec);
    expect_in_memory(in("k"), "cannot write");
    fs::permissions(temp_.path / "k", fs::perms::owner_all);
    expect_in_memory("/usr", "belongs to user 0");
    return;
  }
  // Root can write everywhere, so another user asks: first for a folder of root's, then for its own read-only one.
  constexpr uid_t kNobody = 65534;
  fs::permissions(temp_.path, fs::perms::owner_all | fs::perms::others_exec);
  fs::create_directory(temp_.path / "roots");
  fs::permissions(temp_.path / "roots", fs::perms::owner_all | fs::perms::others_read | fs::perms::others_exec);
  fs::create_directory(temp_.path / "own");
  ASSERT_EQ(::chown(in("own").c_str(), kNobody, kNobody), 0);
  fs::permissions(temp_.path / "own", fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_EQ(exit_code(start_child([&] {
              if (::setgroups(0, nullptr) != 0 || ::setresgid(kNobody, kNobody, kNobody) != 0 ||
                  ::setresuid(kNobody, kNobody, kNobody) != 0)
                return 98;
              expect_in_memory(in("roots"), "belongs to user 0");
              said_.clear();
              compilations_ = 0;
              expect_in_memory(in("own"), "cannot write");
              return HasFailure() ? 1 : 0;
            })),
            0);
}

TEST_F(KernelCacheTest, ManyProcessesOneCompilation) {
  // Each child waits at the gate until all are there, then asks. The compiler appends a byte to a file at every call.
  int gate[2];
  ASSERT_EQ(::pipe(gate), 0);
  const std::string folder = in("k"), notes = temp_.write("notes");
  std::vector<pid_t> children;
  for (int i = 0; i < 8; ++i)
    children.push_back(start_child([&] {
      ::close(gate[1]);
      char byte;
      if (::read(gate[0], &byte, 1) != 0) return 97;  // end of file is the start signal
      KernelCache cache(folder, nullptr, lock_wait_);
      const CachedKernel kernel = cache.get(kKey, "1.0", "nvrtc 13.0", kSource, [&] {
        const int fd = ::open(notes.c_str(), O_WRONLY | O_APPEND);
        if (::write(fd, "c", 1) != 1) ::_exit(96);
        ::close(fd);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        Compiled compiled;
        compiled.cubin.assign(cubin_.begin(), cubin_.end());
        return compiled;
      });
      if (text_of(kernel) != cubin_) return 95;
      return kernel.origin == Origin::compiled ? 1 : kernel.origin == Origin::cache ? 0 : 2;
    }));
  ::close(gate[0]);
  ::close(gate[1]);
  int compiled = 0;
  for (const pid_t child : children) {
    const int code = exit_code(child);
    EXPECT_TRUE(code == 0 || code == 1) << "exit code " << code;
    compiled += code == 1;
  }
  EXPECT_EQ(compiled, 1);
  EXPECT_EQ(temp_.read("notes"), "c");
}

}  // namespace
}  // namespace ark::jit

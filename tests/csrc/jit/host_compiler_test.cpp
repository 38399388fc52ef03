// Tests the host compiler: how it is found, run and killed, and that its cached results are not trusted if altered.
// Failing compilers are scripts; the working one is the machine's own.
#include "jit/host_compiler.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "temp_folder.hpp"
#include "util/error.hpp"
#include "util/run_process.hpp"

namespace ark::jit {
namespace {

using Origin = CachedKernel::Origin;
namespace fs = std::filesystem;
using std::chrono::milliseconds;

std::string answer(int number) {
  return "extern \"C\" __attribute__((visibility(\"default\"))) int answer() { return " + std::to_string(number) +
         "; }\n";
}
int ask(const LoadedLibrary& library) {
  return reinterpret_cast<int (*)()>(library.symbol("answer"))();
}

class HostCompilerTest : public ::testing::Test {
 protected:
  Settings settings() {
    Settings made;
    made.version = "1.0";
    made.kernels_dir = (temp_.path / "kernels").string();
    made.cache_dir = (temp_.path / "cache").string();
    made.log = [this](const std::string& line) { said_.push_back(line); };
    temp_.write("kernels/cpu/one.hpp", "#pragma once\n#define ONE 1\n");
    return made;
  }
  // A compiler made of a few lines of shell, which run for everything except --version and the macros.
  Settings with_script(const std::string& script) {
    Settings made = settings();
    made.cxx = temp_.write(
        "cxx", "#!/bin/sh\ncase \"$*\" in --version) echo fake 1.0; exit 0;; *-dM*) exit 0;; esac\n" + script + "\n");
    ::chmod(made.cxx.c_str(), 0700);
    return made;
  }
  void expect_failure(const Settings& with, const std::string& why, milliseconds limit = std::chrono::seconds(60)) {
    HostCompiler compiler(with, limit);
    try {
      compiler.library(answer(1));
      ADD_FAILURE() << "no error, for " << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::compile_failed);
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.message()).find('\n'), std::string::npos) << error.what();
      EXPECT_FALSE(error.context().remedy.empty());
    }
  }
  std::string only_file(const std::string& suffix) {
    std::string found;
    for (const auto& entry : fs::directory_iterator(temp_.path / "cache"))
      if (entry.path().string().ends_with(suffix)) found = entry.path().string();
    return found;
  }
  // Stores a result and spoils it. It must be compiled again, and then be found.
  template <class Spoil>
  void expect_recompiled(Spoil&& spoil) {
    HostCompiler compiler(settings());
    ASSERT_EQ(compiler.library(answer(5)).origin, Origin::compiled);
    spoil();
    HostCompiler::Result again = compiler.library(answer(5));
    EXPECT_EQ(again.origin, Origin::compiled);
    EXPECT_EQ(ask(LoadedLibrary(again.library)), 5);
    EXPECT_EQ(compiler.library(answer(5)).origin, Origin::cache);
    EXPECT_TRUE(said_.empty());
  }

  TempFolder temp_;
  std::vector<std::string> said_;
};

TEST_F(HostCompilerTest, CompiledThenFound) {
  HostCompiler compiler(settings());
  const HostCompiler::Result fresh = compiler.library("#include \"cpu/one.hpp\"\n" + answer(42) + "int x = ONE;\n");
  EXPECT_EQ(fresh.origin, Origin::compiled);
  EXPECT_EQ(ask(LoadedLibrary(fresh.library)), 42);
  HostCompiler another(settings());
  const HostCompiler::Result found = another.library("#include \"cpu/one.hpp\"\n" + answer(42) + "int x = ONE;\n");
  EXPECT_EQ(found.origin, Origin::cache);
  EXPECT_EQ(found.library, fresh.library);
  EXPECT_EQ(temp_.read("cache/" + fresh.key + ".cpp").find("#include"), 0u);
  const std::string meta = temp_.read("cache/" + fresh.key + ".meta.json");
  for (const char* part : {"\"so_sha256\":\"", "-march=native", "\"arch\":\"native-"})
    EXPECT_NE(meta.find(part), std::string::npos) << meta;
  struct stat status {};
  ASSERT_EQ(::stat((temp_.path / "cache").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
}

TEST_F(HostCompilerTest, SeveralLibrariesAtOnceAreTheirOwn) {
  HostCompiler compiler(settings());
  const auto one = compiler.library(answer(1)).library, two = compiler.library(answer(2)).library;
  LoadedLibrary first(one), second(two);
  EXPECT_EQ(ask(first), 1);
  EXPECT_EQ(ask(second), 2);
  // Descriptors are reused, and with them the names that the loader sees.
  for (int i = 0; i < 4; ++i) EXPECT_EQ(ask(LoadedLibrary(i % 2 == 0 ? one : two)), i % 2 == 0 ? 1 : 2);
  EXPECT_THROW(first.symbol("question"), Error);
  EXPECT_THROW(LoadedLibrary(std::vector<uint8_t>(1000, 7)), Error);
}

TEST_F(HostCompilerTest, KeyHoldsHeadersAndOptions) {
  Settings with = settings();
  HostCompiler compiler(with);
  const std::string key = compiler.library(answer(1)).key;
  temp_.write("kernels/cpu/one.hpp", "#pragma once\n#define ONE 2\n");
  EXPECT_NE(HostCompiler(with).library(answer(1)).key, key);
  settings();  // restores the header
  EXPECT_EQ(HostCompiler(with).library(answer(1)).key, key);
  with.cxx_options = {"-O1"};
  EXPECT_NE(HostCompiler(with).library(answer(1)).key, key);
}

TEST_F(HostCompilerTest, Tampered) {
  expect_recompiled([&] {
    const std::string name = only_file(".so");
    std::fstream file(name, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(200);
    file.put('x');
  });
}
TEST_F(HostCompilerTest, Truncated) {
  expect_recompiled([&] { fs::resize_file(only_file(".so"), 100); });
}
TEST_F(HostCompilerTest, Empty) {
  expect_recompiled([&] { fs::resize_file(only_file(".so"), 0); });
}
TEST_F(HostCompilerTest, MetaMissing) {
  expect_recompiled([&] { fs::remove(only_file(".meta.json")); });
}
TEST_F(HostCompilerTest, ReplacedByALink) {
  expect_recompiled([&] {
    const std::string name = only_file(".so");
    fs::rename(name, temp_.path / "elsewhere.so");
    fs::create_symlink(temp_.path / "elsewhere.so", name);
  });
}

TEST_F(HostCompilerTest, FolderOfNoUse) {
  Settings with = settings();
  temp_.write("file", "in the way");
  with.cache_dir = (temp_.path / "file").string();
  HostCompiler compiler(with);
  for (int i = 0; i < 2; ++i) {
    const HostCompiler::Result result = compiler.library(answer(3));
    EXPECT_EQ(result.origin, Origin::memory);
    EXPECT_EQ(ask(LoadedLibrary(result.library)), 3);
  }
  EXPECT_EQ(said_.size(), 1u);
}

TEST_F(HostCompilerTest, Missing) {
  Settings with = settings();
  with.cxx = "/no/such/compiler";
  expect_failure(with, "/no/such/compiler");
  with.cxx = "no-such-compiler-in-path";
  expect_failure(with, "no-such-compiler-in-path");
}
TEST_F(HostCompilerTest, NoProgram) {
  Settings with = settings();
  with.cxx = temp_.write("text", "not a program");
  expect_failure(with, "is not there or no program");
  ::chmod(with.cxx.c_str(), 0700);
  expect_failure(with, "cannot be started");
}
TEST_F(HostCompilerTest, FailsWithItsFirstError) {
  expect_failure(with_script("echo 'In file included from x'; echo 'plan.cpp:3:1: error: no such thing' >&2; "
                             "echo 'plan.cpp:4:1: error: another'; exit 1"),
                 "failed (exit status 1): plan.cpp:3:1: error: no such thing");
  expect_failure(with_script("exit 3"), "failed with exit status 3 and no error message");
}
TEST_F(HostCompilerTest, RealErrorOfTheRealCompiler) {
  HostCompiler compiler(settings());
  try {
    compiler.library("this is no program;\n");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("error"), std::string::npos) << error.what();
  }
}
TEST_F(HostCompilerTest, Killed) {
  expect_failure(with_script("kill -9 $$"), "was killed by signal 9");
}
TEST_F(HostCompilerTest, WritesNothing) {
  expect_failure(with_script("exit 0"), "wrote no library");
}
TEST_F(HostCompilerTest, HangsWithAChild) {
  const std::string alive = (temp_.path / "pid").string();
  const auto start = std::chrono::steady_clock::now();
  expect_failure(with_script("sleep 1000 & echo $! > " + alive + "; wait"), "took longer than 300 ms",
                 milliseconds(300));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  std::ifstream file(alive);
  pid_t child = 0;
  file >> child;
  ASSERT_GT(child, 0);
  // Gone, or dead but not yet reaped by its adoptive parent.
  std::string state;
  for (int i = 0; i < 1000; ++i) {
    std::ifstream status("/proc/" + std::to_string(child) + "/stat");
    std::string pid, name;
    state.clear();
    if (!(status >> pid >> name >> state) || state == "Z") break;
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_TRUE(state.empty() || state == "Z") << "what the compiler started is " << state;
}

TEST_F(HostCompilerTest, NoShellReadsItsArguments) {
  Settings with = settings();
  with.cxx_options = {"-DTEXT=\"$(touch " + (temp_.path / "pwned").string() + ");&|\""};
  EXPECT_EQ(ask(LoadedLibrary(HostCompiler(with).library(answer(9)).library)), 9);
  EXPECT_FALSE(fs::exists(temp_.path / "pwned"));
}

TEST_F(HostCompilerTest, LeavesNoFoldersBehind) {
  auto count = [] {
    int folders = 0;
    for (const auto& entry : fs::directory_iterator(fs::temp_directory_path()))
      folders += entry.path().filename().string().rfind("ark-compile-", 0) == 0 ? 1 : 0;
    return folders;
  };
  ::setenv("TMPDIR", temp_.path.c_str(), 1);
  HostCompiler(settings()).library(answer(1));
  expect_failure(with_script("exit 1"), "failed");
  EXPECT_EQ(count(), 0);
  ::setenv("TMPDIR", (temp_.path / "missing").c_str(), 1);
  EXPECT_EQ(ask(LoadedLibrary(HostCompiler(settings()).library(answer(2)).library)), 2);
  ::unsetenv("TMPDIR");
}

TEST_F(HostCompilerTest, ManyProcessesOneCompilation) {
  const std::string log = (temp_.path / "log").string();
  const Settings with = with_script("echo run >> " + log + "; sleep 0.3; exec c++ \"$@\"");
  constexpr int kProcesses = 5;
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int code = 1;
      try {
        code = ask(LoadedLibrary(HostCompiler(with).library(answer(77)).library)) == 77 ? 0 : 2;
      } catch (...) {
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  EXPECT_EQ(temp_.read("log"), "run\n");
}

}  // namespace
}  // namespace ark::jit

// Finds and runs the host's compiler, and loads its results.
#include "jit/host_compiler.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "jit/kernel_files.hpp"
#include "util/error.hpp"
#include "util/run_process.hpp"
#include "util/sha256.hpp"

namespace ark::jit {

namespace {

namespace fs = std::filesystem;

constexpr char kRemedy[] = "Install g++ or clang++ (C++20), or name one in CXX; until then regions fall back.";

[[noreturn]] void host_failure(const std::string& what, const char* remedy = kRemedy) {
  ErrorContext context;
  context.remedy = remedy;
  throw Error(ErrorKind::compile_failed, what, context);
}

// Finds a program as a shell would, with or without a folder in its name; empty if there is none.
std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return ::access(name.c_str(), X_OK) == 0 ? name : std::string();
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "/usr/bin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    struct stat status {};
    if (::stat(candidate.c_str(), &status) == 0 && S_ISREG(status.st_mode) && ::access(candidate.c_str(), X_OK) == 0)
      return candidate;
  }
  return {};
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// Returns the compiler's first error; empty if there is none.
std::string first_error(const std::string& output) {
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);)
    if (line.find("error") != std::string::npos || line.find("Error") != std::string::npos) return line;
  return {};
}

// A folder that is removed with its contents. It uses the C library, because libtorch.so (2.11.0+cu130) exports a
// broken std::filesystem::remove_all that calls from this process's modules would reach.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    // Tries the user's folder, then /tmp, so that a wrong TMPDIR does not disable compiled kernels.
    std::vector<std::string> places = {"/tmp"};
    if (const char* chosen = std::getenv("TMPDIR"); chosen != nullptr && *chosen != '\0')
      places.insert(places.begin(), chosen);
    std::string tried;
    for (const std::string& place : places) {
      std::string name = place + "/ark-compile-XXXXXX";
      if (::mkdtemp(name.data()) != nullptr) {
        path_ = name;
        return;
      }
      tried += (tried.empty() ? "" : ", ") + place + ": " + std::strerror(errno);
    }
    host_failure("no folder can be made for the C++ compiler (" + tried + ")",
                 "Set TMPDIR to a folder that can be written; until then regions fall back.");
  }
  ~TemporaryFolder() {
    constexpr int kDescriptors = 8;
    ::nftw(
        path_.c_str(), [](const char* name, const struct stat*, int, struct FTW*) { return std::remove(name), 0; },
        kDescriptors, FTW_DEPTH | FTW_PHYS);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw system_error("cannot write " + path.string(), errno, "Free space there, or set TMPDIR.");
}

std::string describe(const ProcessResult& result, std::chrono::milliseconds limit) {
  switch (result.end) {
    case ProcessResult::End::exited: {
      const std::string error = first_error(result.output), status = "exit status " + std::to_string(result.code);
      return error.empty() ? "failed with " + status + " and no error message" : "failed (" + status + "): " + error;
    }
    case ProcessResult::End::killed: return "was killed by signal " + std::to_string(result.code);
    case ProcessResult::End::timed_out: return "took longer than " + std::to_string(limit.count()) + " ms";
    case ProcessResult::End::stopped: return "was stopped: this process ends";
    case ProcessResult::End::not_started: return std::string("cannot be started: ") + std::strerror(result.code);
  }
  return {};
}

}  // namespace

LoadedLibrary::LoadedLibrary(const std::vector<uint8_t>& bytes) : fd_(::memfd_create("ark-plan", MFD_CLOEXEC)) {
  if (!fd_) throw system_error("cannot make a file in memory for a compiled plan", errno);
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t put = ::write(fd_.get(), bytes.data() + done, bytes.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) throw system_error("cannot write a compiled plan to memory", errno);
    done += static_cast<size_t>(put);
  }
  // The descriptor must stay open as long as the library: dlopen identifies libraries by name, so the number must not
  // be reused for another file.
  const std::string name = "/proc/self/fd/" + std::to_string(fd_.get());
  handle_ = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) {
    const char* reason = ::dlerror();
    host_failure(std::string("cannot load a compiled plan: ") + (reason != nullptr ? reason : "unknown reason"),
                 "Mount /proc, and allow memory to be executed.");
  }
}

LoadedLibrary::~LoadedLibrary() {
  if (handle_ != nullptr) ::dlclose(handle_);
}

LoadedLibrary::LoadedLibrary(LoadedLibrary&& other) noexcept
    : fd_(std::move(other.fd_)), handle_(std::exchange(other.handle_, nullptr)) {}

void* LoadedLibrary::symbol(const char* name) const {
  void* found = ::dlsym(handle_, name);
  if (found == nullptr) host_failure(std::string("a compiled plan has no ") + name, "Remove the kernel cache.");
  return found;
}

std::vector<uint8_t> LoadedLibrary::bytes() const {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) throw system_error("cannot read a compiled plan", errno);
  std::vector<uint8_t> bytes(static_cast<size_t>(status.st_size));
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::pread(fd_.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw system_error("cannot read a compiled plan", got < 0 ? errno : EIO);
    done += static_cast<size_t>(got);
  }
  return bytes;
}

HostCompiler::HostCompiler(Settings settings, std::chrono::milliseconds limit)
    : settings_(std::move(settings)),
      limit_(limit),
      cache_(settings_.cache_dir, settings_.log, limit + std::chrono::seconds(10)) {}

std::vector<std::string> HostCompiler::default_options() {
  // Contraction is on, because products depend on fused multiply-adds; results are compared with tolerances anyway and
  // are reproducible on one machine. errno and floating-point traps are not used and would block vectorisation. No
  // other part of -ffast-math: infinities and NaN are values. -fwrapv makes integers wrap as in eager PyTorch; without
  // it `x + 1 > x` is always true.
  return {"-std=c++20",      "-O3",
          "-march=native",   "-fPIC",
          "-shared",         "-fvisibility=hidden",
          "-fno-math-errno", "-fno-trapping-math",
          "-fwrapv",         "-ffp-contract=fast",
          "-Wno-psabi"};
}

const HostCompiler::Tool& HostCompiler::tool() {
  const std::lock_guard lock(mutex_);
  if (tool_) return *tool_;
  const std::vector<std::string> names = settings_.cxx.empty() ? std::vector<std::string>{"c++", "g++", "clang++"}
                                                               : std::vector<std::string>{settings_.cxx};
  std::string path;
  for (const std::string& name : names)
    if (path = find_program(name); !path.empty()) break;
  if (path.empty())
    host_failure(settings_.cxx.empty() ? "there is no C++ compiler in PATH (c++, g++ or clang++)"
                                       : "the C++ compiler '" + settings_.cxx + "' is not there or no program");
  Tool tool{{path}, {}, {}};
  tool.command.insert(tool.command.end(), settings_.cxx_words.begin(), settings_.cxx_words.end());
  const auto with = [&](std::initializer_list<const char*> arguments) {
    std::vector<std::string> all = tool.command;
    all.insert(all.end(), arguments.begin(), arguments.end());
    return all;
  };
  const std::chrono::milliseconds limit = std::min<std::chrono::milliseconds>(limit_, std::chrono::seconds(30));
  const ProcessResult version = run_process(with({"--version"}), "/", limit);
  if (version.end != ProcessResult::End::exited || version.code != 0)
    host_failure("the C++ compiler " + tool.text() + ", asked for its --version, " + describe(version, limit));
  tool.version = first_line(version.output);
  // The preprocessor's macros show the instruction set behind `native`.
  const ProcessResult macros = run_process(with({"-march=native", "-dM", "-E", "-x", "c++", "/dev/null"}), "/", limit);
  if (macros.end != ProcessResult::End::exited || macros.code != 0)
    host_failure("the C++ compiler " + tool.text() + " " + describe(macros, limit));
  tool.machine =
      sha256_hex({reinterpret_cast<const uint8_t*>(macros.output.data()), macros.output.size()}).substr(0, 16);
  tool_ = std::move(tool);
  return *tool_;
}

std::string HostCompiler::Tool::text() const {
  std::string all;
  for (const std::string& word : command) all += (all.empty() ? "" : " ") + word;
  return all;
}

std::string HostCompiler::compiler() {
  return tool().text() + ": " + tool().version;
}

const std::vector<Header>& HostCompiler::headers() {
  const std::lock_guard lock(mutex_);
  if (headers_) return *headers_;
  std::vector<Header> mine;
  for (Header& header : read_headers(settings_.kernels_dir))
    if (header.name.rfind("cpu/", 0) == 0 || header.name.rfind("protocol/", 0) == 0) mine.push_back(std::move(header));
  headers_ = std::move(mine);
  return *headers_;
}

Source HostCompiler::source_of(const std::string& text) {
  Source source;
  source.stub = text;
  source.arch = "native-" + tool().machine;
  source.options = default_options();
  source.options.insert(source.options.end(), settings_.cxx_options.begin(), settings_.cxx_options.end());
  source.language = Language::cpp;
  return source;
}

std::string HostCompiler::key_of(const Source& source) {
  return cache_key(settings_.version, tool().text() + " " + tool().version, source, headers());
}

std::string HostCompiler::key(const std::string& text) {
  return key_of(source_of(text));
}

HostCompiler::Result HostCompiler::library(const std::string& text, bool afresh) {
  const Tool& with = tool();
  const Source source = source_of(text);
  Result result;
  result.compiler = with.version;
  result.key = key_of(source);
  CachedKernel kernel = cache_.get(
      result.key, settings_.version, with.version, source, [&] { return compile(source, with); }, afresh);
  result.library = std::move(kernel.cubin);
  result.origin = kernel.origin;
  return result;
}

Compiled HostCompiler::compile(const Source& source, const Tool& with) {
  const TemporaryFolder folder;
  write_text(folder.path() / "plan.cpp", source.stub);
  for (const Header& header : headers()) {
    const fs::path path = folder.path() / "kernels" / header.name;
    std::error_code ignored;
    fs::create_directories(path.parent_path(), ignored);
    write_text(path, header.text);
  }
  std::vector<std::string> arguments = with.command;
  arguments.insert(arguments.end(), source.options.begin(), source.options.end());
  for (const char* one : {"-Ikernels", "plan.cpp", "-o", "plan.so"}) arguments.emplace_back(one);
  const ProcessResult result = run_process(arguments, folder.path().string(), limit_);
  if (result.end != ProcessResult::End::exited || result.code != 0)
    host_failure("the C++ compiler " + with.text() + " " + describe(result, limit_),
                 "Try another compiler (CXX); until then the region falls back.");
  std::ifstream file(folder.path() / "plan.so", std::ios::binary);
  Compiled compiled;
  compiled.cubin.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  compiled.log = result.output;
  if (compiled.cubin.empty()) host_failure("the C++ compiler " + with.text() + " wrote no library");
  return compiled;
}

}  // namespace ark::jit

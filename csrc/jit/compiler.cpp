// The Compiler, and the process's settings.
#include "jit/compiler.hpp"

#include <memory>
#include <mutex>
#include <utility>

namespace ark::jit {

namespace {

// Guards the variables below. No Settings is copied or destroyed under it: its log may be a Python function, which
// needs the GIL, whose holder may wait for this mutex.
std::mutex g_settings_mutex;

struct Process {
  std::shared_ptr<const Settings> settings = std::make_shared<const Settings>();
  bool configured = false;
  std::function<void()> configures;
};

// Never destroyed: its log may be a Python function, and Python is gone by then.
Process& process() {
  static auto* process = new Process;
  return *process;
}

}  // namespace

void configure(Settings settings) {
  auto shared = std::make_shared<const Settings>(std::move(settings));
  const std::lock_guard lock(g_settings_mutex);
  std::swap(process().settings, shared);
  process().configured = true;
}

void on_first_use(std::function<void()> configures) {
  const std::lock_guard lock(g_settings_mutex);
  process().configures = std::move(configures);
}

void ensure_configured() {
  std::function<void()> configures;
  {
    const std::lock_guard lock(g_settings_mutex);
    if (process().configured) return;
    configures = process().configures;
  }
  if (configures) configures();
}

Settings settings() {
  std::shared_ptr<const Settings> now;
  {
    const std::lock_guard lock(g_settings_mutex);
    now = process().settings;
  }
  return *now;
}

// The key does not cover headers of other folders, so results that include them are not cached.
Compiler::Compiler(Settings settings, int driver_version, LibraryOpener opener)
    : settings_(std::move(settings)),
      driver_version_(driver_version),
      opener_(std::move(opener)),
      prebuilt_(settings_.include_dirs.empty() ? settings_.prebuilt_dir : std::string(), driver_version),
      cache_(settings_.include_dirs.empty() ? settings_.cache_dir : std::string(), settings_.log) {}

const Nvrtc& Compiler::nvrtc() {
  const std::lock_guard lock(mutex_);
  if (!nvrtc_) nvrtc_ = Nvrtc::find(settings_, driver_version_, opener_);
  return *nvrtc_;
}

const std::vector<Header>& Compiler::headers() {
  const std::lock_guard lock(mutex_);
  if (!headers_) headers_ = read_headers(settings_.kernels_dir);
  return *headers_;
}

std::string Compiler::nvrtc_version() {
  return nvrtc().version();
}

std::string Compiler::nvrtc_path() {
  return nvrtc().path();
}

// Reads "13.0" from .../libnvrtc-builtins.so.13.0 beside the first candidate. Returns an empty string if the library
// must be opened to find out.
std::string Compiler::version_by_name() const {
  const std::vector<NvrtcCandidate> candidates = nvrtc_candidates(settings_, driver_version_);
  if (candidates.empty() || candidates.front().builtins.empty()) return {};
  const std::string& builtins = candidates.front().builtins;
  const std::string version = builtins.substr(builtins.rfind(".so.") + 4);
  const size_t dot = version.find('.');
  return version.substr(0, version.find('.', dot + 1));
}

Source Compiler::complete(const Source& source) const {
  Source whole = source;
  whole.options.insert(whole.options.begin(), settings_.options.begin(), settings_.options.end());
  return whole;
}

CachedKernel Compiler::get(const Source& source) {
  const Source whole = complete(source);
  if (prebuilt_.any()) {
    if (auto found = prebuilt_.find(settings_.version, whole, headers()))
      return {std::move(*found), CachedKernel::Origin::cache};
  }
  struct OtherVersion {};
  auto by_version = [&](const std::string& version) {
    const std::string compiler = "nvrtc " + version;
    const std::string key = cache_key(settings_.version, compiler, whole, headers());
    return cache_.get(key, settings_.version, compiler, whole, [&] {
      if (nvrtc().version() != version) throw OtherVersion{};
      return nvrtc().compile(whole, headers(), settings_.include_dirs, key.substr(0, 16) + ".cu");
    });
  };
  if (const std::string version = version_by_name(); !version.empty()) {
    try {
      return by_version(version);
    } catch (const OtherVersion&) {  // the library of that name cannot be opened or has another version
    }
  }
  return by_version(nvrtc().version());
}

Compiled Compiler::compile(const Source& source) {
  return nvrtc().compile(complete(source), headers(), settings_.include_dirs, "stub.cu");
}

}  // namespace ark::jit

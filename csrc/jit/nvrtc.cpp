// Finds, opens and calls NVRTC.
#include "jit/nvrtc.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <type_traits>
#include <utility>

#include "jit/spills.hpp"
#include "util/error.hpp"

namespace ark::jit {

namespace fs = std::filesystem;

namespace {

constexpr int kOldestMajor = 12, kNewestMajor = 13;
constexpr char kStem[] = "libnvrtc";
constexpr char kBuiltins[] = "libnvrtc-builtins";
constexpr size_t kLogShown = 2000;
constexpr char kInstall[] =
    "PyTorch's CUDA wheels bring it (package nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12 for CUDA 12): install that "
    "package, or name the library in ARK_NVRTC.";

bool starts_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

// The major version in "libnvrtc.so.13", "libnvrtc.so.12.8.93" or "libnvrtc-0a1b2c3d.so.12"; 0: another file.
int major_of(const std::string& file) {
  if (!starts_with(file, kStem) || starts_with(file, kBuiltins)) return 0;
  const size_t so = file.find(".so.");
  if (so == std::string::npos) return 0;
  const std::string stem = file.substr(0, so);
  if (stem != kStem && !starts_with(stem, "libnvrtc-")) return 0;  // libnvrtc.alt is another build of it
  for (int major = kNewestMajor; major >= kOldestMajor; --major) {
    const std::string number = std::to_string(major), tail = file.substr(so + 4);
    if (tail == number || starts_with(tail, number + ".")) return major;
  }
  return 0;
}

std::vector<std::string> files_of(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// The folder's "libnvrtc-builtins.so.13.0" or "libnvrtc-builtins-0a1b2c3d.so.12.8" of that major version; empty if
// none.
std::string builtins_in(const fs::path& folder, int major) {
  for (const std::string& name : files_of(folder)) {
    const size_t so = name.find(".so." + std::to_string(major) + ".");
    if (so == std::string::npos) continue;
    const std::string stem = name.substr(0, so);
    if (stem == kBuiltins || starts_with(stem, std::string(kBuiltins) + "-")) return (folder / name).string();
  }
  return {};
}

// Adds a folder's libraries, newest major version first, and a plain "libnvrtc.so.13" before longer names.
void add_folder(std::vector<NvrtcCandidate>& all, const fs::path& folder, int only_major = 0) {
  std::vector<NvrtcCandidate> here;
  for (const std::string& name : files_of(folder)) {
    const int major = major_of(name);
    if (major == 0 || (only_major != 0 && major != only_major)) continue;
    here.push_back({(folder / name).string(), builtins_in(folder, major), major});
  }
  std::stable_sort(here.begin(), here.end(), [](const NvrtcCandidate& a, const NvrtcCandidate& b) {
    return a.major != b.major ? a.major > b.major : a.library.size() < b.library.size();
  });
  all.insert(all.end(), here.begin(), here.end());
}

}  // namespace

std::vector<NvrtcCandidate> nvrtc_candidates(const Settings& settings, int driver_version) {
  std::vector<NvrtcCandidate> all;
  if (!settings.nvrtc.empty()) {
    const fs::path path(settings.nvrtc);
    const int named = major_of(path.filename().string());
    std::error_code error;
    const int real = named != 0 ? named : major_of(fs::canonical(path, error).filename().string());  // libnvrtc.so
    return {{settings.nvrtc, builtins_in(path.parent_path(), real), real}};
  }
  for (const fs::path root : settings.library_roots) {
    add_folder(all, root / "nvidia/cu13/lib", 13);
    add_folder(all, root / "nvidia/cuda_nvrtc/lib");
    add_folder(all, root / "torch/lib");
  }
  for (const fs::path toolkit : settings.toolkit_dirs) {
    add_folder(all, toolkit / "lib64");
    add_folder(all, toolkit / "lib");
    add_folder(all, toolkit / "targets/x86_64-linux/lib");
  }
  for (int major = kNewestMajor; major >= kOldestMajor; --major)
    all.push_back({std::string(kStem) + ".so." + std::to_string(major), {}, major});
  if (driver_version > 0)
    std::stable_partition(all.begin(), all.end(),
                          [&](const NvrtcCandidate& one) { return one.major <= driver_version / 1000; });
  return all;
}

// --- calls ---------------------------------------------------------------------------------------------------------

struct Nvrtc::Api {
  using Program = struct _nvrtcProgram*;
  const char* (*get_error_string)(int result);
  int (*version)(int* major, int* minor);
  int (*get_num_supported_archs)(int* count);
  int (*get_supported_archs)(int* archs);
  int (*create_program)(Program* program, const char* source, const char* name, int headers, const char* const* texts,
                        const char* const* names);
  int (*destroy_program)(Program* program);
  int (*compile_program)(Program program, int options, const char* const* texts);
  int (*get_cubin_size)(Program program, size_t* bytes);
  int (*get_cubin)(Program program, char* cubin);
  int (*get_log_size)(Program program, size_t* bytes);
  int (*get_log)(Program program, char* log);

  // Returns the first missing symbol, or nullptr.
  const char* resolve(const LibraryOpener& opener, void* library) {
    const char* missing = nullptr;
    auto one = [&](auto& member, const char* symbol) {
      member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(opener.symbol(library, symbol));
      if (member == nullptr && missing == nullptr) missing = symbol;
    };
    one(get_error_string, "nvrtcGetErrorString");
    one(version, "nvrtcVersion");
    one(get_num_supported_archs, "nvrtcGetNumSupportedArchs");
    one(get_supported_archs, "nvrtcGetSupportedArchs");
    one(create_program, "nvrtcCreateProgram");
    one(destroy_program, "nvrtcDestroyProgram");
    one(compile_program, "nvrtcCompileProgram");
    one(get_cubin_size, "nvrtcGetCUBINSize");
    one(get_cubin, "nvrtcGetCUBIN");
    one(get_log_size, "nvrtcGetProgramLogSize");
    one(get_log, "nvrtcGetProgramLog");
    return missing;
  }

  void check(int result, const std::string& what) const {
    if (result != 0) throw Error(ErrorKind::compile_failed, "NVRTC: " + what + " failed: " + get_error_string(result));
  }
};

Nvrtc Nvrtc::find(const Settings& settings, int driver_version, const LibraryOpener& opener) {
  std::string tried;
  for (const NvrtcCandidate& candidate : nvrtc_candidates(settings, driver_version)) {
    std::string why_not;
    if (!candidate.builtins.empty()) opener.open(candidate.builtins, why_not);  // if missing, compiling fails
    void* library = opener.open(candidate.library, why_not);
    auto api = std::make_shared<Api>();
    if (library != nullptr) {
      const char* missing = api->resolve(opener, library);
      Nvrtc found;
      if (missing != nullptr)
        why_not = std::string("it lacks ") + missing;
      else if (api->version(&found.major_, &found.minor_) != 0)
        why_not = "it does not tell its version";
      else if (found.major_ < kOldestMajor)
        why_not = "it is version " + found.version() + ", and 12.0 is the oldest that will do";
      else {
        found.path_ = candidate.library;
        found.api_ = std::move(api);
        return found;
      }
    }
    tried += "; " + candidate.library + ": " + why_not;
  }
  ErrorContext context;
  context.remedy = kInstall;
  throw Error(ErrorKind::compile_failed, "no NVRTC (libnvrtc), which compiles ark's CUDA kernels, can be used" + tried,
              context);
}

std::vector<std::string> Nvrtc::options_of(const Source& source, const std::vector<std::string>& include_dirs) const {
  std::vector<std::string> options = all_options(source);
  for (const std::string& folder : include_dirs) options.push_back("--include-path=" + folder);
  if (std::pair(major_, minor_) >= std::pair(12, 9)) options.push_back("--no-cache");
  return options;
}

Compiled Nvrtc::compile(const Source& source, const std::vector<Header>& headers,
                        const std::vector<std::string>& include_dirs, const std::string& name) const {
  int count = 0;
  api_->check(api_->get_num_supported_archs(&count), "nvrtcGetNumSupportedArchs");
  std::vector<int> archs(static_cast<size_t>(count));
  if (count > 0) api_->check(api_->get_supported_archs(archs.data()), "nvrtcGetSupportedArchs");
  const int wanted = starts_with(source.arch, "sm_") ? std::atoi(source.arch.c_str() + 3) : 0;
  if (std::find(archs.begin(), archs.end(), wanted) == archs.end()) {
    ErrorContext context;
    context.remedy = "Use a newer PyTorch with CUDA wheels, or name a newer libnvrtc in ARK_NVRTC.";
    throw Error(ErrorKind::compile_failed,
                "NVRTC " + version() + " (" + path_ + ") does not know the architecture '" + source.arch + "'",
                context);
  }

  std::vector<const char*> texts, names;
  for (const Header& header : headers) {
    texts.push_back(header.text.c_str());
    names.push_back(header.name.c_str());
  }
  Api::Program program = nullptr;
  api_->check(api_->create_program(&program, source.stub.c_str(), name.c_str(), static_cast<int>(headers.size()),
                                   texts.data(), names.data()),
              "nvrtcCreateProgram");
  const std::unique_ptr<Api::Program, int (*)(Api::Program*)> owner(&program, api_->destroy_program);

  const std::vector<std::string> options = options_of(source, include_dirs);
  std::vector<const char*> pointers;
  for (const std::string& option : options) pointers.push_back(option.c_str());
  const int result = api_->compile_program(program, static_cast<int>(pointers.size()), pointers.data());

  Compiled compiled;
  size_t bytes = 0;
  if (api_->get_log_size(program, &bytes) == 0 && bytes > 1) {
    compiled.log.resize(bytes);
    api_->check(api_->get_log(program, compiled.log.data()), "nvrtcGetProgramLog");
    compiled.log.resize(std::min(compiled.log.find('\0'), bytes));
  }
  if (result != 0) {
    ErrorContext context;
    context.remedy = "This is a defect of ark_torch or of its installation: report it with this text.";
    throw Error(ErrorKind::compile_failed,
                "kernel " + name + " does not compile for " + source.arch + " with NVRTC " + version() + " (" +
                    api_->get_error_string(result) + "): " + compiled.log.substr(0, kLogShown),
                context);
  }
  api_->check(api_->get_cubin_size(program, &bytes), "nvrtcGetCUBINSize");
  compiled.cubin.resize(bytes);
  api_->check(api_->get_cubin(program, reinterpret_cast<char*>(compiled.cubin.data())), "nvrtcGetCUBIN");
  compiled.resources = parse_resources(compiled.log);
  refuse_spills(source, compiled.resources);
  return compiled;
}

}  // namespace ark::jit

// Tests the search for NVRTC in folders laid out like PyTorch's wheels and a toolkit, with a pretended loader; the
// error if there is none; and the parser of ptxas's report. Real compilations: tests/jit/test_nvrtc.py.
#include "jit/nvrtc.hpp"

#include <gtest/gtest.h>

#include <map>

#include "jit/compiler.hpp"
#include "jit/spills.hpp"
#include "temp_folder.hpp"
#include "util/error.hpp"

namespace ark::jit {
namespace {

constexpr int kNoDriver = 0, kDriver12 = 12080, kDriver13 = 13000;

// nvidia-cuda-nvrtc 13, from PyTorch's CUDA 13 wheels.
void lay_out_cu13(const TempFolder& root) {
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.alt.so.13", "libnvrtc-builtins.so.13.0",
                           "libnvrtc-builtins.alt.so.13.0", "libcudart.so.13"})
    root.write(std::string("nvidia/cu13/lib/") + name);
}
// nvidia-cuda-nvrtc-cu12, from PyTorch's CUDA 12 wheels.
void lay_out_cu12(const TempFolder& root) {
  for (const char* name :
       {"libnvrtc.so.12", "libnvrtc.alt.so.12", "libnvrtc-builtins.so.12.8", "libnvrtc-builtins.alt.so.12.8"})
    root.write(std::string("nvidia/cuda_nvrtc/lib/") + name);
}

std::vector<std::string> libraries(const std::vector<NvrtcCandidate>& candidates) {
  std::vector<std::string> names;
  for (const NvrtcCandidate& one : candidates) names.push_back(one.library);
  return names;
}

// A loader that can open the entries of `versions` (path or bare name -> NVRTC's version), and records requests.
struct PretendedLoader {
  std::map<std::string, std::pair<int, int>> versions;
  std::vector<std::string> asked;
  std::string lacks;
  static inline std::pair<int, int> current;

  LibraryOpener opener() {
    LibraryOpener opener;
    opener.open = [this](const std::string& name, std::string& why_not) -> void* {
      asked.push_back(name);
      const auto found = versions.find(name);
      if (found != versions.end()) return &found->second;
      why_not = "pretended not to be there";
      return nullptr;
    };
    opener.symbol = [this](void* library, const char* symbol) -> void* {
      if (symbol == lacks) return nullptr;
      current = *static_cast<std::pair<int, int>*>(library);
      return reinterpret_cast<void*>(+[](int* major, int* minor) {
        *major = current.first;
        *minor = current.second;
        return 0;
      });
    };
    return opener;
  }
};

TEST(NvrtcCandidates, Cuda13Wheels) {
  const TempFolder root;
  lay_out_cu13(root);
  Settings settings;
  settings.library_roots = {(root.path / "nothing here").string(), root.path.string()};
  const auto candidates = nvrtc_candidates(settings, kDriver13);
  const std::string folder = (root.path / "nvidia/cu13/lib/").string();
  EXPECT_EQ(libraries(candidates),
            (std::vector<std::string>{folder + "libnvrtc.so.13", "libnvrtc.so.13", "libnvrtc.so.12"}));
  EXPECT_EQ(candidates[0].builtins, folder + "libnvrtc-builtins.so.13.0");
  EXPECT_EQ(candidates[0].major, 13);
}

TEST(NvrtcCandidates, Cuda12Wheels) {
  const TempFolder root;
  lay_out_cu12(root);
  Settings settings;
  settings.library_roots = {root.path.string()};
  for (const int driver : {kNoDriver, kDriver12, kDriver13}) {
    const auto candidates = nvrtc_candidates(settings, driver);
    const std::string folder = (root.path / "nvidia/cuda_nvrtc/lib/").string();
    EXPECT_EQ(candidates[0].library, folder + "libnvrtc.so.12");
    EXPECT_EQ(candidates[0].builtins, folder + "libnvrtc-builtins.so.12.8");
    EXPECT_EQ(candidates[0].major, 12);
  }
}

TEST(NvrtcCandidates, BesideLibtorch) {
  // PyTorch's older wheels and LibTorch's archives contain it under a name with a hash.
  const TempFolder root;
  for (const char* name : {"libnvrtc-0a1b2c3d.so.12", "libnvrtc-builtins.so.12.6", "libtorch.so", "libnvrtc.so.11.2"})
    root.write(std::string("torch/lib/") + name);
  Settings settings;
  settings.library_roots = {root.path.string()};
  const auto candidates = nvrtc_candidates(settings, kNoDriver);
  const std::string folder = (root.path / "torch/lib/").string();
  EXPECT_EQ(libraries(candidates),
            (std::vector<std::string>{folder + "libnvrtc-0a1b2c3d.so.12", "libnvrtc.so.13", "libnvrtc.so.12"}));
  EXPECT_EQ(candidates[0].builtins, folder + "libnvrtc-builtins.so.12.6");
}

TEST(NvrtcCandidates, WheelsBeforeToolkitAndNoneNewerThanTheDriver) {
  const TempFolder root, toolkit;
  lay_out_cu13(root);
  lay_out_cu12(root);
  toolkit.write("lib64/libnvrtc.so.12.4.127");
  toolkit.write("lib64/libnvrtc.so.12");
  toolkit.write("lib64/libnvrtc-builtins.so.12.4");
  Settings settings;
  settings.library_roots = {root.path.string()};
  settings.toolkit_dirs = {toolkit.path.string()};
  const std::string cu13 = (root.path / "nvidia/cu13/lib/libnvrtc.so.13").string(),
                    cu12 = (root.path / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12").string(),
                    kit = (toolkit.path / "lib64/libnvrtc.so.12").string();
  EXPECT_EQ(libraries(nvrtc_candidates(settings, kDriver13)),
            (std::vector<std::string>{cu13, cu12, kit, kit + ".4.127", "libnvrtc.so.13", "libnvrtc.so.12"}));
  // A CUDA 12 driver cannot load what NVRTC 13 compiled.
  EXPECT_EQ(libraries(nvrtc_candidates(settings, kDriver12)),
            (std::vector<std::string>{cu12, kit, kit + ".4.127", "libnvrtc.so.12", cu13, "libnvrtc.so.13"}));
}

TEST(NvrtcCandidates, TheNamedOneAlone) {
  const TempFolder root;
  lay_out_cu13(root);
  Settings settings;
  settings.library_roots = {root.path.string()};
  settings.nvrtc = root.write("mine/libnvrtc.so.12");
  root.write("mine/libnvrtc-builtins.so.12.9");
  const auto candidates = nvrtc_candidates(settings, kDriver13);
  EXPECT_EQ(libraries(candidates), std::vector<std::string>{settings.nvrtc});
  EXPECT_EQ(candidates[0].builtins, (root.path / "mine/libnvrtc-builtins.so.12.9").string());
  std::filesystem::create_symlink("libnvrtc.so.12", root.path / "mine/libnvrtc.so");
  settings.nvrtc = (root.path / "mine/libnvrtc.so").string();
  EXPECT_EQ(nvrtc_candidates(settings, kDriver13)[0].builtins, candidates[0].builtins) << "a link names no generation";
}

TEST(FindNvrtc, OpensTheBuiltinsFirst) {
  const TempFolder root;
  lay_out_cu13(root);
  Settings settings;
  settings.library_roots = {root.path.string()};
  const std::string folder = (root.path / "nvidia/cu13/lib/").string();
  PretendedLoader loader;
  loader.versions[folder + "libnvrtc.so.13"] = {13, 0};
  const Nvrtc nvrtc = Nvrtc::find(settings, kNoDriver, loader.opener());
  EXPECT_EQ(nvrtc.path(), folder + "libnvrtc.so.13");
  EXPECT_EQ(nvrtc.version(), "13.0");
  EXPECT_EQ(loader.asked, (std::vector<std::string>{folder + "libnvrtc-builtins.so.13.0", folder + "libnvrtc.so.13"}));
}

TEST(FindNvrtc, TakesTheNextWhenOneDoesNotOpen) {
  const TempFolder root;
  lay_out_cu13(root);  // the file exists but cannot be loaded, for example an incomplete download
  Settings settings;
  settings.library_roots = {root.path.string()};
  PretendedLoader loader;
  loader.versions["libnvrtc.so.12"] = {12, 6};
  const Nvrtc nvrtc = Nvrtc::find(settings, kNoDriver, loader.opener());
  EXPECT_EQ(nvrtc.path(), "libnvrtc.so.12");
  EXPECT_EQ(nvrtc.version(), "12.6");
}

TEST(FindNvrtc, NoneButOursKeepsCubins) {
  const Source source{"stub", "sm_90a", {"--one"}};
  const auto options = [&](std::pair<int, int> version) {
    Settings settings;
    settings.nvrtc = "libnvrtc.so";
    PretendedLoader loader;
    loader.versions["libnvrtc.so"] = version;
    return Nvrtc::find(settings, kNoDriver, loader.opener()).options_of(source, {"folder"});
  };
  std::vector<std::string> older = all_options(source);
  older.push_back("--include-path=folder");
  EXPECT_EQ(options({12, 0}), older);
  EXPECT_EQ(options({12, 8}), older);
  std::vector<std::string> newer = older;
  newer.push_back("--no-cache");
  for (const std::pair<int, int> version : {std::pair(12, 9), std::pair(13, 0), std::pair(13, 3)})
    EXPECT_EQ(options(version), newer) << version.first << "." << version.second;
}

std::string message_of(const std::function<void()>& body, ErrorKind kind = ErrorKind::compile_failed) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    return error.what();
  }
  return "nothing was thrown";
}

TEST(FindNvrtc, NoneSaysWhatWasTriedAndWhatToInstall) {
  const TempFolder root;
  lay_out_cu13(root);
  Settings settings;
  settings.library_roots = {root.path.string()};
  PretendedLoader loader;
  loader.versions["libnvrtc.so.13"] = {13, 0};
  loader.versions["libnvrtc.so.12"] = {11, 8};
  loader.lacks = "nvrtcGetCUBIN";
  std::string message = message_of([&] { Nvrtc::find(settings, kNoDriver, loader.opener()); });
  for (const std::string& part :
       {(root.path / "nvidia/cu13/lib/libnvrtc.so.13").string() + ": pretended not to be there",
        std::string("libnvrtc.so.13: it lacks nvrtcGetCUBIN"), std::string("install"), std::string("ARK_NVRTC")})
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
  loader.lacks.clear();
  loader.versions.erase("libnvrtc.so.13");
  message = message_of([&] { Nvrtc::find(settings, kNoDriver, loader.opener()); });
  EXPECT_NE(message.find("libnvrtc.so.12: it is version 11.8"), std::string::npos) << message;
}

TEST(Compiler, WarmStartOpensNothing) {
  // With a cache entry NVRTC is not opened, because the name of its builtins gives the version.
  const TempFolder root, cache;
  lay_out_cu13(root);
  root.write("kernels/cuda/a.cuh", "text");
  Settings settings;
  settings.version = "1.0";
  settings.library_roots = {root.path.string()};
  settings.kernels_dir = (root.path / "kernels").string();
  settings.cache_dir = (cache.path / "k").string();
  const Source source{"stub", "sm_90a", {}};
  const std::string key = cache_key("1.0", "nvrtc 13.0", source, read_headers(settings.kernels_dir));
  KernelCache(settings.cache_dir, nullptr).get(key, "1.0", "nvrtc 13.0", source, [] {
    Compiled compiled;
    compiled.cubin = {1, 2, 3};
    return compiled;
  });
  PretendedLoader loader;
  Compiler compiler(settings, kNoDriver, loader.opener());
  const CachedKernel found = compiler.get(source);
  EXPECT_EQ(found.cubin, (std::vector<uint8_t>{1, 2, 3}));
  EXPECT_EQ(found.origin, CachedKernel::Origin::cache);
  EXPECT_TRUE(loader.asked.empty());
  // An edited header changes the key, so NVRTC is needed and missing.
  root.write("kernels/cuda/a.cuh", "texT");
  Compiler edited(settings, kNoDriver, loader.opener());
  EXPECT_NE(message_of([&] { edited.get(source); }).find("no NVRTC"), std::string::npos);
  EXPECT_FALSE(loader.asked.empty());
}

TEST(Headers, AllByNameAndNoOthers) {
  const TempFolder root;
  root.write("protocol/b.hpp", "b");
  root.write("cuda/a.cuh", "a");
  root.write("cuda/notes.md", "no header");
  const auto headers = read_headers(root.path.string());
  ASSERT_EQ(headers.size(), 2u);
  EXPECT_EQ(headers[0].name, "cuda/a.cuh");
  EXPECT_EQ(headers[1].name, "protocol/b.hpp");
  EXPECT_EQ(headers[1].text, "b");
  const std::string message = message_of([&] { read_headers((root.path / "nothing").string()); }, ErrorKind::system);
  EXPECT_NE(message.find("no kernel headers"), std::string::npos) << message;
}

TEST(Resources, ReadFromPtxas) {
  const auto all = parse_resources(
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...\n"
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'sum' for 'sm_90a'\n"
      "ptxas info    : Function properties for sum\n"
      "ptxas         .     32 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
      "ptxas info    : Used 255 registers, used 1 barriers, 32 bytes cumulative stack size, 1040 bytes smem\n"
      "ptxas info    : Compile time = 10.560 ms\n"
      "ptxas info    : Function properties for _Z3addi\n"
      "ptxas         .     32 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Function properties for _Z3subi\n"
      "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Compiling entry function 'fill' for 'sm_90a'\n"
      "ptxas info    : Function properties for fill\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 8 registers, 400 bytes cmem[0]\n");
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].kernel, "sum");
  EXPECT_EQ(all[0].registers, 255);
  EXPECT_EQ(all[0].stack_bytes, 32);
  EXPECT_EQ(all[0].spill_store_bytes, 16);
  EXPECT_EQ(all[0].spill_load_bytes, 16);
  EXPECT_EQ(all[0].shared_bytes, 1040);
  EXPECT_EQ(all[0].spilled, (std::map<std::string, int>{{"_Z3addi", 4}}));
  EXPECT_TRUE(all[0].multiplies_in_order);
  EXPECT_FALSE(all[1].multiplies_in_order);
  EXPECT_EQ(all[1].kernel, "fill");
  EXPECT_EQ(all[1].registers, 8);
  EXPECT_EQ(all[1].spill_store_bytes, 0);
  EXPECT_TRUE(parse_resources("ptxas info : Used registers, 99 bytes smem\nnonsense").empty());
}

TEST(Resources, RefusesAFunctionThatSpillsByItsNameAndComment) {
  Source source;
  source.arch = "sm_90a";
  source.stub =
      "// not its own\n\n// rms_norm: layers.0.n1 (m.py:3)\n// rms_norm: layers.1.n1 (m.py:3)\n"
      "__device__ __noinline__ void rows_1(int* p) {\n}\n__device__ void rows_11(int* p) {\n}\n";
  Resources kernel{"loop_kernel"};
  kernel.spill_store_bytes = 40;
  kernel.spill_load_bytes = 60;
  kernel.spilled = {{"_ZN12_GLOBAL__N_16rows_1EPi", 80}};
  EXPECT_NO_THROW(refuse_spills(source, {kernel}));
  source.may_spill = false;
  const auto refusal = [&] {
    return message_of([&] { refuse_spills(source, {kernel}); }, ErrorKind::invalid_argument);
  };
  const std::string message = refusal();
  EXPECT_NE(
      message.find("rows_1 (rms_norm: layers.0.n1 (m.py:3); rms_norm: layers.1.n1 (m.py:3)) needs more registers"),
      std::string::npos)
      << message;
  EXPECT_NE(message.find("80 bytes of them in memory"), std::string::npos) << message;
  kernel.spilled = {{"_Z7rows_11Pi", 80}};  // without a comment
  EXPECT_NE(refusal().find("ark: rows_11 needs"), std::string::npos) << refusal();
  kernel.spilled = {};  // what remains is the kernel's own
  EXPECT_NE(refusal().find("ark: loop_kernel needs"), std::string::npos) << refusal();
  kernel.spill_store_bytes = kernel.spill_load_bytes = 0;
  EXPECT_NO_THROW(refuse_spills(source, {kernel}));
}

}  // namespace
}  // namespace ark::jit

// Tests kernels that a wheel contains: found without a compiler, and never used if anything differs from what was
// compiled.
#include "jit/prebuilt.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "jit/compiler.hpp"
#include "temp_folder.hpp"
#include "util/error.hpp"

namespace ark::jit {
namespace prebuilt_test {

const std::vector<Header> kHeaders = {{"cuda/a.cuh", "text"}};
const Source kSource{"stub", "sm_90a", {}};
constexpr char kIndex[] = "{\"schema\":\"ark_prebuilt\",\"compiler\":\"nvcc 13.0\"}\n";
constexpr char kLog[] =
    "ptxas info    : Compiling entry function 'fill' for 'sm_90a'\n"
    "ptxas info    : Used 16 registers, used 0 barriers\n";
const std::vector<uint8_t> kCubin = {1, 2, 3};

class PrebuiltTest : public ::testing::Test {
 protected:
  PrebuiltTest() {
    store_prebuilt(name(), "1.0", "nvcc 13.0", kSource.stub, kSource.arch, kCubin, kLog, kHeaders);
    folder_.write("index.json", kIndex);
  }
  std::string name() const { return folder_.path.string(); }
  bool found(const Source& source = kSource, const std::string& version = "1.0",
             const std::vector<Header>& headers = kHeaders, int driver = 13000) const {
    const PrebuiltKernels kernels(name(), driver);
    const auto cubin = kernels.find(version, source, headers);
    EXPECT_TRUE(!cubin || *cubin == kCubin);
    return cubin.has_value();
  }
  std::filesystem::path file(const std::string& extension) const {
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path))
      if (entry.path().string().ends_with(extension)) return entry.path();
    return {};
  }

  const TempFolder folder_;
};

TEST_F(PrebuiltTest, FoundWhenAllIsTheSame) {
  EXPECT_TRUE(found());
  EXPECT_TRUE(found(kSource, "1.0", kHeaders, 0)) << "without a driver, too";
  EXPECT_EQ(PrebuiltKernels(name(), 0).compiler(), "nvcc 13.0");
}

TEST_F(PrebuiltTest, NotFoundWhenAnythingDiffers) {
  EXPECT_FALSE(found({"stuB", "sm_90a", {}}));
  EXPECT_FALSE(found({"stub", "sm_100a", {}}));
  EXPECT_FALSE(found({"stub", "sm_90a", {"-DX"}}));
  EXPECT_FALSE(found(kSource, "1.1"));
  EXPECT_FALSE(found(kSource, "1.0", {{"cuda/a.cuh", "texT"}})) << "an edited header";
  EXPECT_FALSE(found(kSource, "1.0", kHeaders, 12090)) << "a driver that loads no cubin of CUDA 13";
  EXPECT_TRUE(found(kSource, "1.0", kHeaders, 14000));
}

TEST_F(PrebuiltTest, AlteredOrIncompleteIsNotUsed) {
  const auto cubin = file(".cubin");
  std::filesystem::resize_file(cubin, 2);
  EXPECT_FALSE(found());
  std::filesystem::remove(cubin);
  EXPECT_FALSE(found());
  std::filesystem::remove(folder_.path / "index.json");
  EXPECT_FALSE(PrebuiltKernels(name(), 0).any());
  folder_.write("index.json", "{\"compiler\":\"\"}");
  EXPECT_FALSE(PrebuiltKernels(name(), 0).any());
  EXPECT_FALSE(PrebuiltKernels(name() + "/none", 0).any());
  EXPECT_FALSE(PrebuiltKernels("", 0).any());
}

TEST_F(PrebuiltTest, ReadableSideBySide) {
  std::ifstream meta(file(".meta.json"));
  const std::string text{std::istreambuf_iterator<char>(meta), {}};
  for (const char* part : {"\"compiler\":\"nvcc 13.0\"", "\"arch\":\"sm_90a\"", "\"name\":\"fill\",\"registers\":16"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  EXPECT_EQ(text.find("lineinfo"), std::string::npos);
  const auto options = prebuilt_options("sm_90a");
  EXPECT_NE(std::find(options.begin(), options.end(), "--fmad=false"), options.end());
}

TEST_F(PrebuiltTest, ForeignFilesAreAsTrustedAsTheLibrary) {
  // In an installation by root, other users can only read.
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path)) {
    ASSERT_EQ(::chown(entry.path().c_str(), 12345, 12345), 0);
  }
  EXPECT_TRUE(found());
}

TEST_F(PrebuiltTest, ComesBeforeCacheAndCompiler) {
  const TempFolder kernels;
  kernels.write("cuda/a.cuh", "text");
  Settings settings;
  settings.version = "1.0";
  settings.kernels_dir = kernels.path.string();
  settings.prebuilt_dir = name();
  LibraryOpener opener;
  int opened = 0;
  opener.open = [&](const std::string&, std::string& why_not) -> void* {
    ++opened;
    why_not = "not there";
    return nullptr;
  };
  Compiler compiler(settings, 0, opener);
  EXPECT_EQ(compiler.get(kSource).cubin, kCubin);
  EXPECT_EQ(compiler.get(kSource).origin, CachedKernel::Origin::cache);
  EXPECT_EQ(opened, 0);
  EXPECT_THROW(compiler.get({"another", "sm_90a", {}}), Error);
  EXPECT_GT(opened, 0);
}

}  // namespace prebuilt_test
}  // namespace ark::jit

// Tests loading a pretended driver, and the errors if there is none or it is unsuitable.
#include "cuda/driver.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "jit/kernel.hpp"
#include "util/error.hpp"

namespace ark {
namespace {

struct PretendedDriver {
  bool there = true;
  std::string lacks;
  static inline int version;
  static inline CUresult init;
  std::set<std::string> asked;

  jit::LibraryOpener opener() {
    jit::LibraryOpener opener;
    opener.open = [this](const std::string& name, std::string& why_not) -> void* {
      EXPECT_EQ(name, "libcuda.so.1");
      why_not = "no such file, pretended";
      return there ? this : nullptr;
    };
    opener.symbol = [this](void*, const char* symbol) -> void* {
      asked.insert(symbol);
      if (symbol == lacks) return nullptr;
      if (symbol == std::string("cuDriverGetVersion"))
        return reinterpret_cast<void*>(+[](int* value) { return *value = version, CUDA_SUCCESS; });
      if (symbol == std::string("cuInit")) return reinterpret_cast<void*>(+[](unsigned) { return init; });
      if (symbol == std::string("cuGetErrorName"))
        return reinterpret_cast<void*>(
            +[](CUresult, const char** text) { return *text = "CUDA_ERROR_X", CUDA_SUCCESS; });
      if (symbol == std::string("cuGetErrorString"))
        return reinterpret_cast<void*>(+[](CUresult, const char** text) { return *text = "it failed", CUDA_SUCCESS; });
      return reinterpret_cast<void*>(+[] { return CUDA_ERROR_UNKNOWN; });
    };
    return opener;
  }
};

// Returns load_driver's error, or an empty string.
std::string message_of(PretendedDriver driver, int version = 13000, CUresult init = CUDA_SUCCESS) {
  PretendedDriver::version = version;
  PretendedDriver::init = init;
  try {
    load_driver(driver.opener());
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::system);
    EXPECT_FALSE(error.context().remedy.empty());
    return error.what();
  }
  return {};
}

void expect_parts(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
}

TEST(LoadDriver, Works) {
  PretendedDriver::version = 12040;
  PretendedDriver::init = CUDA_SUCCESS;
  PretendedDriver pretended;
  const Driver driver = load_driver(pretended.opener());
  EXPECT_EQ(driver.version, 12040);
#define EXPECT_RESOLVED(member, symbol, parameters) \
  EXPECT_NE(driver.member, nullptr) << #symbol;     \
  EXPECT_EQ(pretended.asked.count(#symbol), 1u);
  ARK_CUDA_FUNCTIONS(EXPECT_RESOLVED)
#undef EXPECT_RESOLVED
}

TEST(LoadDriver, None) {
  PretendedDriver driver;
  driver.there = false;
  expect_parts(message_of(driver), {"no NVIDIA driver", "no such file, pretended", "12.4", "CPU tensors"});
}

TEST(LoadDriver, TooOld) {
  expect_parts(message_of({}, 12030), {"supports CUDA 12.3", "needs 12.4", "Update the driver"});
  PretendedDriver old;
  old.lacks = "cuFuncLoad";  // an old driver also lacks functions: its age is the better message
  expect_parts(message_of(old, 11080), {"supports CUDA 11.8", "Update the driver"});
  EXPECT_EQ(message_of({}, 12040), "");
}

TEST(LoadDriver, LacksAFunction) {
  PretendedDriver driver;
  driver.lacks = "cuMemExportToShareableHandle";
  expect_parts(message_of(driver), {"lacks cuMemExportToShareableHandle", "13.0"});
}

TEST(LoadDriver, DoesNotStart) {
  expect_parts(message_of({}, 13000, CUDA_ERROR_NO_DEVICE),
               {"CUDA_ERROR_X (it failed)", "CUDA_VISIBLE_DEVICES", "CPU tensors"});
  expect_parts(message_of({}, 13000, CUDA_ERROR_NOT_INITIALIZED), {"fork"});
  expect_parts(message_of({}, 13000, CUDA_ERROR_STUB_LIBRARY), {"stub"});
}

TEST(Driver, OfThisMachine) {
  // Either answer is correct, but both queries must agree.
  if (has_driver()) {
    EXPECT_GE(driver().version, kOldestDriver);
    int count = 0;
    EXPECT_EQ(driver().device_get_count(&count), CUDA_SUCCESS);
    EXPECT_GT(count, 0);
  } else {
    EXPECT_THROW(driver(), Error);
    EXPECT_THROW(driver(), Error) << "a failure must not be taken for success the second time";
  }
}

TEST(Check, NamesWhatFailed) {
  EXPECT_NO_THROW(check(CUDA_SUCCESS, "nothing"));
  try {
    check(CUDA_ERROR_OUT_OF_MEMORY, "cuMemCreate of 64 MB");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::system);
    expect_parts(error.what(), {"cuMemCreate of 64 MB failed", "Free device memory"});
  }
  EXPECT_TRUE(is_sticky(CUDA_ERROR_ILLEGAL_ADDRESS));
  EXPECT_FALSE(is_sticky(CUDA_ERROR_OUT_OF_MEMORY));
  EXPECT_FALSE(is_sticky(CUDA_ERROR_NOT_READY));
}

TEST(TargetOf, Architectures) {
  EXPECT_EQ(jit::target_of(8, 0, "x").arch, "sm_80");
  EXPECT_EQ(jit::target_of(8, 9, "x").arch, "sm_89");
  EXPECT_EQ(jit::target_of(9, 0, "x").arch, "sm_90a");
  EXPECT_EQ(jit::target_of(10, 0, "x").arch, "sm_100a");
  EXPECT_EQ(jit::target_of(12, 0, "x").arch, "sm_120");
  try {
    jit::target_of(7, 5, "device 3 (Tesla T4)");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    expect_parts(error.what(), {"device 3 (Tesla T4)", "7.5", "8.0", "nccl"});
  }
}

}  // namespace
}  // namespace ark

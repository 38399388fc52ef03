// The PyTorch version that the extension is compiled against. Overrides that only a newer version has become plain
// unused methods in an older one. docs/pytorch-versions.md lists them.
#pragma once

#include <torch/version.h>

#define ARK_TORCH_AT_LEAST(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

#if ARK_TORCH_AT_LEAST(14)
#define ARK_OVERRIDE_SINCE_2_14 override
#else
#define ARK_OVERRIDE_SINCE_2_14
#endif

#if ARK_TORCH_AT_LEAST(15)
#define ARK_OVERRIDE_SINCE_2_15 override
#else
#define ARK_OVERRIDE_SINCE_2_15
#endif

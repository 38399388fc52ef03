// Which PyTorch the extension is compiled against: what a newer one asks of a backend overrides nothing in an older
// one, where nobody calls it. docs/pytorch-versions.md lists all of it, used or declined.
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

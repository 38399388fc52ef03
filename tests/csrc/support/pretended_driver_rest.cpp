// All calls of the driver that the pretended one does not know: there, and refused. Weak, so that its own come first.
#include "jit/driver.hpp"

namespace ark {
extern "C" {
#define ARK_CUDA_REFUSED(member, symbol, parameters)                        \
  __attribute__((weak, visibility("default"))) CUresult symbol parameters { \
    return CUDA_ERROR_NOT_SUPPORTED;                                        \
  }
ARK_CUDA_FUNCTIONS(ARK_CUDA_REFUSED)
#undef ARK_CUDA_REFUSED
}
}  // namespace ark

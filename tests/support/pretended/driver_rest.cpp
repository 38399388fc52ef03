// The rest of libcuda that ark_torch uses but driver.cpp does not define: functions that just succeed.
#include "cuda/driver.hpp"

using namespace ark;

#define ARK_PRETEND(member, symbol, parameters)                 \
  extern "C" __attribute__((weak)) CUresult symbol parameters { \
    return CUDA_SUCCESS;                                        \
  }
ARK_CUDA_FUNCTIONS(ARK_PRETEND)

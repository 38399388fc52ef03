// What driver.cpp does not say, of all that ark_torch asks of libcuda: it succeeds.
#include "cuda/driver.hpp"

using namespace ark;

#define ARK_PRETEND(member, symbol, parameters)                 \
  extern "C" __attribute__((weak)) CUresult symbol parameters { \
    return CUDA_SUCCESS;                                        \
  }
ARK_CUDA_FUNCTIONS(ARK_PRETEND)

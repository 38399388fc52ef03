// Selects the quantizer kernels that match the reduction's instruction set.
#include "quantizer.hpp"

#include <cstring>

#include "collectives/cpu/reduce/reduce.hpp"
#include "quantizer_isa.hpp"

namespace ark::compressed {

const QuantizerKernels* find_quantizer(DType dtype) {
#if defined(__x86_64__)
  const char* const isa = reduce_isa();
  if (std::strcmp(isa, "avx512") == 0) return find_quantizer_avx512(dtype);
  if (std::strcmp(isa, "avx2") == 0) return find_quantizer_avx2(dtype);
#endif
  return find_quantizer_baseline(dtype);
}

}  // namespace ark::compressed

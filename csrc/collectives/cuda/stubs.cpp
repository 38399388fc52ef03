// The list behind stubs.hpp. A new kernel header adds its stub here.
#include "collectives/cuda/stubs.hpp"

namespace ark {

std::vector<Stub> representative_stubs() {
  std::vector<Stub> stubs;
  stubs.push_back(
      {"probe",
       "#include \"cuda/probe.cuh\"\n"
       "extern \"C\" __global__ void fill(const __grid_constant__ ark::ProbeFill p) { ark::probe_fill(p); }\n"
       "extern \"C\" __global__ void sum(const __grid_constant__ ark::ProbeSum p) { ark::probe_sum(p); }\n",
       80});
  return stubs;
}

}  // namespace ark

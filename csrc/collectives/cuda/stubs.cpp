// The list behind stubs.hpp. A new kernel header adds its stub here.
#include "collectives/cuda/stubs.hpp"

#include "jit/probe.hpp"

namespace ark {

namespace {

Stub one_shot(const std::string& format, int ranks, int rank) {
  const std::string size = std::to_string(ranks), own = std::to_string(rank);
  return {"one_shot_" + format + "_" + size,
          "#include \"cuda/one_shot.cuh\"\n"
          "using Rule = ark::device::SumRule<ark::device::" +
              format + ">;\n" +
              "extern \"C\" __global__ void __launch_bounds__(512) all_reduce(\n"
              "    const __grid_constant__ ark::device::OneShotParams p) {\n"
              "  ark::device::one_shot_all_reduce<Rule, " +
              size + ", " + own + ">(p, Rule{});\n}\n",
          80};
}

}  // namespace

std::vector<Stub> representative_stubs() {
  std::vector<Stub> stubs;
  stubs.push_back({"probe", jit::probe_stub(), 80});
  for (const char* format : {"BFloat16", "Float16", "Float32"}) stubs.push_back(one_shot(format, 2, 0));
  stubs.push_back(one_shot("BFloat16", 4, 1));
  stubs.push_back(one_shot("BFloat16", 8, 7));
  return stubs;
}

}  // namespace ark

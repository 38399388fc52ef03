// The list behind every_stub.hpp, in the order of stubs.cpp.
#include "collectives/cuda/every_stub.hpp"

#include "collectives/cuda/fused_stubs.hpp"
#include "jit/probe.hpp"

namespace ark {

std::vector<Stub> every_stub(const std::vector<int>& sizes) {
  std::vector<Stub> stubs;
  stubs.push_back({"probe", jit::probe_stub()});
  stubs.push_back({"move", move_stub()});
  stubs.push_back({"relay", relay_stub()});
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const bool wide : {false, true})
      for (uint32_t bits = 0; bits <= quantize::kMostBits + 1; ++bits) {
        const bool fp8 = bits > quantize::kMostBits;
        const CompressedKind kind{dtype, fp8 ? quantize::Format::fp8 : quantize::Format::uniform,
                                  fp8 ? quantize::kMostBits : bits, wide};
        const std::string suffix =
            std::string("_") + name_of(dtype) + (wide ? "_wide_" : "_") + (fp8 ? "fp8" : std::to_string(bits));
        for (const char* const name : {"compressed_encode", "compressed_encode_fed", "compressed_reduce",
                                       "compressed_reduce_fed", "compressed_sum"})
          stubs.push_back({name + suffix, compressed_stub(kind, name)});
      }
  for (Stub& stub : every_fused_stub()) stubs.push_back(std::move(stub));
  const char* const names[kRuleKinds] = {"bf16", "f16", "f32", "any"};
  for (const int size : sizes) {
    for (int kind = 0; kind < kRuleKinds; ++kind) {
      const RuleKind rule = static_cast<RuleKind>(kind);
      for (int rank = 0; rank < size; ++rank) {
        const std::string name =
            std::string("_") + names[kind] + "_" + std::to_string(size) + "_" + std::to_string(rank);
        stubs.push_back({"reduce" + name, reduce_stub(rule, size, rank)});
        stubs.push_back({"lines" + name, two_shot_stub(rule, size, rank, false)});
        stubs.push_back({"chunks" + name, two_shot_stub(rule, size, rank, true)});
        if (size > 1) stubs.push_back({"bulk" + name, bulk_stub(rule, size, rank), 90});
      }
    }
  }
  return stubs;
}

}  // namespace ark

// Checks of compressed collectives before a byte moves. Errors name the argument, the value and the remedy.
#include "ops/compressed.hpp"

namespace ark::ops {

namespace {

using std::to_string;

void check_one(const CallSite& site, const std::string& name, int64_t bits, int64_t bucket, const std::string& format,
               bool may_be_exact) {
  if (bits < (may_be_exact ? 0 : 1) || bits > quantize::kMostBits)
    refuse(site, ErrorKind::invalid_argument, "bits" + name + " is " + to_string(bits),
           may_be_exact ? "Pass 1 to 8, or 0 for a segment that stays exact." : "Pass 1 to 8.");
  if (format == "fp8" && bits != 0 && bits != 8)
    refuse(site, ErrorKind::invalid_argument, "bits" + name + " is " + to_string(bits) + " and format is 'fp8'",
           "Pass bits=8 with format='fp8', or format='uniform'.");
  if (bucket < quantize::kLeastBucket || bucket > quantize::kMostBucket || bucket % quantize::kBucketStep != 0)
    refuse(site, ErrorKind::invalid_argument, "bucket" + name + " is " + to_string(bucket),
           "Pass a multiple of 32 from 128 to 4096.");
}

}  // namespace

void check_flat(const CallSite& site, const char* argument, const at::Tensor& tensor) {
  check_tensor(site, argument, tensor);
  if (tensor.dim() != 1)
    refuse(site, ErrorKind::invalid_argument,
           std::string(argument) + " has " + to_string(tensor.dim()) + " dimensions instead of one",
           "Pass it flattened.");
  if (!tensor.is_contiguous())
    refuse(site, ErrorKind::invalid_argument,
           std::string(argument) + " is not contiguous (stride " + to_string(tensor.stride(0)) + ")",
           "Pass its contiguous().");
}

void check_settings(const CallSite& site, const QuantizerSettings& settings) {
  if (settings.format != "uniform" && settings.format != "fp8")
    refuse(site, ErrorKind::invalid_argument, "format is '" + settings.format + "'", "Pass 'uniform' or 'fp8'.");
  if (settings.rounding != "nearest" && settings.rounding != "stochastic")
    refuse(site, ErrorKind::invalid_argument, "rounding is '" + settings.rounding + "'",
           "Pass 'nearest' or 'stochastic'.");
}

Coding coding_of(const CallSite& site, const QuantizerSettings& settings, at::ScalarType type, const char* argument) {
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf)
    refuse(site, ErrorKind::type_error, std::string(argument) + " is " + dtype_name(type),
           "Pass float32, bfloat16 or float16; reduce other types exactly, with all_reduce.");
  check_settings(site, settings);
  return {{settings.format == "fp8" ? quantize::Format::fp8 : quantize::Format::uniform,
           settings.rounding == "stochastic" ? quantize::Rounding::stochastic : quantize::Rounding::nearest,
           quantize::Stage::first, static_cast<uint32_t>(site.rank < 0 ? 0 : site.rank),
           static_cast<uint64_t>(settings.seed)},
          dtype_of(type),
          static_cast<uint32_t>(c10::elementSize(type))};
}

std::vector<compressed::Segment> segments_of(const CallSite& site, const std::vector<int64_t>& numel,
                                             const std::vector<int64_t>& bits, const std::vector<int64_t>& bucket,
                                             const QuantizerSettings& settings, bool may_be_exact) {
  if (bits.size() != numel.size() || bucket.size() != numel.size())
    refuse(site, ErrorKind::invalid_argument,
           "numel has " + to_string(numel.size()) + " segments, bits " + to_string(bits.size()) + " and bucket " +
               to_string(bucket.size()),
           "Pass one number a segment in each.");
  std::vector<compressed::Segment> segments;
  for (size_t i = 0; i < numel.size(); ++i) {
    const std::string name = numel.size() == 1 ? "" : "[" + to_string(i) + "]";
    if (numel[i] < 0)
      refuse(site, ErrorKind::invalid_argument, "numel" + name + " is " + to_string(numel[i]),
             "Pass numbers of elements, zero or more.");
    check_one(site, name, bits[i], bucket[i], settings.format, may_be_exact);
    segments.push_back(
        {static_cast<uint64_t>(numel[i]), static_cast<uint32_t>(bits[i]), static_cast<uint32_t>(bucket[i])});
  }
  return segments;
}

}  // namespace ark::ops

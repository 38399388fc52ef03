// Writes lines, pointers and literals of a function. See emit_cpu_function.hpp for the contract of each.
#include "compiler/emit/cpu/emit_cpu_function.hpp"

#include <algorithm>
#include <cmath>

#include "compiler/passes/cache_policy.hpp"
#include "util/error.hpp"

namespace ark::compiler {

std::string FunctionWriter::pointer(int value, bool write) {
  return named(value, write, CachePolicy::normal);
}

std::string FunctionWriter::element_pointer(int value, bool write) {
  return named(value, write, cuda() ? cache_of(value, write) : CachePolicy::normal);
}

CachePolicy FunctionWriter::cache_of(int value, bool write) const {
  for (const Access& access : stage_->accesses)
    if (access.value == value && access.write == write) return access.cache;
  return CachePolicy::normal;
}

std::string FunctionWriter::cache_text(int value) const {
  return formatted("Cache::{}", name_of(cache_of(value, false)));
}

std::string FunctionWriter::prefetch_text(int value) const {
  for (const Access& access : stage_->accesses)
    if (access.value == value && !access.write && access.prefetch != Prefetch::usual)
      return formatted(", Prefetch::{}", name_of(access.prefetch));
  return "";
}

std::string FunctionWriter::named(int value, bool write, CachePolicy cache) {
  if (kept_.count(graph_.values()[value].buffer) != 0) {
    const auto found = std::find(kept_values_.begin(), kept_values_.end(), value);
    const auto at = found - kept_values_.begin();
    if (found == kept_values_.end()) kept_values_.push_back(value);
    blocks_.back().kept.insert(static_cast<size_t>(at));
    return formatted("kept{}", at);
  }
  const size_t i = operand(value, write);
  blocks_.back().named.insert(i);
  caches_[i].insert(cache);
  return formatted("p{}", i);
}

std::string FunctionWriter::pointer_later(int value, bool write) {
  if (!cuda() || is_polled(value) || kept_.count(graph_.values()[value].buffer) != 0) return pointer(value, write);
  return formatted("later<{}{}>(p, {})", write ? "" : "const ", cpp_type(this->value(value).type),
                   operand(value, write));
}

size_t FunctionWriter::operand(int value, bool write) {
  size_t i = 0;
  while (i < operands_.size() && operands_[i] != value) ++i;
  if (i == operands_.size()) {
    operands_.push_back(value);
    written_.push_back(false);
    aligned_.push_back(false);
    caches_.emplace_back();
  }
  written_[i] = written_[i] || write;
  return i;
}

std::string FunctionWriter::aligned(int value, const std::vector<int64_t>& strides) {
  const int64_t size = size_of(this->value(value).type);
  if (is_polled(value)) return "false";
  for (const int64_t stride : strides)
    if (stride * size % 16 != 0) return "false";
  if (kept_.count(graph_.values()[value].buffer) != 0)
    return this->value(value).offset * size % 16 == 0 ? "true" : "false";
  aligned_[operand(value, false)] = true;
  return "kAligned";
}

void FunctionWriter::turn_to(const Stage& stage) {
  stage_ = &stage;
  blocks_.push_back({text_.size(), std::string(static_cast<size_t>(depth_) * 2, ' '), {}, {}});
}

void FunctionWriter::keep(int buffer, int64_t parts) {
  const int64_t bytes = graph_.buffers()[buffer].bytes / parts;
  kept_[buffer] = {kept_end_, parts > 1 ? bytes : 0};
  kept_end_ += (bytes + 15) / 16 * 16;
}

int64_t FunctionWriter::kept_part(int value) const {
  const auto kept = kept_.find(this->value(value).buffer);
  return kept == kept_.end() ? 0 : kept->second.part / size_of(this->value(value).type);
}

void FunctionWriter::line(const std::string& text) {
  text_.append(static_cast<size_t>(depth_) * 2, ' ').append(text).append("\n");
}

void FunctionWriter::open(const std::string& text) {
  line(text.empty() ? "{" : text + " {");
  ++depth_;
}

void FunctionWriter::close(const std::string& text) {
  --depth_;
  line(text);
}

int64_t FunctionWriter::scratch(int64_t bytes) {
  const int64_t at = scratch_;
  scratch_ += (bytes + 63) / 64 * 64;
  return at;
}

std::string FunctionWriter::scratch_at(int64_t offset) const {
  return formatted("{}.scratch + {}", cuda() ? "worker()" : "context", offset);
}

void FunctionWriter::refuse(const std::string& why) const {
  ErrorContext context;
  context.remedy = "Leave this operator to another backend.";
  throw Error(ErrorKind::invalid_argument,
              formatted("the {} target cannot run stage {} ({}): {}", cuda() ? "CUDA" : "CPU", stage_->name,
                        stage_->origin, why),
              context);
}

std::string FunctionWriter::scaled(const std::string& name, int64_t length) const {
  if (length == stage_->extent) return name;
  if (length % stage_->extent == 0) return formatted("{} * {}", name, length / stage_->extent);
  if (stage_->extent % length == 0) return formatted("{} / {}", name, stage_->extent / length);
  return formatted("{} * {} / {}", name, length, stage_->extent);
}

int FunctionWriter::axis_of(int value, bool write) const {
  for (const Access& access : stage_->accesses)
    if (access.value == value && access.write == write) return access.axis;
  return -1;
}

std::string FunctionWriter::body() const {
  std::string body;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Block& block = blocks_[i];
    for (const size_t one : block.named) {
      const Value& operand = value(operands_[one]);
      const auto polled = polled_.find(operand.buffer);
      const bool hinted =
          polled == polled_.end() && caches_[one].size() == 1 && *caches_[one].begin() != CachePolicy::normal;
      std::string element = cpp_type(operand.type);
      if (hinted) element = formatted("Hinted<{}, Cache::{}>", element, name_of(*caches_[one].begin()));
      const Push pushed = polled == polled_.end() ? Push{} : polled->second;
      // Buffers of packets, and each rank's part of one, start at multiples of 16 bytes.
      const bool aligned = polled != polled_.end() && operand.offset * size_of(operand.type) * 2 % 16 == 0;
      const std::string ranks = pushed.ranks > 0 ? formatted(", {}, {}", pushed.ranks, pushed.apart) : "";
      if (polled != polled_.end()) element = formatted("Packet<{}{}>", element, ranks);
      const std::string type = (written_[one] ? "" : "const ") + element;
      std::string pointer = pushed.ranks > 0 ? formatted("in_turn<{}>(p[{}], {})", type, one, pushed.half)
                            : cuda()         ? formatted("in_global<{}>(p[{}])", type, one)
                                             : formatted("reinterpret_cast<{}*>(p[{}])", type, one);
      if (aligned) pointer = formatted("aligned({})", pointer);
      append(body, "{}{}* const p{} = {};\n", block.indent, type, one, pointer);
    }
    for (const size_t one : block.kept) {
      const Value& value = this->value(kept_values_[one]);
      append(body, "{0}{1}* const kept{2} = reinterpret_cast<{1}*>(kept_bytes() + {3});\n", block.indent,
             cpp_type(value.type), one, kept_.at(value.buffer).offset + value.offset * size_of(value.type));
    }
    const size_t past = i + 1 < blocks_.size() ? blocks_[i + 1].begin : text_.size();
    body += text_.substr(block.begin, past - block.begin);
  }
  return body;
}

const char* cpp_type(ScalarType type) {
  switch (type) {
    case ScalarType::f32: return "float";
    case ScalarType::bf16: return "bf16";
    case ScalarType::f16: return "f16";
    case ScalarType::i64: return "int64_t";
    case ScalarType::i32: return "int32_t";
    case ScalarType::boolean: return "bool";
    case ScalarType::i8: return "int8_t";
    case ScalarType::u8: return "uint8_t";
    case ScalarType::e4m3: return "e4m3";
  }
  return "void";
}

std::string cpp_lanes(const Value& literal) {
  if (literal.type == ScalarType::boolean) return literal.literal != 0 ? "splat(true)" : "splat(false)";
  if (!is_floating(literal.type)) {
    if (literal.literal <= -0x1p63) return "splat(-int64_t{0x7fffffffffffffff} - 1)";
    if (literal.literal >= 0x1p63) return "splat(int64_t{0x7fffffffffffffff})";
    return formatted("splat(int64_t{{{}}})", static_cast<int64_t>(literal.literal));
  }
  const float value = static_cast<float>(literal.literal);
  if (std::isnan(value)) return "splat(kNan)";
  if (std::isinf(value)) return value > 0 ? "splat(kInfinity)" : "splat(-kInfinity)";
  // Exact, and readable where a short decimal is exact too.
  std::string decimal = formatted("{:.9g}", value);
  if (decimal.find_first_of(".e") == std::string::npos) decimal += ".0";
  return formatted("splat({}f)", decimal);
}

std::string cpp_offset(const std::vector<std::string>& indices, const std::vector<int64_t>& strides) {
  std::string sum;
  for (size_t i = 0; i < indices.size(); ++i) {
    if (strides[i] == 0 || indices[i] == "0") continue;
    const bool plain = indices[i].find(' ') == std::string::npos;
    if (!sum.empty()) sum += " + ";
    sum += plain ? indices[i] : formatted("({})", indices[i]);
    if (strides[i] != 1) append(sum, " * {}", strides[i]);
  }
  return sum.empty() ? "0" : sum;
}

}  // namespace ark::compiler

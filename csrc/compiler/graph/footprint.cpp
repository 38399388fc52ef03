// The overlap test is exact if that is cheap, and conservative otherwise. It compares intervals first, then residues
// modulo each stride. The residues modulo the stride just outside the cut separate slices of one tensor along any
// dimension, the parts of a split or cat, and even from odd elements.
#include "compiler/graph/footprint.hpp"

#include <algorithm>

namespace ark::compiler {

int64_t Footprint::end() const {
  int64_t last = first + run;
  for (const Dimension& dimension : dimensions) last += (dimension.size - 1) * dimension.stride;
  return last;
}

int64_t Footprint::pieces() const {
  int64_t product = 1;
  for (const Dimension& dimension : dimensions) product *= dimension.size;
  return product;
}

Footprint footprint(const Value& value) {
  const int64_t size = size_of(value.type);
  Footprint result;
  result.first = value.offset * size;
  result.run = size;
  for (size_t i = 0; i < value.shape.size(); ++i) {
    if (value.shape[i] == 1 || value.strides[i] == 0) continue;
    const int64_t stride = value.strides[i] * size;
    if (stride < 0) result.first += (value.shape[i] - 1) * stride;
    result.dimensions.push_back({value.shape[i], stride < 0 ? -stride : stride});
  }
  std::sort(result.dimensions.begin(), result.dimensions.end(),
            [](const auto& a, const auto& b) { return a.stride != b.stride ? a.stride > b.stride : a.size > b.size; });
  while (!result.dimensions.empty() && result.dimensions.back().stride == result.run) {
    result.run *= result.dimensions.back().size;
    result.dimensions.pop_back();
  }
  for (size_t i = result.dimensions.size(); i-- > 1;) {
    auto& outer = result.dimensions[i - 1];
    const auto& inner = result.dimensions[i];
    if (outer.stride != inner.stride * inner.size) continue;
    outer = {outer.size * inner.size, inner.stride};
    result.dimensions.erase(result.dimensions.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return result;
}

std::vector<std::pair<int64_t, int64_t>> runs(const Footprint& footprint) {
  std::vector<std::pair<int64_t, int64_t>> result;
  result.reserve(static_cast<size_t>(footprint.pieces()));
  std::vector<int64_t> index(footprint.dimensions.size(), 0);
  int64_t at = footprint.first;
  for (;;) {
    result.emplace_back(at, at + footprint.run);
    size_t d = index.size();
    for (; d-- > 0;) {
      at += footprint.dimensions[d].stride;
      if (++index[d] < footprint.dimensions[d].size) break;
      at -= footprint.dimensions[d].stride * footprint.dimensions[d].size;
      index[d] = 0;
    }
    if (d == static_cast<size_t>(-1)) return result;
  }
}

namespace {

// Computes [low, high), the bytes of `a` modulo `modulus`. Returns false if that interval wraps around.
bool residues(const Footprint& a, int64_t modulus, int64_t& low, int64_t& high) {
  int64_t span = a.run;
  for (const auto& dimension : a.dimensions) {
    if (dimension.stride % modulus != 0) span += (dimension.size - 1) * dimension.stride;
  }
  low = a.first % modulus;
  high = low + span;
  return high <= modulus;
}

}  // namespace

bool may_overlap(const Footprint& a, const Footprint& b) {
  if (a.end() <= b.first || b.end() <= a.first) return false;
  for (const Footprint* strides : {&a, &b}) {
    for (const auto& dimension : strides->dimensions) {
      int64_t a_low, a_high, b_low, b_high;
      if (!residues(a, dimension.stride, a_low, a_high) || !residues(b, dimension.stride, b_low, b_high)) continue;
      if (a_high <= b_low || b_high <= a_low) return false;
    }
  }
  return true;
}

bool may_overlap(const Value& a, const Value& b) {
  if (a.buffer < 0 || a.buffer != b.buffer) return false;
  return may_overlap(footprint(a), footprint(b));
}

bool overlaps_itself(const Value& value) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // |stride|, size
  for (size_t i = 0; i < value.shape.size(); ++i) {
    if (value.shape[i] == 1) continue;
    if (value.strides[i] == 0) return true;
    dims.emplace_back(value.strides[i] < 0 ? -value.strides[i] : value.strides[i], value.shape[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t span = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < span) return true;
    span += (size - 1) * stride;
  }
  return false;
}

}  // namespace ark::compiler

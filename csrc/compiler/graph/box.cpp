// Overlap, coverage and traversal of strided boxes. The overlap test descends one dimension at a time and has a step
// limit; see box.hpp for what it guarantees.
#include "compiler/graph/box.hpp"

#include <algorithm>
#include <vector>

namespace ark::compiler {

namespace {

using Dimension = Box::Dimension;

int64_t span(const Dimension* dimensions, int depth, int64_t width) {
  for (int index = 0; index < depth; ++index) width += dimensions[index].stride * (dimensions[index].count - 1);
  return width;
}

int64_t floor_divide(int64_t a, int64_t b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}
int64_t ceil_divide(int64_t a, int64_t b) {
  return -floor_divide(-a, b);
}

struct SubBox {
  const Dimension* dimensions;
  int depth;
  int64_t offset, width;
};

// `steps` bounds the work. Returns true when it runs out.
bool sub_boxes_overlap(const SubBox& a, const SubBox& b, int& steps) {
  if (a.offset >= b.offset + span(b.dimensions, b.depth, b.width)) return false;
  if (b.offset >= a.offset + span(a.dimensions, a.depth, a.width)) return false;
  if (a.depth == 0 && b.depth == 0) return true;
  if (--steps < 0) return true;
  const int64_t stride_a = a.depth > 0 ? a.dimensions[0].stride : 0;
  const int64_t stride_b = b.depth > 0 ? b.dimensions[0].stride : 0;
  if (stride_a == stride_b) {
    // Compare row i of a with row j of b. Only i - j matters, and only values of it for which the rows' spans meet.
    const SubBox row_a{a.dimensions + 1, a.depth - 1, a.offset, a.width};
    const SubBox row_b{b.dimensions + 1, b.depth - 1, b.offset, b.width};
    const int64_t span_a = span(row_a.dimensions, row_a.depth, row_a.width);
    const int64_t span_b = span(row_b.dimensions, row_b.depth, row_b.width);
    const int64_t distance = b.offset - a.offset;
    const int64_t first = std::max(-(b.dimensions[0].count - 1), floor_divide(distance - span_a, stride_a) + 1);
    const int64_t last = std::min(a.dimensions[0].count - 1, ceil_divide(distance + span_b, stride_a) - 1);
    for (int64_t rows = first; rows <= last; ++rows) {
      if (sub_boxes_overlap({row_a.dimensions, row_a.depth, a.offset + rows * stride_a, row_a.width}, row_b, steps)) {
        return true;
      }
    }
    return false;
  }
  // Test each row of the coarser box that meets the other box's span.
  const SubBox& coarse = stride_a > stride_b ? a : b;
  const SubBox& other = stride_a > stride_b ? b : a;
  const Dimension& rows = coarse.dimensions[0];
  const int64_t row_span = span(coarse.dimensions + 1, coarse.depth - 1, coarse.width);
  const int64_t other_end = other.offset + span(other.dimensions, other.depth, other.width);
  const int64_t first = std::max<int64_t>(0, floor_divide(other.offset - coarse.offset - row_span, rows.stride) + 1);
  const int64_t last = std::min(rows.count - 1, ceil_divide(other_end - coarse.offset, rows.stride) - 1);
  for (int64_t row = first; row <= last; ++row) {
    const SubBox one{coarse.dimensions + 1, coarse.depth - 1, coarse.offset + row * rows.stride, coarse.width};
    if (sub_boxes_overlap(one, other, steps)) return true;
  }
  return false;
}

// Computes [low, high), the bytes of `box` modulo `modulus`. Returns false if that interval wraps around.
bool residues(const Box& box, int64_t modulus, int64_t& low, int64_t& high) {
  int64_t reach = box.width;
  for (int index = 0; index < box.depth; ++index) {
    const Dimension& dimension = box.dimensions[index];
    if (dimension.stride % modulus != 0) reach += dimension.stride * (dimension.count - 1);
  }
  low = box.offset % modulus;
  high = low + reach;
  return high <= modulus;
}

// Separates even from odd elements, and slices of one tensor along a dimension, however many rows they have.
bool apart_by_residues(const Box& a, const Box& b) {
  for (const Box* strides : {&a, &b}) {
    for (int index = 0; index < strides->depth; ++index) {
      const int64_t modulus = strides->dimensions[index].stride;
      int64_t a_low, a_high, b_low, b_high;
      if (residues(a, modulus, a_low, a_high) && residues(b, modulus, b_low, b_high) &&
          (a_high <= b_low || b_high <= a_low))
        return true;
    }
  }
  return false;
}

Box box_of_slice(const Value& value, int axis, int64_t low, int64_t high) {
  const int64_t size = size_of(value.type);
  Box box;
  box.offset = value.offset * size;
  box.width = size;
  std::vector<Dimension> found;
  for (int dim = 0; dim < static_cast<int>(value.shape.size()); ++dim) {
    int64_t count = value.shape[dim];
    int64_t stride = value.strides[dim] * size;
    if (dim == axis) {
      box.offset += low * stride;
      count = high - low;
    }
    if (count <= 0) return Box{box.offset, 0, 0, true, {}};
    if (stride < 0) {  // flipped: the last index comes first in memory
      box.offset += stride * (count - 1);
      stride = -stride;
    }
    if (count > 1 && stride > 0) found.push_back({stride, count});
  }
  std::sort(found.begin(), found.end(), [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  std::vector<Dimension> merged;  // by increasing stride
  for (const Dimension& dimension : found) {
    if (merged.empty() && dimension.stride <= box.width) {
      box.width += dimension.stride * (dimension.count - 1);
    } else if (!merged.empty() && dimension.stride == merged.back().stride * merged.back().count) {
      merged.back().count *= dimension.count;
    } else {
      merged.push_back(dimension);
    }
  }
  while (merged.size() > Box::most) {
    box.width += merged.front().stride * (merged.front().count - 1);
    box.exact = false;
    merged.erase(merged.begin());
  }
  box.depth = static_cast<int>(merged.size());
  std::copy(merged.rbegin(), merged.rend(), box.dimensions.begin());
  return box;
}

}  // namespace

int64_t Box::end() const {
  return empty() ? offset : offset + span(dimensions.data(), depth, width);
}

int64_t Box::bytes() const {
  int64_t total = width;
  for (int index = 0; index < depth; ++index) total *= dimensions[index].count;
  return total;
}

bool Box::operator==(const Box& other) const {
  return offset == other.offset && width == other.width && depth == other.depth &&
         std::equal(dimensions.begin(), dimensions.begin() + depth, other.dimensions.begin());
}

Box box_of(const Value& value) {
  return box_of_slice(value, -1, 0, 0);
}

Box box_of(const Graph& graph, const Stage& stage, const Access& access, int64_t begin, int64_t end) {
  const Value& value = graph.values()[access.value];
  if (begin >= end) return Box{value.offset * size_of(value.type), 0, 0, true, {}};
  if (access.axis < 0 || stage.extent <= 0) return box_of(value);
  const int64_t length = value.shape[access.axis];
  // Round outwards if a tile boundary falls between two indices.
  return box_of_slice(value, access.axis, begin * length / stage.extent, ceil_divide(end * length, stage.extent));
}

bool overlap(const Box& a, const Box& b) {
  if (a.empty() || b.empty()) return false;
  int steps = 2000;
  const bool met = sub_boxes_overlap({a.dimensions.data(), a.depth, a.offset, a.width},
                                     {b.dimensions.data(), b.depth, b.offset, b.width}, steps);
  return met && (steps >= 0 || !apart_by_residues(a, b));
}

bool overlap(const Value& a, const Value& b) {
  return !a.is_literal() && a.buffer == b.buffer && overlap(box_of(a), box_of(b));
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

bool covers(const Box& outer, const Box& inner) {
  if (inner.empty()) return true;
  if (outer.empty() || !outer.exact) return false;
  if (inner.offset < outer.offset || inner.end() > outer.end()) return false;
  if (outer.contiguous()) return true;
  int64_t distance = inner.offset - outer.offset;
  int next = 0;
  for (int index = 0; index < outer.depth; ++index) {
    const Dimension& rows = outer.dimensions[index];
    const bool both = next < inner.depth && inner.dimensions[next].stride == rows.stride;
    const int64_t row = distance / rows.stride;
    if (row + (both ? inner.dimensions[next].count : 1) > rows.count) return false;
    distance -= row * rows.stride;
    if (both) ++next;
  }
  return next == inner.depth && distance + inner.width <= outer.width;
}

void each_piece(const Box& box, const std::function<void(int64_t, int64_t, int64_t)>& visit) {
  if (box.empty()) return;
  if (box.depth == 0) return visit(box.offset, 1, 0);
  const Dimension& rows = box.dimensions[box.depth - 1];
  std::vector<int64_t> at(box.depth, 0);
  for (;;) {
    int64_t offset = box.offset;
    for (int dim = 0; dim + 1 < box.depth; ++dim) offset += at[dim] * box.dimensions[dim].stride;
    visit(offset, rows.count, rows.stride);
    int dim = box.depth - 2;
    while (dim >= 0 && ++at[dim] == box.dimensions[dim].count) at[dim--] = 0;
    if (dim < 0) return;
  }
}

}  // namespace ark::compiler

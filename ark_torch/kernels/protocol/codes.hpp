// The encoding of a product's weights, as passed to the CPU's and the GPU's kernels (Codes in
// csrc/compiler/graph/stage.hpp explains each field). All of it is constant when a plan is emitted.
#pragma once

#include "protocol/base.hpp"

namespace ark {

struct Codes {
  // Strides of scales or zeros: between groups, and between columns.
  struct Strides {
    int group, column;
  };
  int bits;
  bool is_signed, high_first, zero_after;
  int offset;
  int group;
  Strides scale, zero;
  int block;
};

// Stands for an absent operand.
struct NoScale {};

}  // namespace ark

// How a product's weights are coded, as the CPU's and the GPU's kernels are told (Codes in
// csrc/compiler/graph/stage.hpp says what each means). All of it is known when a plan is emitted.
#pragma once

#include "protocol/base.hpp"

namespace ark {

struct Codes {
  // Of scales or zeros: between two groups, and between two columns.
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

// In the place of what is not there.
struct NoScale {};

}  // namespace ark

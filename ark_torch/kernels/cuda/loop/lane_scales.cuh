// Codes of dequant_tensor.cuh with more rows than staged_scales.cuh has registers for: each lane loads one column's
// scale and zero ahead, and weights are decoded one by one.
#pragma once

#include "cuda/loop/dequant_tensor.cuh"

namespace ark::loop {

template <class Columns>
class LaneScales : public CodeLoads<Columns> {
  using Base = CodeLoads<Columns>;
  using typename Base::Slices;

 public:
  static constexpr bool kRaises = false;
  static constexpr bool kSyncs = false;

  ARK_LOOP LaneScales(const Columns& columns, int c, int batches, float*, int, bool) : Base(columns, c, batches) {
    this->load_first();
    load_scales();
  }

  ARK_LOOP void begin_scales(int) const {}
  ARK_LOOP void advance_scales() { load_scales(); }
  ARK_LOOP float scale(int octet) const { return Slices::kScales ? of_column(scale_, octet) : 1; }
  ARK_LOOP float zero(int octet) const { return Slices::kZeros ? of_column(zero_, octet) : 0; }

 private:
  ARK_LOOP float of_column(float mine, int octet) const {
    return __shfl_sync(~0u, mine, octet * 8 + thread_anew() % 32 / 4);
  }
  // Those of the batch whose codes load.
  ARK_LOOP void load_scales() {
    const int self = thread_anew(), lane = self % 32;
    const int group =
        (Slices::slice(self) * kDequantSlice + this->pass_ * Slices::kStride) / static_cast<int>(Slices::q.group);
    if (lane >= kDequantColumns || this->left_ + lane / 4 <= lane ||
        (!Slices::kWhole && group * Slices::q.group >= Slices::s.depth))
      return;
    const int column = this->c_ + (this->batch_ * Slices::split.groups + Slices::group(self)) * kDequantColumns + lane;
    if constexpr (Slices::kScales) scale_ = load_one(this->columns_.scale_at(group, column));
    if constexpr (Slices::kZeros) zero_ = static_cast<float>(load_one(this->columns_.zero_at(group, column)));
  }

  float scale_ = 0, zero_ = 0;  // of the lane's column
};

}  // namespace ark::loop

// Codes of dequant_tensor.cuh for up to eight rows: scales and zeros are staged in shared memory behind the sums, all
// groups of a task's columns at once, and 4-bit weights stay raised until their sums.
#pragma once

#include "cuda/loop/dequant_tensor.cuh"

namespace ark::loop {

inline constexpr int kStagedRows = 8;  // with more, registers do not suffice

// Bytes in shared memory of a group's scale or zero.
template <class T>
inline constexpr int kStagedBytes = kSame<T, NoScale> ? 0 : static_cast<int>(sizeof(Plain<T>));

// Columns whose sums and scales fit into the workspace, in whole batches of all warps; 0 if not even one batch does.
template <int kRows, class Columns>
ARK_LOOP constexpr int most_staged_columns() {
  using Slices = CodeSlices<Columns>;
  int bytes = kRows * Slices::split.slices * 4;  // of a column
  if (Slices::kScaledHere)
    bytes +=
        Slices::kGroups * (kStagedBytes<typename Columns::ScaleElement> + kStagedBytes<typename Columns::ZeroElement>);
  return (kWorkspaceBytes - kRows * 32) / bytes / Slices::kTogether * Slices::kTogether;
}

// Begins to copy scales or zeros of columns [c, c + count) to shared memory, where they lie as in memory: all groups of
// a column, then the next column's. Called by all threads. `at`: their address by group and column. kAdjacent: a
// column's groups are. kColumnStride: in elements, of the first share.
template <int kGroups, bool kAdjacent, int64_t kColumnStride, class T, class Columns, class At>
ARK_LOOP void stage_scales(T* to, const Columns& columns, int c, int count, At at) {
  constexpr int kEach = 16 / sizeof(T);
  constexpr bool kChunks = kAdjacent && kGroups % kEach == 0 && kColumnStride % kEach == 0;
  constexpr int kTogether = kChunks ? kEach : 1, kItems = kGroups / kTogether;  // of a column
  ARK_ROLLED for (int i = thread_anew(); i < count * kItems; i += kThreads) {
    const int column = i / kItems, g = i % kItems * kTogether;
    if (columns.left(c + column) <= 0) continue;
    const auto* const from = at(g, c + column);
    T* const mine = to + column * kGroups + g;
    if (kChunks && is_aligned(from, 16))
      copy_16(shared_address(mine), from);
    else
      ARK_UNROLL for (int e = 0; e < kTogether; ++e) mine[e] = load_bytes<T>(from + e);
  }
}

template <class Columns>
class StagedScales : public CodeLoads<Columns> {
  using Base = CodeLoads<Columns>;
  using typename Base::Slices;
  using Scale = Plain<typename Columns::ScaleElement>;
  using Zero = Plain<typename Columns::ZeroElement>;
  static constexpr int kGroups = Slices::kGroups;

 public:
  static constexpr bool kRaises = true;
  static constexpr bool kSyncs = Slices::kScaledHere;  // all threads wait() for scales

  // `staged`: where those of `width` columns go.
  ARK_LOOP StagedScales(const Columns& columns, int c, int batches, float* staged, int width)
      : Base(columns, c, batches),
        scales_(reinterpret_cast<Scale*>(staged)),
        zeros_(reinterpret_cast<Zero*>(reinterpret_cast<char*>(staged) +
                                       width * kGroups * kStagedBytes<typename Columns::ScaleElement>)) {
    if (batches == 0) this->left_ = 0;
    this->load_first();
    if constexpr (kSyncs) {
      if constexpr (Slices::kScales)
        stage_scales<kGroups, Columns::kScalesAdjacent, Slices::q.scale.column>(
            scales_, columns, c, width, [&](int g, int column) { return columns.scale_at(g, column); });
      if constexpr (Slices::kZeros)
        stage_scales<kGroups, Columns::kZerosAdjacent, Slices::q.zero.column>(
            zeros_, columns, c, width, [&](int g, int column) { return columns.zero_at(g, column); });
      end_copies();
    }
  }
  ARK_LOOP void wait() const {
    wait_copies<0>();
    sync();
  }

  // Those that follow are of a pass's first batch.
  ARK_LOOP void begin_scales(int pass) {
    const int self = thread_anew(), depth = Slices::slice(self) * kDequantSlice + pass * Slices::kStride;
    // Slices behind the depth, whose sums are 0, take the last group's.
    const int group = least(depth / static_cast<int>(Slices::q.group), kGroups - 1);
    scale_at_ = (Slices::group(self) * kDequantColumns + self % 32 / 4) * kGroups + group;
  }
  ARK_LOOP void advance_scales() { scale_at_ += Slices::kTogether * kGroups; }
  ARK_LOOP float scale(int octet) const {
    if constexpr (!Slices::kScales)
      return 1;
    else
      return load_one(scales_ + scale_at_ + octet * 8 * kGroups);
  }
  ARK_LOOP float zero(int octet) const {
    if constexpr (!Slices::kZeros)
      return 0;
    else
      return static_cast<float>(load_one(zeros_ + scale_at_ + octet * 8 * kGroups));
  }

 private:
  Scale* const scales_;
  Zero* const zeros_;
  int scale_at_;
};

}  // namespace ark::loop

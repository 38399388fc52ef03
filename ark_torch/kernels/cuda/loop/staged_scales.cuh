// Codes of dequant_tensor.cuh for up to eight rows: scales and zeros are staged in shared memory behind the sums, all
// groups of a task's columns at once, and 4-bit weights stay raised until their sums.
#pragma once

#include "cuda/loop/dequant_tensor.cuh"

namespace ark::loop {

inline constexpr int kStagedRows = 8;  // with more, registers do not suffice

// Scales or zeros in memory and in shared memory, by the distances of a column's groups and of a group's columns, which
// are 0 where the shares' differ. kByGroup: a group's columns are neighbours, or every other element is a column's
// (scales and zeros of PyTorch's int4 tiles), and they lie so in shared memory too, at a pitch of kPitch columns.
// Otherwise the groups of a column lie there side by side.
template <class T, int kGroups, int64_t kGroupStride, int64_t kColumnStride>
struct Staging {
  using Element = Plain<T>;
  static constexpr int kSize = kSame<T, NoScale> ? 0 : static_cast<int>(sizeof(Element));
  static constexpr bool kByGroup = kSize != 0 && kGroups > 1 && kGroupStride != 1 &&
                                   (kColumnStride == 1 || kColumnStride == 2);
  static constexpr int kColumn =
      kByGroup ? static_cast<int>(kColumnStride) : kGroups;                        // elements from column to column
  static constexpr int kBytes = kSize * (kByGroup ? kColumn * kGroups : kGroups);  // of a column

  template <int kPitch>
  static ARK_LOOP int at(int group, int column) {
    return column * kColumn + group * (kByGroup ? kPitch * kColumn : 1);
  }
  // Where those start in memory from `to` on. If a column has 4 bytes, they hold what 4 bytes at `from` do.
  template <class From>
  static ARK_LOOP Element* begin(char* to, From from) {
    return reinterpret_cast<Element*>(to + (kSize * kColumn >= 4 ? misplaced(from) : 0));
  }

  // Begins to copy those of columns [c, c + count). Called by all threads. `from`: their address by group and column.
  template <int kPitch, class Columns, class From>
  static ARK_LOOP void copy(Element* to, const Columns& columns, int c, int count, From from) {
    if constexpr (kByGroup) {
      constexpr int kTogether = kSize * kColumn < 4 ? 4 / (kSize * kColumn) : 1;  // columns
      const int self = thread_anew();
      ARK_ROLLED for (int g = self / 32; g < kGroups; g += kWarps) {
        ARK_ROLLED for (int column = self % 32 * kTogether; column < count; column += 32 * kTogether) {
          const int left = columns.left(c + column);
          if (left <= 0) continue;
          const auto* const given = from(g, c + column);
          Element* const mine = to + at<kPitch>(g, column);
          const int past = misplaced(given);
          if (past == misplaced(mine) && (kTogether == 1 || past == 0))
            copy_4(reinterpret_cast<char*>(mine) - past, bytes_of(given) - past,
                   past + least(4 - past, kSize * ((left - 1) * kColumn + 1)));
          else
            ARK_UNROLL for (int e = 0; e < kTogether; ++e) if (e < left) mine[e * kColumn] =
                load_bytes<Element>(given + e * kColumn);
        }
      }
    } else {
      constexpr int kEach = 16 / kSize;
      constexpr bool kChunks = kGroupStride == 1 && kGroups % kEach == 0 && kColumnStride % kEach == 0;
      constexpr int kTogether = kChunks ? kEach : 1, kItems = kGroups / kTogether;  // of a column
      ARK_ROLLED for (int i = thread_anew(); i < count * kItems; i += kThreads) {
        const int column = i / kItems, g = i % kItems * kTogether;
        if (columns.left(c + column) <= 0) continue;
        const auto* const given = from(g, c + column);
        Element* const mine = to + column * kGroups + g;
        if (kChunks && is_aligned(given, 16))
          copy_16(shared_address(mine), given);
        else
          ARK_UNROLL for (int e = 0; e < kTogether; ++e) mine[e] = load_bytes<Element>(given + e);
      }
    }
  }

 private:
  static ARK_LOOP const char* bytes_of(const void* at) { return static_cast<const char*>(at); }
  static ARK_LOOP int misplaced(const void* at) {  // bytes behind a multiple of 4
    return static_cast<int>(bits_as<int64_t>(at) & 3);
  }
};

template <class Columns>
using StagingOfScales =
    Staging<typename Columns::ScaleElement, CodeSlices<Columns>::kGroups, Columns::kScaleGroup, Columns::kScaleColumn>;
template <class Columns>
using StagingOfZeros =
    Staging<typename Columns::ZeroElement, CodeSlices<Columns>::kGroups, Columns::kZeroGroup, Columns::kZeroColumn>;

// Columns whose sums and scales fit into the workspace, in whole batches of all warps; 0 if not even one batch does.
template <int kRows, class Columns>
ARK_LOOP constexpr int most_staged_columns() {
  using Slices = CodeSlices<Columns>;
  int bytes = kRows * Slices::split.slices * 4;  // of a column
  if (Slices::kScaledHere) bytes += StagingOfScales<Columns>::kBytes + StagingOfZeros<Columns>::kBytes;
  return (kWorkspaceBytes - kRows * 32 - 32) / bytes / Slices::kTogether * Slices::kTogether;
}

// kMost: columns that there is room for.
template <class Columns, int kMost>
class StagedScales : public CodeLoads<Columns> {
  using Base = CodeLoads<Columns>;
  using typename Base::Slices;
  using Scales = StagingOfScales<Columns>;
  using Zeros = StagingOfZeros<Columns>;

 public:
  static constexpr bool kRaises = true;
  static constexpr bool kSyncs = Slices::kScaledHere;  // all threads wait() for scales

  // Begins to copy those of `width` columns from c on to `staged`. Called by all threads.
  static ARK_LOOP void stage(const Columns& columns, int c, float* staged, int width) {
    if constexpr (Slices::kScales)
      Scales::template copy<kMost>(scales(columns, c, staged), columns, c, width,
                                   [&](int g, int column) { return columns.scale_at(g, column); });
    if constexpr (Slices::kZeros)
      Zeros::template copy<kMost>(zeros(columns, c, staged), columns, c, width,
                                  [&](int g, int column) { return columns.zero_at(g, column); });
    end_copies();
  }

  // `there`: the scales have been staged.
  ARK_LOOP StagedScales(const Columns& columns, int c, int batches, float* staged, int width, bool there)
      : Base(columns, c, batches), scales_(scales(columns, c, staged)), zeros_(zeros(columns, c, staged)) {
    if (batches == 0) this->left_ = 0;
    this->load_first();
    if (kSyncs && !there) stage(columns, c, staged, width);
  }
  ARK_LOOP void wait() const {
    wait_copies<0>();
    sync();
  }

  // Those that follow are of a pass's first batch.
  ARK_LOOP void begin_scales(int pass) {
    const int self = thread_anew(), depth = Slices::slice(self) * kDequantSlice + pass * Slices::kStride;
    // Slices behind the depth, whose sums are 0, take the last group's.
    const int group = least(depth / static_cast<int>(Slices::q.group), Slices::kGroups - 1);
    const int column = Slices::group(self) * kDequantColumns + self % 32 / 4;
    scale_at_ = Scales::template at<kMost>(group, column);
    zero_at_ = Zeros::template at<kMost>(group, column);
  }
  ARK_LOOP void advance_scales() {
    scale_at_ += Slices::kTogether * Scales::kColumn;
    zero_at_ += Slices::kTogether * Zeros::kColumn;
  }
  ARK_LOOP float scale(int octet) const {
    if constexpr (!Slices::kScales)
      return 1;
    else
      return load_one(scales_ + scale_at_ + octet * 8 * Scales::kColumn);
  }
  ARK_LOOP float zero(int octet) const {
    if constexpr (!Slices::kZeros)
      return 0;
    else
      return static_cast<float>(load_one(zeros_ + zero_at_ + octet * 8 * Zeros::kColumn));
  }

 private:
  static ARK_LOOP auto* scales(const Columns& columns, int c, float* staged) {
    char* const to = reinterpret_cast<char*>(staged);
    if constexpr (Scales::kByGroup)
      return Scales::begin(to, columns.scale_at(0, c));
    else
      return reinterpret_cast<typename Scales::Element*>(to);
  }
  static ARK_LOOP auto* zeros(const Columns& columns, int c, float* staged) {
    char* const to = reinterpret_cast<char*>(staged) + kMost * Scales::kBytes + (Scales::kByGroup ? 16 : 0);
    if constexpr (Zeros::kByGroup)
      return Zeros::begin(to, columns.zero_at(0, c));
    else
      return reinterpret_cast<typename Zeros::Element*>(to);
  }

  typename Scales::Element* const scales_;
  typename Zeros::Element* const zeros_;
  int scale_at_, zero_at_;  // of the next batch
};

}  // namespace ark::loop

// Products of many half-type rows with quantized weights: codes become half-type numbers on their way to shared memory,
// and warp groups multiply them there as if they had been stored so (tile_ring.cuh).
//
// A thread decodes 16 codes of a column for each line of 64 depths. It loads them a line ahead, into registers, so that
// the load is in flight while others are decoded and multiplied. Codes alone are exact in half types: a scale per
// column multiplies the finished sums. Scales and zeros of groups are applied in float32 before the number is rounded,
// once.
#pragma once

#include "cuda/loop/dequant.cuh"
#include "cuda/loop/matmul.cuh"

namespace ark::loop {

// Decodes eight adjacent codes, in order: a word of 4 bits, or two of 8 bits.
template <Codes q, class B, class T>
ARK_LOOP Chunk decode_eight(const uint32* words) {
  using Words = Coding<q, B, T>;
  const uint32 power = Words::joined();
  const auto low = [](uint32 a, uint32 b) { return __byte_perm(a, b, 0x5410); };
  const auto high = [](uint32 a, uint32 b) { return __byte_perm(a, b, 0x7632); };
  uint32 pairs[Words::kPairs];
  Words::word(words[0], power, pairs);
  if constexpr (q.bits == 4) {
    constexpr int f = q.high_first ? 1 : 0;  // which of a byte's two comes first
    return {low(pairs[f], pairs[1 - f]), low(pairs[2 + f], pairs[3 - f]), high(pairs[f], pairs[1 - f]),
            high(pairs[2 + f], pairs[3 - f])};
  } else {
    uint32 more[Words::kPairs];
    Words::word(words[1], power, more);
    if constexpr (kSame<B, e4m3>) return {pairs[0], pairs[1], more[0], more[1]};
    return {low(pairs[0], pairs[1]), high(pairs[0], pairs[1]), low(more[0], more[1]), high(more[0], more[1])};
  }
}

// In place of ChunkCopy, for columns of a CodedShare.
template <int kColumns, class T, class Share>
class CodedCopy {
  static constexpr Product s = Share::kProduct;
  static constexpr Codes q = Share::q;
  using B = typename Share::Element;
  using Zero = typename Share::ZeroElement;
  static constexpr bool kScaledHere = !kScaledLast<s, q, Zero>, kZeros = !kSame<Zero, NoScale>;
  static constexpr int kCodes = 16, kParts = kTileDepth<T> / kCodes;  // of a thread; of a line
  static constexpr int kWords = kCodes * q.bits / 32;
  static_assert(s.depth % kCodes == 0 && (q.group == s.depth || q.group % kCodes == 0));
  static_assert(kColumns * kParts <= kThreads);

 public:
  static constexpr int kBytes = kColumns * kLineBytes;

  ARK_LOOP void start(const Share& share, int c0, int c1) {
    if (line() >= kColumns) return;
    column_ = c0 + line() < c1 ? c0 + line() : c0;  // missing columns do not affect the present ones
    from_ = share.column(column_) + part() * (kCodes * q.bits / 8);
    load(share, 0);
  }

  // Decodes what was loaded, of depths from d on, and loads what follows.
  ARK_LOOP void copy(int at, const Share& share, int d, int) {
    if (line() >= kColumns) return;
    ARK_UNROLL for (int half = 0; half < 2; ++half) {
      Chunk eight = decode_eight<q, B, T>(codes_.at + half * (kWords / 2));
      if constexpr (kScaledHere) scale(eight);
      if (s.depth % kTileDepth<T> != 0 && d + part() * kCodes >= s.depth) eight = {};
      *reinterpret_cast<Chunk*>(tile_chunk(workspace() + at, line(), part() * 2 + half)) = eight;
    }
    load(share, d + kTileDepth<T>);
  }

 private:
  ARK_LOOP int line() const { return self_ / kParts; }
  ARK_LOOP int part() const { return self_ % kParts; }

  ARK_LOOP void load(const Share& share, int d) {
    const int mine = d + part() * kCodes;
    if (mine >= s.depth) return;
    codes_ = load_bytes<Together<uint32, kWords>>(from_);
    from_ += kTileDepth<T> * q.bits / 8;
    if constexpr (kScaledHere) scale_ = share.scale(mine / q.group, column_);
    if constexpr (kZeros) zero_ = share.zero(mine / q.group, column_);
  }

  ARK_LOOP void scale(Chunk& eight) const {
    ARK_UNROLL for (int w = 0; w < 4; ++w) {
      float two[2];
      ARK_UNROLL for (int i = 0; i < 2; ++i) {
        two[i] = chunk_element<T>(eight, w * 2 + i);
        if constexpr (kZeros && !q.zero_after) two[i] -= zero_;
        two[i] = kZeros && q.zero_after ? fused(two[i], scale_, zero_) : two[i] * scale_;
      }
      eight.words[w] = pack_two(two[0], two[1], T{});
    }
  }

  const int self_ = thread_anew();
  int column_ = 0;
  const B* from_ = nullptr;
  Together<uint32, kWords> codes_ = {};
  float scale_ = 1, zero_ = 0;
};

template <int64_t kRows, int kTileRows, int kTileColumns, class T, class Share, class By>
ARK_LOOP void decoded_tiles(const T* a, const Share& share, const By* by) {
  constexpr Product s = Share::kProduct;
  using Tile = GroupTile<T, kTileRows, kTileColumns, false, false>;
  using ACopy = ChunkCopy<kTileRows, false, T, EvenRows>;
  using BCopy = CodedCopy<kTileColumns, T, Share>;
  const Side<T, EvenRows> a_side{a, {s.a_row, s.out_row}, 1, true};
  auto* const out = now(share.out);
  for (int r = 0; r < kRows; r += kTileRows) {
    for (int c = share.c0; c < share.c1; c += kTileColumns) {
      const int r_past = least<int>(r + kTileRows, kRows), c_past = least(c + kTileColumns, share.c1);
      Tile tile;
      ring_product<ACopy, BCopy, kTileRows, kTileColumns>(tile, s, a_side, share, out, by, r, r_past, c, c_past);
      tile.finish(s, a_side.at, out, by, r, r_past, c, c_past, stored_in_pairs<EvenRows>(s, out, c));
    }
  }
}

// All of a's rows, at most kRows, with the columns of the share. kTileRows, kTileColumns: the shape of a tile, which
// the plan has chosen. What the ring cannot take is computed as few rows are.
template <int64_t kRows, int kTileRows, int kTileColumns, class AAt, class Share>
ARK_LOOP void dequant_tiles(AAt a, const Share& share) {
  constexpr Product s = Share::kProduct;
  constexpr Codes q = Share::q;
  using T = typename Pointee<AAt>::Type;
  if constexpr (kHasGroupMultiply && kIsHalf<T> && s.a_aligned && s.b_aligned && s.a_depth == 1 && s.b_depth == 1) {
    if constexpr (kScaledLast<s, q, typename Share::ZeroElement> && !kSame<typename Share::ScaleElement, NoScale>) {
      const auto by =
          scaled_by<0, q.scale.column>(static_cast<const NoScale*>(nullptr), now(share.scales), now(share.bias));
      decoded_tiles<kRows, kTileRows, kTileColumns>(now(a), share, &by);
    } else {
      decoded_tiles<kRows, kTileRows, kTileColumns>(now(a), share, now(share.bias));
    }
  } else {
    dequant_products<kRows>(a, share);
  }
}

}  // namespace ark::loop

// Attention of the query heads that share one KV head: softmax(scale q k' + mask) v, by all threads of a block.
//
// As in cpu/attention.hpp, the softmax is online (Milakov and Gimelshein, 2018), a block of positions that the mask
// excludes for all rows is not read, and a row without any allowed position gives zeros. The kernel, and the order of
// its sums, depend only on shapes, types and the operands' alignment.
#pragma once

#include "cuda/loop/attention_combine.cuh"
#include "cuda/loop/attention_decode.cuh"
#include "cuda/loop/attention_few.cuh"
#include "cuda/loop/attention_flash.cuh"
#include "cuda/loop/attention_float.cuh"
#include "cuda/loop/attention_groups.cuh"
#include "cuda/loop/attention_tiles.cuh"

namespace ark::loop {

inline constexpr int kFewQueries = 16;  // up to this many, warps split positions instead of rows

// Columns: of queries and keys; ValueColumns: of values and the result. `states`: written if `s.part`.
template <int Columns, int ValueColumns, Attention kShape, class QAt, class KAt, class VAt, class M, class OutAt,
          class StatesAt = float*>
ARK_LOOP void attend(const Context&, QAt q, KAt k, VAt v, const M* mask, OutAt out, StatesAt states = nullptr) {
  constexpr Attention s = kShape;
  static_assert(Columns <= 256 && ValueColumns <= 256);
  using Q = typename Pointee<QAt>::Type;
  using K = typename Pointee<KAt>::Type;
  using V = typename Pointee<VAt>::Type;
  constexpr bool kTensor = kSame<Q, K> && kSame<K, V> && sizeof(Q) == 2 && Columns <= 128 && ValueColumns <= 128;
  constexpr bool kFew = s.heads * s.queries <= kFewQueries;
  static_assert(kFew || !s.part);
  if constexpr (kFew && kTensor && Columns % 8 == 0 && ValueColumns % 8 == 0 && s.aligned) {
    attend_few<Columns, ValueColumns, s, Q>(q, k, v, mask, out, states);
  } else if constexpr (kFew) {
    attend_few_plainly<Columns, ValueColumns, s>(now(q), now(k), now(v), mask, now(out), now(states));
  } else if constexpr (kTensor) {
    attend_tiles<Columns, ValueColumns, s, Q>(q, k, v, mask, out);
  } else {
    attend_plainly<Columns, ValueColumns>(s, now(q), now(k), now(v), mask, now(out));
  }
}

// The same, after a position is appended to the cache. All threads call `make`, which computes q and the position's key
// and value, and returns its index in k and v, or any other number if k and v do not contain it.
template <int Columns, int ValueColumns, Attention kShape, class QAt, class KAt, class VAt, class M, class OutAt,
          class StatesAt, class K, class V, class Make>
ARK_LOOP void attend(const Context& context, QAt q, KAt k, VAt v, const M* mask, OutAt out, StatesAt states,
                     const K* new_k, const V* new_v, Make make) {
  constexpr Attention s = kShape;
  using Q = typename Pointee<QAt>::Type;
  const AddedPosition<Columns, ValueColumns, KAt, VAt, K, V, Make> added{k, v, new_k, new_v, make};
  if constexpr (adds_at_once<Columns, ValueColumns, s, Q, K, V, M>()) {
    attend_few<Columns, ValueColumns, s, Q>(q, k, v, mask, out, states, added);
  } else {
    const int64_t at = added.begin();
    added.template store<s>(at);
    sync();
    attend<Columns, ValueColumns, s>(context, q, k, v, mask, out, states);
  }
}

}  // namespace ark::loop

// The loops over elements and ranks, and their table for one instruction set. Private to reduce_<isa>.cpp.
//
// Ranks are always combined in rank order. Hot kernels take up to four ranks per pass; more ranks go block by block
// through an accumulator in the L1 cache. Cold kernels loop over the ranks for each vector: one function instead of
// ten, which keeps this file's compile time to seconds. Every pass loads its sources before it stores the result, so
// the result may replace a source.
#pragma once

#include "reduce_formats.hpp"
#include "reduce_ops.hpp"

namespace ark::ARK_REDUCE_ISA {

// One (format, operation) pair.
template <class Format_, class Op_, bool kHot_>
struct Kernel {
  using Format = Format_;
  using Op = Op_;
  using Raw = typename Format::Raw;
  using Acc = typename Format::Acc;
  static constexpr bool kHot = kHot_;
  static constexpr size_t kStep = sizeof(Raw) / sizeof(ElementOf<Raw>);  // scalars per vector
  static constexpr size_t kBytes = sizeof(ElementOf<Raw>);               // bytes per scalar in memory
  static constexpr size_t kBlock = 2048 / sizeof(Acc);                   // vectors in the accumulator
};

inline constexpr int kFused = 4;  // ranks per pass of a hot kernel

struct Job {
  unsigned char* out;
  unsigned char* out2;
  const void* const* sources;  // starting at the pass's first rank
  const double* factors;       // same; premul_sum only
  int ranks;                   // of the whole operation
  double divisor;              // for an average
};

template <class K, bool kWhole>
ARK_INLINE typename K::Acc take(const void* source, size_t at, size_t lanes, [[maybe_unused]] const double* factor) {
  const unsigned char* from = static_cast<const unsigned char*>(source) + at;
  auto x = K::Format::decode(load<typename K::Raw, kWhole>(from, lanes));
  if constexpr (K::Op::kPremultiply) x = x * static_cast<ElementOf<typename K::Acc>>(*factor);
  return x;
}

template <class K, bool kWhole>
ARK_INLINE void give(const Job& job, typename K::Acc x, size_t at, size_t lanes) {
  if constexpr (K::Op::kAverage) x = x / static_cast<ElementOf<typename K::Acc>>(job.divisor);
  const auto raw = K::Format::encode(canonical(x));
  store<kWhole>(job.out + at, raw, lanes);
  if (job.out2) store<kWhole>(job.out2 + at, raw, lanes);
}

// Combines one vector of all ranks: in cold kernels, and for the last, incomplete vector of every kernel.
template <class K, bool kWhole>
ARK_INLINE void all_ranks(const Job& job, size_t at, size_t lanes) {
  auto x = take<K, kWhole>(job.sources[0], at, lanes, job.factors);
  for (int r = 1; r < job.ranks; r++) {
    x = K::Op::combine(x, take<K, kWhole>(job.sources[r], at, lanes, K::Op::kPremultiply ? job.factors + r : nullptr));
  }
  give<K, kWhole>(job, x, at, lanes);
}

// Combines `kRanks` sources, after the accumulator if kFromAcc, into the result or the accumulator, for scalars [begin,
// end) in whole vectors.
template <class K, bool kFromAcc, bool kToOut, int kRanks>
__attribute__((noinline)) void pass(const Job& given, typename K::Acc* acc, size_t begin, size_t end) {
  const Job job = given;  // a copy that stores through `out` cannot change
  const void* from[kRanks];
  for (int r = 0; r < kRanks; r++) from[r] = job.sources[r];
  constexpr int kFirst = kFromAcc ? 0 : 1;
  for (size_t i = begin; i < end; i += K::kStep) {
    const size_t at = i * K::kBytes;
    typename K::Acc x = kFromAcc ? *acc : take<K, true>(from[0], at, K::kStep, job.factors);
#pragma GCC unroll 4
    for (int r = kFirst; r < kRanks; r++) {
      const double* factor = K::Op::kPremultiply ? job.factors + r : nullptr;
      x = K::Op::combine(x, take<K, true>(from[r], at, K::kStep, factor));
    }
    if constexpr (kToOut) {
      give<K, true>(job, x, at, K::kStep);
    } else {
      *acc = x;
    }
    if constexpr (kFromAcc || !kToOut) ++acc;
  }
}

// Combines the last 1 to kFused ranks into the result.
template <class K, bool kFromAcc>
ARK_INLINE void last_pass(const Job& job, int ranks, typename K::Acc* acc, size_t begin, size_t end) {
  switch (ranks) {
    case 1: return pass<K, kFromAcc, true, 1>(job, acc, begin, end);
    case 2: return pass<K, kFromAcc, true, 2>(job, acc, begin, end);
    case 3: return pass<K, kFromAcc, true, 3>(job, acc, begin, end);
    default: return pass<K, kFromAcc, true, 4>(job, acc, begin, end);
  }
}

// Whole vectors up to `end`, four ranks per pass.
template <class K>
ARK_INLINE void fused(const Job& whole, size_t end) {
  static_assert(kFused == 4, "last_pass and the pass's unrolling know it");
  if (whole.ranks <= kFused) return last_pass<K, false>(whole, whole.ranks, nullptr, 0, end);
  typename K::Acc acc[K::kBlock];
  constexpr size_t kScalars = K::kBlock * K::kStep;
  for (size_t begin = 0; begin < end; begin += kScalars) {
    const size_t stop = end - begin < kScalars ? end : begin + kScalars;
    Job job = whole;
    pass<K, false, false, kFused>(job, acc, begin, stop);
    int left = whole.ranks;
    while ((left -= kFused) > 0) {
      job.sources += kFused;
      if (K::Op::kPremultiply) job.factors += kFused;
      if (left <= kFused) {
        last_pass<K, true>(job, left, acc, begin, stop);
      } else {
        pass<K, true, false, kFused>(job, acc, begin, stop);
      }
    }
  }
}

template <class K>
void reduce(void* out, void* out2, const void* const* sources, int ranks, size_t end, const double* factors) {
  const DefaultFloatMode mode;
  const Job job{static_cast<unsigned char*>(out),
                static_cast<unsigned char*>(out2),
                sources,
                factors,
                ranks,
                K::Op::kAverage && factors ? *factors : static_cast<double>(ranks)};
  const size_t whole = end - end % K::kStep;
  if constexpr (K::kHot) {
    if (whole > 0) fused<K>(job, whole);
  } else {
    for (size_t i = 0; i < whole; i += K::kStep) all_ranks<K, true>(job, i * K::kBytes, K::kStep);
  }
  if (whole < end) all_ranks<K, false>(job, whole * K::kBytes, end - whole);
}

// Converts a format's scalars to its accumulator type or back, for types that accumulate in float32.
template <class Format, bool kWiden>
void convert(void* out, const void* in, size_t count) {
  const DefaultFloatMode mode;
  using Raw = typename Format::Raw;
  using Acc = typename Format::Acc;
  constexpr size_t kStep = sizeof(Raw) / sizeof(ElementOf<Raw>);
  constexpr size_t kIn = sizeof(ElementOf<std::conditional_t<kWiden, Raw, Acc>>);
  constexpr size_t kOut = sizeof(ElementOf<std::conditional_t<kWiden, Acc, Raw>>);
  const unsigned char* from = static_cast<const unsigned char*>(in);
  unsigned char* to = static_cast<unsigned char*>(out);
  const size_t whole = count - count % kStep;
  for (size_t i = 0; i < whole; i += kStep) {
    if constexpr (kWiden) {
      store<true>(to + i * kOut, Format::decode(load<Raw, true>(from + i * kIn, kStep)), kStep);
    } else {
      store<true>(to + i * kOut, Format::encode(canonical(load<Acc, true>(from + i * kIn, kStep))), kStep);
    }
  }
  if (whole == count) return;
  if constexpr (kWiden) {
    store<false>(to + whole * kOut, Format::decode(load<Raw, false>(from + whole * kIn, count - whole)), count - whole);
  } else {
    const Acc rest = load<Acc, false>(from + whole * kIn, count - whole);
    store<false>(to + whole * kOut, Format::encode(canonical(rest)), count - whole);
  }
}

template <class Format>
ConvertFn converter(bool widen) {
  return widen ? convert<Format, true> : convert<Format, false>;
}

inline ConvertFn find_converter(DType dtype, bool widen) {
  switch (dtype) {
    case DType::c32:
    case DType::f16: return converter<Float16>(widen);
    case DType::bf16: return converter<BFloat16>(widen);
    case DType::f8_e4m3fn: return converter<Float8E4M3FN>(widen);
    case DType::f8_e5m2: return converter<Float8E5M2>(widen);
    case DType::f8_e4m3fnuz: return converter<Float8E4M3FNUZ>(widen);
    case DType::f8_e5m2fnuz: return converter<Float8E5M2FNUZ>(widen);
    case DType::f8_e8m0fnu: return converter<Float8E8M0FNU>(widen);
    default: return nullptr;
  }
}

// Hot kernels are those where speed matters: SUM and AVG of the types used in training.
inline constexpr bool kHot = true;
inline constexpr bool kCold = false;

template <class Format, bool kHotSum>
ReduceFn float_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return reduce<Kernel<Format, Sum, kHotSum>>;
    case ReduceOp::avg: return reduce<Kernel<Format, Average, kHotSum>>;
    case ReduceOp::product: return reduce<Kernel<Format, Product, kCold>>;
    case ReduceOp::min: return reduce<Kernel<Format, Min, kCold>>;
    case ReduceOp::max: return reduce<Kernel<Format, Max, kCold>>;
    case ReduceOp::premul_sum: return reduce<Kernel<Format, PremulSum, kCold>>;
    default: return nullptr;
  }
}

// A complex number is two adjacent scalars, which only a product mixes.
template <class K>
void reduce_pairs(void* out, void* out2, const void* const* sources, int ranks, size_t count, const double* factors) {
  reduce<K>(out, out2, sources, ranks, 2 * count, factors);
}

template <class Part>
ReduceFn complex_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return reduce_pairs<Kernel<Part, Sum, kHot>>;
    case ReduceOp::avg: return reduce_pairs<Kernel<Part, Average, kHot>>;
    case ReduceOp::product: return reduce_pairs<Kernel<Part, ComplexProduct, kCold>>;
    case ReduceOp::premul_sum: return reduce_pairs<Kernel<Part, PremulSum, kCold>>;
    default: return nullptr;
  }
}

template <class Unsigned, class Ordered>  // Ordered: the type itself, for MIN and MAX
ReduceFn integer_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return reduce<Kernel<Native<Unsigned>, Sum, kCold>>;
    case ReduceOp::product: return reduce<Kernel<Native<Unsigned>, Product, kCold>>;
    case ReduceOp::min: return reduce<Kernel<Native<Ordered>, Min, kCold>>;
    case ReduceOp::max: return reduce<Kernel<Native<Ordered>, Max, kCold>>;
    case ReduceOp::band: return reduce<Kernel<Native<Unsigned>, BitAnd, kCold>>;
    case ReduceOp::bor: return reduce<Kernel<Native<Unsigned>, BitOr, kCold>>;
    case ReduceOp::bxor: return reduce<Kernel<Native<Unsigned>, BitXor, kCold>>;
    default: return nullptr;
  }
}

inline ReduceFn boolean_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor: return reduce<Kernel<Boolean, BitOr, kCold>>;
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band: return reduce<Kernel<Boolean, BitAnd, kCold>>;
    case ReduceOp::bxor: return reduce<Kernel<Boolean, BitXor, kCold>>;
    default: return nullptr;
  }
}

inline ReduceFn scale_kernel(ReduceOp op) {  // e8m0fnu: powers of two
  switch (op) {
    case ReduceOp::product: return reduce<Kernel<Float8E8M0FNU, Product, kCold>>;
    case ReduceOp::min: return reduce<Kernel<Float8E8M0FNU, Min, kCold>>;
    case ReduceOp::max: return reduce<Kernel<Float8E8M0FNU, Max, kCold>>;
    default: return nullptr;
  }
}

inline ReduceFn find(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::boolean: return boolean_kernel(op);
    case DType::u8: return integer_kernel<uint8_t, uint8_t>(op);
    case DType::i8: return integer_kernel<uint8_t, int8_t>(op);
    case DType::u16: return integer_kernel<uint16_t, uint16_t>(op);
    case DType::i16: return integer_kernel<uint16_t, int16_t>(op);
    case DType::u32: return integer_kernel<uint32_t, uint32_t>(op);
    case DType::i32: return integer_kernel<uint32_t, int32_t>(op);
    case DType::u64: return integer_kernel<uint64_t, uint64_t>(op);
    case DType::i64: return integer_kernel<uint64_t, int64_t>(op);
    case DType::f16: return float_kernel<Float16, kHot>(op);
    case DType::bf16: return float_kernel<BFloat16, kHot>(op);
    case DType::f32: return float_kernel<Native<float>, kHot>(op);
    case DType::f64: return float_kernel<Native<double>, kHot>(op);
    case DType::f8_e4m3fn: return float_kernel<Float8E4M3FN, kCold>(op);
    case DType::f8_e5m2: return float_kernel<Float8E5M2, kCold>(op);
    case DType::f8_e4m3fnuz: return float_kernel<Float8E4M3FNUZ, kCold>(op);
    case DType::f8_e5m2fnuz: return float_kernel<Float8E5M2FNUZ, kCold>(op);
    case DType::f8_e8m0fnu: return scale_kernel(op);
    case DType::c32: return complex_kernel<Float16>(op);
    case DType::c64: return complex_kernel<Native<float>>(op);
    case DType::c128: return complex_kernel<Native<double>>(op);
    case DType::raw8: return nullptr;
  }
  return nullptr;
}

}  // namespace ark::ARK_REDUCE_ISA

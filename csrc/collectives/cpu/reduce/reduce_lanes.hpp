// Vectors of one instruction set: types, loads, stores, selects. Private to the reduce_<isa>.cpp files.
//
// Each of those files compiles the reduce_*.hpp kernels in a namespace named after the instruction set
// (ARK_REDUCE_ISA), under that set's target pragma. To keep the binary safe on older CPUs, code here must not call
// inline functions from elsewhere, std:: included: the linker keeps one copy, possibly the one compiled for AVX-512.
// The compiler's vector types make vectorisation independent of flags and the optimiser.
#pragma once

#if !defined(ARK_REDUCE_ISA) || !defined(ARK_REDUCE_BYTES)
#error "include this from reduce_<isa>.cpp only: it sets the namespace, the vector width and the target"
#endif

#define ARK_INLINE inline __attribute__((always_inline))

namespace ark::ARK_REDUCE_ISA {

template <class T, int N>
struct VecOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
using Vec = typename VecOf<T, N>::type;

inline constexpr int kLanes = ARK_REDUCE_BYTES / 4;  // float32 lanes per vector
using F32 = Vec<float, kLanes>;
using I32 = Vec<int32_t, kLanes>;
using F64 = Vec<double, kLanes / 2>;

template <class To, class From>
ARK_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V>
using ElementOf = std::remove_cvref_t<decltype(V{}[0])>;

// The integer vector type that comparing V values gives, with as many bits as V.
template <class V>
using MaskOf = std::remove_cvref_t<decltype(V{} == V{})>;

// Loads a whole vector, or its first `lanes` elements followed by zeros. Needs no alignment.
template <class V, bool kWhole>
ARK_INLINE V load(const unsigned char* from, size_t lanes) {
  V v = {};
  __builtin_memcpy(&v, from, kWhole ? sizeof(V) : lanes * sizeof(ElementOf<V>));
  return v;
}

template <bool kWhole, class V>
ARK_INLINE void store(unsigned char* to, V v, size_t lanes) {
  __builtin_memcpy(to, &v, kWhole ? sizeof(V) : lanes * sizeof(ElementOf<V>));
}

template <class V>
inline constexpr bool kIsFloat = std::is_floating_point_v<ElementOf<V>>;

// Makes every NaN the positive quiet NaN with an empty payload. Otherwise the payload would depend on the compiler's
// operand order, and the sign of inf - inf on the architecture.
template <class V>
ARK_INLINE V canonical(V x) {
  if constexpr (kIsFloat<V>) {
    return x == x ? x : V{} + static_cast<ElementOf<V>>(__builtin_nanf(""));
  } else {
    return x;
  }
}

// Sets rounding to nearest even and exact subnormals for one call, so that results do not depend on the calling
// thread's mode (torch.set_flush_denormal, fesetround).
class DefaultFloatMode {
 public:
  ARK_INLINE DefaultFloatMode() : saved_(get()) {
    if ((saved_ & kControl) != kDefault) set((saved_ & ~kControl) | kDefault);
  }
  ARK_INLINE ~DefaultFloatMode() {
    if ((saved_ & kControl) != kDefault) set(saved_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kControl = 0xffc0;  // flush to zero, rounding, exception masks, denormals are zero
  static constexpr Word kDefault = 0x1f80;  // all exceptions masked
  static ARK_INLINE Word get() {
    return __builtin_ia32_stmxcsr();
  }
  static ARK_INLINE void set(Word word) {
    __builtin_ia32_ldmxcsr(word);
  }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kControl = 0x07c09f00;  // AHP, DN, FZ, RMode; exception traps
  static constexpr Word kDefault = 0;
  static ARK_INLINE Word get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word) : : "memory");
    return word;
  }
  static ARK_INLINE void set(Word word) {
    asm volatile("msr fpcr, %0" : : "r"(word) : "memory");
  }
#else
  using Word = int;
  static constexpr Word kControl = 0, kDefault = 0;
  static ARK_INLINE Word get() {
    return 0;
  }
  static ARK_INLINE void set(Word) {}
#endif
  Word saved_;
};

}  // namespace ark::ARK_REDUCE_ISA

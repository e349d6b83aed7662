// Vectors of sixteen lanes, for every machine: the only vectors in the kernels.
//
//   Floats, Ints   16 floats, 16 int32: + - * / (Ints also & | ^ << >> with a number) and the functions below
//   Mask           selected lanes: of a span, or of a comparison
//
// With AVX-512 each is one register. Otherwise they consist of the machine's own vectors ("leaf": 8 lanes with AVX2, else 4, which
// the compiler lowers to SSE2 or NEON): Pair<leaf>, Pair<Pair<leaf>>. Every lane has the same arithmetic in each build, with one
// exception: without an instruction for it, fma rounds twice. Builds are compiled with -ffp-contract=off, so an fma is where one is
// written and nowhere else.
//
// Only this file, gemm_kernel.h and int4_dot.h use instructions of one machine.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <stdint.h>
#include <string.h>

#include <type_traits>

namespace quire {

using bf16 = uint16_t;

#if defined(__AVX512F__)
constexpr int LEAF = 16;
#elif defined(__AVX2__)
constexpr int LEAF = 8;
#else
constexpr int LEAF = 4;
#endif

typedef float LeafF __attribute__((vector_size(LEAF * 4)));
typedef int32_t LeafI __attribute__((vector_size(LEAF * 4)));
typedef uint32_t LeafU __attribute__((vector_size(LEAF * 4)));

// -- leaves ----------------------------------------------------------------------------------------------------------

template <class V>
struct Lanes;  // constructors, loads and stores of a vector

inline LeafF as_floats(LeafI x) { return (LeafF)x; }
inline LeafI as_ints(LeafF x) { return (LeafI)x; }
inline LeafI logical_right(LeafI x, int bits) { return (LeafI)((LeafU)x >> bits); }
// Modulo 2^32; the operators may not overflow.
inline LeafI wrapping_plus(LeafI a, LeafI b) { return (LeafI)((LeafU)a + (LeafU)b); }
inline LeafI wrapping_times(LeafI a, LeafI b) { return (LeafI)((LeafU)a * (LeafU)b); }

#if defined(__AVX512F__)

using Mask = __mmask16;
inline LeafF fma(LeafF a, LeafF b, LeafF c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
inline LeafF fnma(LeafF a, LeafF b, LeafF c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
inline LeafF max(LeafF a, LeafF b) { return _mm512_max_ps(a, b); }
inline LeafF min(LeafF a, LeafF b) { return _mm512_min_ps(a, b); }
inline LeafF nearest(LeafF x) { return _mm512_roundscale_ps(x, 0); }  // integers, ties to even
inline LeafI to_ints(LeafF x) { return (LeafI)_mm512_cvtps_epi32(x); }  // rounds as nearest does
inline LeafF inverse(LeafF x) {  // 1 / x for x from 1 to 2^126: as exact as a division, and four times as fast
  const LeafF y = _mm512_rcp14_ps(x);
  return fma(y, fnma(x, y, _mm512_set1_ps(1.f)), y);
}
inline LeafF to_floats(LeafI x) { return _mm512_cvtepi32_ps((__m512i)x); }
inline LeafF times_power(LeafF x, LeafF whole) { return _mm512_scalef_ps(x, whole); }  // x * 2^whole
inline LeafF select(Mask mask, LeafF a, LeafF b) { return _mm512_mask_mov_ps(b, mask, a); }
inline LeafI select(Mask mask, LeafI a, LeafI b) { return (LeafI)_mm512_mask_mov_epi32((__m512i)b, mask, (__m512i)a); }
inline Mask less(LeafF a, LeafF b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask less(LeafI a, LeafI b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
inline Mask both(Mask a, Mask b) { return a & b; }
inline float sum_of(LeafF x) { return _mm512_reduce_add_ps(x); }
inline float max_of(LeafF x) { return _mm512_reduce_max_ps(x); }

// Of each lane's four signed bytes, the first and third, and the second and fourth, as two numbers of 16 bits.
inline LeafI low_bytes(LeafI x) { return (LeafI)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8); }
inline LeafI high_bytes(LeafI x) { return (LeafI)_mm512_srai_epi16((__m512i)x, 8); }
// The bytes of `table`, the same 16 in every 16, at these places.
inline LeafI bytes_at(LeafI table, LeafI places) { return (LeafI)_mm512_shuffle_epi8((__m512i)table, (__m512i)places); }
// Two products of 16 bits in each lane, added.
inline LeafI multiply_shorts(LeafI a, LeafI b) { return (LeafI)_mm512_madd_epi16((__m512i)a, (__m512i)b); }

inline __m256i narrow(LeafF x) {  // to bf16, ties to even
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}

template <>
struct Lanes<LeafF> {
  static LeafF load(const float* p) { return _mm512_loadu_ps(p); }
  static LeafF widen(const bf16* p) {
    return (LeafF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
  }
  static LeafF same(float x) { return _mm512_set1_ps(x); }
};
template <>
struct Lanes<LeafI> {
  static LeafI load(const int32_t* p) { return (LeafI)_mm512_loadu_si512(p); }
  static LeafI widen(const uint8_t* p) { return (LeafI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
  static LeafI widen(const int8_t* p) { return (LeafI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
  static LeafI widen(const uint16_t* p) { return (LeafI)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
  static LeafI same(int32_t x) { return (LeafI)_mm512_set1_epi32(x); }
};
inline void store(float* p, LeafF x) { _mm512_storeu_ps(p, x); }
inline void store(int32_t* p, LeafI x) { _mm512_storeu_si512(p, (__m512i)x); }
inline void store(bf16* p, LeafF x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline void store_bytes(uint8_t* p, LeafI x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }
inline LeafF rounded(LeafF x) {  // to the precision of bf16
  return (LeafF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(x)), 16);
}

#else

// A mask is a vector of 0 and -1.
inline LeafF select(LeafI mask, LeafF a, LeafF b) { return (LeafF)(((LeafI)a & mask) | ((LeafI)b & ~mask)); }
inline LeafI select(LeafI mask, LeafI a, LeafI b) { return (a & mask) | (b & ~mask); }
inline LeafI less(LeafF a, LeafF b) { return (LeafI)(a < b); }
inline LeafI less(LeafI a, LeafI b) { return (LeafI)(a < b); }
inline LeafI both(LeafI a, LeafI b) { return a & b; }
inline LeafF times_power(LeafF x, LeafF whole);
inline LeafF inverse(LeafF x) { return 1.f / x; }

#if defined(__AVX2__)
inline LeafF fma(LeafF a, LeafF b, LeafF c) { return _mm256_fmadd_ps(a, b, c); }
inline LeafF fnma(LeafF a, LeafF b, LeafF c) { return _mm256_fnmadd_ps(a, b, c); }
inline LeafF max(LeafF a, LeafF b) { return _mm256_max_ps(a, b); }
inline LeafF min(LeafF a, LeafF b) { return _mm256_min_ps(a, b); }
inline LeafF nearest(LeafF x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline LeafI to_ints(LeafF x) { return (LeafI)_mm256_cvtps_epi32(x); }
inline LeafF to_floats(LeafI x) { return _mm256_cvtepi32_ps((__m256i)x); }
#elif defined(__aarch64__)
inline LeafF fma(LeafF a, LeafF b, LeafF c) { return (LeafF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline LeafF fnma(LeafF a, LeafF b, LeafF c) { return (LeafF)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline LeafF max(LeafF a, LeafF b) { return select(less(b, a), a, b); }
inline LeafF min(LeafF a, LeafF b) { return select(less(a, b), a, b); }
inline LeafF nearest(LeafF x) { return (LeafF)vrndnq_f32((float32x4_t)x); }
inline LeafI to_ints(LeafF x) { return (LeafI)vcvtnq_s32_f32((float32x4_t)x); }
inline LeafF to_floats(LeafI x) { return __builtin_convertvector(x, LeafF); }
#else
inline LeafF fma(LeafF a, LeafF b, LeafF c) { return a * b + c; }
inline LeafF fnma(LeafF a, LeafF b, LeafF c) { return c - a * b; }
inline LeafF max(LeafF a, LeafF b) { return select(less(b, a), a, b); }
inline LeafF min(LeafF a, LeafF b) { return select(less(a, b), a, b); }
inline LeafF nearest(LeafF x) {  // for x below 2^22: the fraction is lost
  const LeafF shift = LeafF{} + 12582912.f;
  return (x + shift) - shift;
}
inline LeafI to_ints(LeafF x) { return __builtin_convertvector(nearest(x), LeafI); }
inline LeafF to_floats(LeafI x) { return __builtin_convertvector(x, LeafF); }
#endif

inline LeafF times_power(LeafF x, LeafF whole) { return x * (LeafF)((to_ints(whole) + 127) << 23); }  // 2^whole: normal

typedef int16_t LeafH __attribute__((vector_size(LEAF * 4)));
inline LeafI low_bytes(LeafI x) { return (LeafI)((LeafH)((LeafH)x << 8) >> 8); }
inline LeafI high_bytes(LeafI x) { return (LeafI)((LeafH)x >> 8); }
inline LeafI bytes_at(LeafI table, LeafI places) {
#if defined(__AVX2__)
  return (LeafI)_mm256_shuffle_epi8((__m256i)table, (__m256i)places);
#elif defined(__aarch64__)
  return (LeafI)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)places);
#else
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  Bytes found;
  for (int i = 0; i < 16; i++) found[i] = ((Bytes)table)[((Bytes)places)[i]];
  return (LeafI)found;
#endif
}
inline LeafI multiply_shorts(LeafI a, LeafI b) {
#if defined(__AVX2__)
  return (LeafI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (LeafI)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

typedef uint16_t LeafS __attribute__((vector_size(LEAF * 2)));
typedef uint8_t LeafB __attribute__((vector_size(LEAF)));
typedef int8_t LeafC __attribute__((vector_size(LEAF)));

template <class V>
inline V read(const void* p) {
  V v;
  memcpy(&v, p, sizeof(v));
  return v;
}

inline LeafI rounded_bits(LeafF x) {  // bf16 in the upper half of each lane, ties to even; the lower half is undefined
  const LeafI bits = (LeafI)x, up = bits + ((logical_right(bits, 16) & 1) + 0x7fff);
  return select((LeafI)(x != x), bits | 0x400000, up);
}

template <>
struct Lanes<LeafF> {
  static LeafF load(const float* p) { return read<LeafF>(p); }
#if defined(__AVX2__)  // gcc 12 widens halves of them
  static LeafF widen(const bf16* p) {
    return (LeafF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
  }
#else
  static LeafF widen(const bf16* p) { return (LeafF)(__builtin_convertvector(read<LeafS>(p), LeafI) << 16); }
#endif
#if defined(__AVX2__)  // zero plus x would be an addition: of -0 it is not x
  static LeafF same(float x) { return _mm256_set1_ps(x); }
#else
  static LeafF same(float x) { return LeafF{x, x, x, x}; }
#endif
};
template <>
struct Lanes<LeafI> {
  static LeafI load(const int32_t* p) { return read<LeafI>(p); }
#if defined(__AVX2__)  // gcc 12 widens bytes one by one
  static LeafI widen(const uint8_t* p) { return (LeafI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
  static LeafI widen(const int8_t* p) { return (LeafI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
#else
  static LeafI widen(const uint8_t* p) { return __builtin_convertvector(read<LeafB>(p), LeafI); }
  static LeafI widen(const int8_t* p) { return __builtin_convertvector(read<LeafC>(p), LeafI); }
#endif
  static LeafI widen(const uint16_t* p) { return __builtin_convertvector(read<LeafS>(p), LeafI); }
  static LeafI same(int32_t x) { return LeafI{} + x; }
};
inline void store(float* p, LeafF x) { memcpy(p, &x, sizeof(x)); }
inline void store(int32_t* p, LeafI x) { memcpy(p, &x, sizeof(x)); }
inline void store(bf16* p, LeafF x) {
  const LeafS half = __builtin_convertvector(logical_right(rounded_bits(x), 16), LeafS);
  memcpy(p, &half, sizeof(half));
}
inline void store_bytes(uint8_t* p, LeafI x) {  // the lowest byte of each
  const LeafB low = __builtin_convertvector(x, LeafB);
  memcpy(p, &low, sizeof(low));
}
inline LeafF rounded(LeafF x) { return (LeafF)(rounded_bits(x) & (int32_t)0xffff0000); }

// Reduces halves recursively, as the AVX-512 reductions do.
inline float sum_of(LeafF x) {
#if defined(__AVX2__)
  const __m128 y = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
  return (y[0] + y[2]) + (y[1] + y[3]);
#else
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}
inline float max_of(LeafF x) {
  float most = x[0];
  for (int i = 1; i < LEAF; i++) most = most < x[i] ? x[i] : most;
  return most;
}

// -- pairs -----------------------------------------------------------------------------------------------------------

template <class V>
struct Pair {
  V lo, hi;
};

#define QUIRE_BINARY(op)                                                                                       \
  template <class V>                                                                                           \
  inline Pair<V> operator op(Pair<V> a, Pair<V> b) {                                                           \
    return {a.lo op b.lo, a.hi op b.hi};                                                                       \
  }
QUIRE_BINARY(+) QUIRE_BINARY(-) QUIRE_BINARY(*) QUIRE_BINARY(/) QUIRE_BINARY(&) QUIRE_BINARY(|) QUIRE_BINARY(^)
#undef QUIRE_BINARY
#define QUIRE_WITH_NUMBER(op)                                                                                  \
  template <class V, class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>                               \
  inline Pair<V> operator op(Pair<V> a, T b) {                                                                 \
    return {a.lo op b, a.hi op b};                                                                             \
  }
QUIRE_WITH_NUMBER(+) QUIRE_WITH_NUMBER(-) QUIRE_WITH_NUMBER(*) QUIRE_WITH_NUMBER(/) QUIRE_WITH_NUMBER(&)
QUIRE_WITH_NUMBER(|) QUIRE_WITH_NUMBER(^) QUIRE_WITH_NUMBER(<<) QUIRE_WITH_NUMBER(>>)
#undef QUIRE_WITH_NUMBER
#define QUIRE_EACH_1(name)                                                                                     \
  template <class V>                                                                                           \
  inline auto name(Pair<V> x)->Pair<decltype(name(x.lo))> {                                                    \
    return {name(x.lo), name(x.hi)};                                                                           \
  }
QUIRE_EACH_1(as_floats) QUIRE_EACH_1(as_ints) QUIRE_EACH_1(nearest) QUIRE_EACH_1(to_ints) QUIRE_EACH_1(to_floats)
QUIRE_EACH_1(rounded) QUIRE_EACH_1(inverse) QUIRE_EACH_1(low_bytes) QUIRE_EACH_1(high_bytes)
#undef QUIRE_EACH_1
#define QUIRE_EACH_2(name)                                                                                     \
  template <class V>                                                                                           \
  inline auto name(Pair<V> a, Pair<V> b)->Pair<decltype(name(a.lo, b.lo))> {                                   \
    return {name(a.lo, b.lo), name(a.hi, b.hi)};                                                               \
  }
QUIRE_EACH_2(max) QUIRE_EACH_2(min) QUIRE_EACH_2(times_power) QUIRE_EACH_2(less) QUIRE_EACH_2(both)
QUIRE_EACH_2(multiply_shorts) QUIRE_EACH_2(bytes_at) QUIRE_EACH_2(wrapping_plus) QUIRE_EACH_2(wrapping_times)
#undef QUIRE_EACH_2

template <class V>
inline Pair<V> fma(Pair<V> a, Pair<V> b, Pair<V> c) {
  return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}
template <class V>
inline Pair<V> fnma(Pair<V> a, Pair<V> b, Pair<V> c) {
  return {fnma(a.lo, b.lo, c.lo), fnma(a.hi, b.hi, c.hi)};
}
template <class M, class V>
inline Pair<V> select(Pair<M> mask, Pair<V> a, Pair<V> b) {
  return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
}
template <class V>
inline Pair<V> logical_right(Pair<V> x, int bits) {
  return {logical_right(x.lo, bits), logical_right(x.hi, bits)};
}
template <class V>
inline float sum_of(Pair<V> x) {
  return sum_of(x.hi + x.lo);
}
template <class V>
inline float max_of(Pair<V> x) {
  return max_of(max(x.lo, x.hi));
}
template <class V>
struct Lanes<Pair<V>> {
  template <class T>
  static Pair<V> load(const T* p) {
    return {Lanes<V>::load(p), Lanes<V>::load(p + sizeof(V) / 4)};
  }
  template <class T>
  static Pair<V> widen(const T* p) {
    return {Lanes<V>::widen(p), Lanes<V>::widen(p + sizeof(V) / 4)};
  }
  template <class T>
  static Pair<V> same(T x) {
    return {Lanes<V>::same(x), Lanes<V>::same(x)};
  }
};
template <class T, class V>
inline void store(T* p, Pair<V> x) {
  store(p, x.lo);
  store(p + sizeof(V) / 4, x.hi);
}
template <class V>
inline void store_bytes(uint8_t* p, Pair<V> x) {
  store_bytes(p, x.lo);
  store_bytes(p + sizeof(V) / 4, x.hi);
}

#endif

// -- sixteen lanes ---------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
using Floats = LeafF;
using Ints = LeafI;
#else
template <class V, int LANES>
struct Sixteen {
  using Type = typename Sixteen<Pair<V>, LANES * 2>::Type;
};
template <class V>
struct Sixteen<V, 16> {
  using Type = V;
};
using Floats = Sixteen<LeafF, LEAF>::Type;
using Ints = Sixteen<LeafI, LEAF>::Type;
using Mask = Ints;
#endif
static_assert(sizeof(Floats) == 64 && sizeof(Ints) == 64, "sixteen lanes");

inline Floats floats(float x) { return Lanes<Floats>::same(x); }
inline Ints ints(int32_t x) { return Lanes<Ints>::same(x); }
inline Floats load(const float* p) { return Lanes<Floats>::load(p); }
inline Ints load(const int32_t* p) { return Lanes<Ints>::load(p); }
inline Floats widen(const bf16* p) { return Lanes<Floats>::widen(p); }    // values of bf16
inline Ints widen(const uint8_t* p) { return Lanes<Ints>::widen(p); }
inline Ints widen(const int8_t* p) { return Lanes<Ints>::widen(p); }
inline Ints widen_bits(const uint16_t* p) { return Lanes<Ints>::widen(p); }  // 16 bits, zero-extended
inline Floats magnitude(Floats x) { return as_floats(as_ints(x) & 0x7fffffff); }

// The same with the lanes in the order that costs least, which is the machine's; `sum_apart` has the bits of `sum_of` in order.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline Floats widen_apart(const bf16* p) {  // even values, odd values
  const LeafI words = read<LeafI>(p);
  return {(LeafF)(words << 16), (LeafF)(words & (int32_t)0xffff0000)};
}
inline void store_apart(bf16* p, Floats x) {
  const LeafI words = logical_right(rounded_bits(x.lo), 16) | (rounded_bits(x.hi) & (int32_t)0xffff0000);
  memcpy(p, &words, sizeof(words));
}
inline float sum_apart(Floats x) {
  const auto quarter = [](LeafF y) {
    const __m128 z = _mm_add_ps(_mm256_extractf128_ps(y, 1), _mm256_castps256_ps128(y));
    return (z[0] + z[2]) + (z[1] + z[3]);
  };
  return quarter(x.lo) + quarter(x.hi);
}
#else
inline Floats widen_apart(const bf16* p) { return widen(p); }
inline void store_apart(bf16* p, Floats x) { store(p, x); }
inline float sum_apart(Floats x) { return sum_of(x); }
#endif

// Lanes [from, to); either may be outside of 0..16.
inline Mask span(long from, long to) {
#if defined(__AVX512F__)
  const auto below = [](long n) { return n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1; };
  return (Mask)(below(to) & ~below(from));
#else
  alignas(64) static const int32_t places[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto near = [](long n) { return ints((int32_t)(n > 16 ? 16 : n < -1 ? -1 : n)); };
  return both(less(near(from - 1), load(places)), less(load(places), near(to)));
#endif
}
inline bool any(Mask mask) {
#if defined(__AVX512F__)
  return mask != 0;
#else
  return max_of(select(mask, floats(1.f), floats(0.f))) > 0.f;
#endif
}
inline Floats keep(Mask mask, Floats x) { return select(mask, x, floats(0.f)); }  // else 0

// 32 values to bf16.
inline void store(bf16* p, Floats left, Floats right) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(right, left));
#else
  store(p, left);
  store(p + 16, right);
#endif
}

// The same with a non-temporal store: the line is neither read first nor kept in the cache.
inline void stream(bf16* p, const Floats& left, const Floats& right) {
#if defined(__AVX512BF16__)
  _mm512_stream_si512((__m512i*)p, (__m512i)_mm512_cvtne2ps_pbh(right, left));
#else
  store(p, left, right);
#endif
}
inline void stream(bf16* p, const bf16* left, const Floats& right) {  // the left half is already bf16
#if defined(__AVX512F__)
  const __m256i half = _mm256_load_si256((const __m256i*)left);
  _mm512_stream_si512((__m512i*)p, _mm512_inserti64x4(_mm512_castsi256_si512(half), narrow(right), 1));
#else
  memcpy(p, left, 32);
  store(p + 16, right);
#endif
}

inline void end_streams() {  // a fence: other cores see the stores
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

// Prefetches a line into the L2 cache.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace quire

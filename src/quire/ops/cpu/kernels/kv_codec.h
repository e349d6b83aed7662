// The element formats of a KV cache: bf16, or a code of 8 bits with a scale. The same codes as attention/kv_quantization.py.
//
//   value(p)   16 of them as floats, without the scale
//   code(x)    16 floats, already divided by the scale -> 16 codes, in the lowest byte of each lane
#pragma once
#include "common.h"

namespace quire {

enum Kind { KV_BF16, KV_INT8, KV_E4M3, KV_E5M2, KV_INT8_SPLIT };  // attention/cpu.py has the same list, except KV_INT8_SPLIT: int8 by attention_int8_split.h

struct Int8Code {
  static constexpr float TOP = 127.f;
  static constexpr bool HADAMARD = true;  // of keys, and of the queries that are multiplied by them
  static Floats value(const uint8_t* p) { return to_floats(widen((const int8_t*)p)); }
  static Ints code(Floats x) { return to_ints(x); }
};

// A sign, an exponent with this bias, MANTISSA bits. Below the least exponent the steps stay the same size (subnormal).
template <int MANTISSA, int BIAS>
struct SmallFloat {
  static constexpr float TOP = MANTISSA == 3 ? 448.f : 57344.f;
  static constexpr bool HADAMARD = false;
  static constexpr int SHIFT = 23 - MANTISSA, OFFSET = 127 - BIAS;
  static constexpr float LEAST = MANTISSA == 3 ? 0x1p-6f : 0x1p-14f;  // 2^(1 - BIAS)

  static Floats value(const uint8_t* p) {
    const Ints bits = widen(p), low = bits & 0x7f, sign = (bits & 0x80) << 24;
    const Floats usual = as_floats((low << SHIFT) + ints(OFFSET << 23));
    const Floats small = as_floats((low << SHIFT) + ints((OFFSET + 1) << 23)) - floats(LEAST);
    return as_floats(as_ints(select(less(low, ints(1 << MANTISSA)), small, usual)) | sign);
  }
  static Ints code(Floats x) {  // ties to even
    const Floats size = magnitude(x);
    const Ints bits = as_ints(size), odd = logical_right(bits, SHIFT) & 1;
    const Ints usual = logical_right(bits + odd + ints((1 << (SHIFT - 1)) - 1), SHIFT) - ints(OFFSET << MANTISSA);
    const Ints small = to_ints(size * floats((1 << MANTISSA) / LEAST));
    const Ints sign = logical_right(as_ints(x), 24) & 0x80;
    return select(less(size, floats(LEAST)), small, usual) | sign;
  }
};
using E4M3Code = SmallFloat<3, 7>;
using E5M2Code = SmallFloat<2, 15>;

// 32 codes -> bf16, which holds each exactly.
template <class C>
inline void widen_32(C, const uint8_t* from, bf16* to) {
  store(to, C::value(from), C::value(from + 16));
}
#if defined(__AVX512BW__)
// An fp8 number is a bf16 with a shifted exponent; subnormal numbers come from a table.
template <int MANTISSA, int BIAS>
inline void widen_32(SmallFloat<MANTISSA, BIAS>, const uint8_t* from, bf16* to) {
  alignas(64) static const bf16 table[2][32] = {
      {0, 0x3780, 0x3800, 0x3840},                                         // 0 .. 3 times 2^-16
      {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60},         // 0 .. 7 times 2^-9
  };
  const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
  const __m512i low = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
  const __m512i usual = _mm512_add_epi16(_mm512_slli_epi16(low, 7 - MANTISSA), _mm512_set1_epi16((127 - BIAS) << 7));
  const __m512i small = _mm512_permutexvar_epi16(low, _mm512_load_si512(table[MANTISSA - 2]));
  const __mmask32 is_small = _mm512_cmplt_epi16_mask(low, _mm512_set1_epi16(1 << MANTISSA));
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_mask_mov_epi16(usual, is_small, small), sign));
}
#endif

// Calls f(code of the kind); does not call it for KV_BF16 and KV_INT8_SPLIT.
template <class F>
inline void with_code(long kind, const F& f) {
  if (kind == KV_INT8) f(Int8Code{});
  if (kind == KV_E4M3) f(E4M3Code{});
  if (kind == KV_E5M2) f(E5M2Code{});
}

// The Hadamard transform of each run of the largest power of two that divides D: pairs 1 apart become sum and difference, then pairs
// 2 apart, 4 ... D is a multiple of 16.
inline void hadamard(float* x, long D) {
  for (long d = 0; d < D; d += 16) {
    Floats v = load(x + d);
    v = sums_and_differences<1>(v);
    v = sums_and_differences<2>(v);
    v = sums_and_differences<4>(v);
    v = sums_and_differences<8>(v);
    store(x + d, v);
  }
  for (long apart = 16; apart < (D & -D); apart *= 2)
    for (long d = 0; d < D; d += 2 * apart)
      for (long i = d; i < d + apart; i += 16) {
        const Floats low = load(x + i), high = load(x + i + apart);
        store(x + i, low + high);
        store(x + i + apart, low - high);
      }
}

}  // namespace quire

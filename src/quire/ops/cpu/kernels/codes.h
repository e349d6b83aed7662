// What a KV cache keeps of a number: bf16, or a code of 8 bits beside a scale. The same codes as attention/codes.py.
//
//   value(p)   16 of them as floats, without the scale
//   code(x)    16 floats, already divided by the scale -> 16 codes, in the lowest byte of each lane
#pragma once
#include "common.h"

namespace quire {

enum Kind { SHORT, INT8, E4M3, E5M2 };  // attention/cpu.py has the same list

struct Int8Code {
  static constexpr float TOP = 127.f;
  static constexpr bool TURNED = true;  // keys, and the queries that meet them
  static Floats value(const uint8_t* p) { return to_floats(widen((const int8_t*)p)); }
  static Ints code(Floats x) { return to_ints(x); }
};

// A sign, an exponent with this bias, MANTISSA bits. Below the least exponent the steps stay the same size.
template <int MANTISSA, int BIAS>
struct SmallFloat {
  static constexpr float TOP = MANTISSA == 3 ? 448.f : 57344.f;
  static constexpr bool TURNED = false;
  static constexpr int SHIFT = 23 - MANTISSA, OFFSET = 127 - BIAS;
  static constexpr float LEAST = MANTISSA == 3 ? 0x1p-6f : 0x1p-14f;  // 2^(1 - BIAS)

  static Floats value(const uint8_t* p) {
    const Ints bits = widen(p), low = bits & 0x7f, sign = (bits & 0x80) << 24;
    const Floats usual = as_floats((low << SHIFT) + ints(OFFSET << 23));
    const Floats small = as_floats((low << SHIFT) + ints((OFFSET + 1) << 23)) - floats(LEAST);
    return as_floats(as_ints(select(less(low, ints(1 << MANTISSA)), small, usual)) | sign);
  }
  static Ints code(Floats x) {  // halves to even
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

// Calls f(code of the kind); of SHORT, f is not called.
template <class F>
inline void with_code(long kind, const F& f) {
  if (kind == INT8) f(Int8Code{});
  if (kind == E4M3) f(E4M3Code{});
  if (kind == E5M2) f(E5M2Code{});
}

// Each run of the largest power of two that divides D, times a Hadamard matrix: pairs 1 apart become sum and difference,
// then pairs 2 apart, 4 ... D is a multiple of 16.
inline void turn(float* x, long D) {
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

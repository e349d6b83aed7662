// Exact dot products of a line of weights, 16 outputs with four inputs each, with four signed bytes of activations, for every machine.
// Only this file, gemm_kernel.h, int4_dot.h and simd.h use instructions of one machine.
//
// SAME_PRODUCTS: the bits of the weights whose products are computed in the same way, so that the code for them is compiled once.
//
// A group's sum is exact, in whatever order it is added. Products of weights of up to 6 bits, which are not negative, are added as 16
// bits for as many lines as fit: `partial`. `total_of` makes 32 bits of them, `times_factor` the same times the group's factor.
#pragma once
#include "common.h"

namespace quire {

#if defined(__AVX512VNNI__)

constexpr bool BYTES_ARE_MOVED = true;  // weights of 8 bits are stored signed; the instruction takes 0 to 255, which is 128 more
constexpr int BLOCK_ROWS = 12, BLOCK_PARTS = 2, LINES_UNROLLED = 8;
template <int BITS>
constexpr int LINES_AT_ONCE = 8;
template <int BITS>
constexpr int SAME_PRODUCTS = 8;
template <int BITS>
inline Ints add_dots(Ints partial, Ints w, Ints x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)partial, (__m512i)w, (__m512i)x);
}
template <int BITS>
inline Ints total_of(Ints partial) {
  return partial;
}
constexpr int MOST_BITS_OF_SHORTS = 0;
inline Ints add_short_dots(Ints sums, Ints w, Ints x) { return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)w, (__m512i)x); }

#else

constexpr bool BYTES_ARE_MOVED = false;

inline Ints add_short_dots(Ints sums, Ints w, Ints x) { return sums + multiply_shorts(w, x); }  // of two numbers of 16 bits each

inline Ints dots_of_shorts(Ints sums, Ints w, Ints x) {
  return sums + multiply_shorts(low_bytes(x), low_bytes(w)) + multiply_shorts(high_bytes(x), high_bytes(w));
}

#if defined(__AVX2__)

#if defined(__AVX512BW__)
constexpr int BLOCK_ROWS = 10, BLOCK_PARTS = 2, LINES_UNROLLED = 8;
inline LeafI pair_dots(LeafI w, LeafI x) { return (LeafI)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
inline LeafI add_shorts(LeafI a, LeafI b) { return (LeafI)_mm512_add_epi16((__m512i)a, (__m512i)b); }
inline Ints dots_of_bytes(Ints sums, Ints w, Ints x) { return dots_of_shorts(sums, w, x); }
#else
constexpr int BLOCK_ROWS = 4, BLOCK_PARTS = 1, LINES_UNROLLED = 2;  // all 8 unrolled: gcc keeps half of the sums in memory
inline LeafI pair_dots(LeafI w, LeafI x) { return (LeafI)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
inline LeafI add_shorts(LeafI a, LeafI b) { return (LeafI)_mm256_add_epi16((__m256i)a, (__m256i)b); }
inline Ints pair_dots(Ints w, Ints x) { return {pair_dots(w.lo, x.lo), pair_dots(w.hi, x.hi)}; }
inline Ints add_shorts(Ints a, Ints b) { return {add_shorts(a.lo, b.lo), add_shorts(a.hi, b.hi)}; }
// Signed bytes: |w| times x with the sign of w.
inline LeafI dots_of_bytes(LeafI sums, LeafI w, LeafI x) {
  const LeafI size = (LeafI)_mm256_abs_epi8((__m256i)w), with_sign = (LeafI)_mm256_sign_epi8((__m256i)x, (__m256i)w);
  return sums + multiply_shorts(pair_dots(size, with_sign), LeafI{} + 0x00010001);
}
inline Ints dots_of_bytes(Ints sums, Ints w, Ints x) { return {dots_of_bytes(sums.lo, w.lo, x.lo), dots_of_bytes(sums.hi, w.hi, x.hi)}; }
#endif

// The most lines whose products fit 16 bits: two products of at most 15, 31 or 63 with 127 each.
template <int BITS>
constexpr int LINES_AT_ONCE = BITS == 4 || BITS == 8 ? 8 : BITS == 5 ? 4 : 2;
template <int BITS>
constexpr int SAME_PRODUCTS = BITS;
template <int BITS>
inline Ints add_dots(Ints partial, Ints w, Ints x) {
  if constexpr (BITS == 8) return dots_of_bytes(partial, w, x);
  return add_shorts(partial, pair_dots(w, x));
}
template <int BITS>
inline Ints total_of(Ints partial) {
  return BITS == 8 ? partial : multiply_shorts(partial, ints(0x00010001));
}
constexpr int MOST_BITS_OF_SHORTS = 6;  // of weights whose products are added as 16 bits

#else

constexpr int BLOCK_ROWS = 2, BLOCK_PARTS = 1, LINES_UNROLLED = 2;
template <int BITS>
constexpr int LINES_AT_ONCE = 8;
template <int BITS>
constexpr int SAME_PRODUCTS = 8;
template <int BITS>
inline Ints add_dots(Ints partial, Ints w, Ints x) {
  return dots_of_shorts(partial, w, x);
}
template <int BITS>
inline Ints total_of(Ints partial) {
  return partial;
}
constexpr int MOST_BITS_OF_SHORTS = 0;

#endif

#endif

// A group's factor as times_factor takes it: 32 bits, or twice 16, which `total_of` multiplies by in place of 1.
template <int BITS>
inline Ints factor_of(Ints factor) {
  return BITS <= MOST_BITS_OF_SHORTS ? (factor & 0xffff) | (factor << 16) : factor;
}
template <int BITS>
inline Ints times_factor(Ints partial, Ints factor) {
  return BITS <= MOST_BITS_OF_SHORTS ? multiply_shorts(partial, factor) : wrapping_times(total_of<BITS>(partial), factor);
}

#ifdef QUIRE_AMX
inline Ints multiply_low(Ints a, Ints b) { return (Ints)_mm512_mullo_epi16((__m512i)a, (__m512i)b); }  // each 16 bits
inline Ints right_of_shorts(Ints a, int bits) { return (Ints)_mm512_srai_epi16((__m512i)a, (unsigned)bits); }
#endif

}  // namespace quire

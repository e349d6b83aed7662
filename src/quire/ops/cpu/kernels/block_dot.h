// Exact dot products of a line of weights, 16 outputs with four inputs each, with four signed bytes of activations, for every machine.
// Only this file, gemm_kernel.h, int4_dot.h and simd.h use instructions of one machine.
//
// Weights of up to 6 bits are not negative, so that two products of bytes fit 16 bits, and those of several lines may be added there.
#pragma once
#include "common.h"

namespace quire {

#if defined(__AVX512VNNI__)

constexpr bool BYTES_ARE_MOVED = true;  // weights of 8 bits are stored signed; the instruction takes 0 to 255, which is 128 more
constexpr int BLOCK_ROWS = 12, BLOCK_PARTS = 2;
template <int BITS>
constexpr int LINES_AT_ONCE = 1;
template <int BITS>
inline Ints add_dots(Ints sums, const Ints* w, const int32_t* x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w[0], (__m512i)ints(x[0]));
}

#else

constexpr bool BYTES_ARE_MOVED = false;
#if defined(__AVX512BW__)
constexpr int BLOCK_ROWS = 10, BLOCK_PARTS = 2;
inline LeafI pair_dots(LeafI w, LeafI x) { return (LeafI)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
inline LeafI add_shorts(LeafI a, LeafI b) { return (LeafI)_mm512_add_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
constexpr int BLOCK_ROWS = 4, BLOCK_PARTS = 1;
inline LeafI pair_dots(LeafI w, LeafI x) { return (LeafI)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
inline LeafI add_shorts(LeafI a, LeafI b) { return (LeafI)_mm256_add_epi16((__m256i)a, (__m256i)b); }
inline LeafI size_of_bytes(LeafI w) { return (LeafI)_mm256_abs_epi8((__m256i)w); }
inline LeafI with_sign(LeafI x, LeafI w) { return (LeafI)_mm256_sign_epi8((__m256i)x, (__m256i)w); }
#else
constexpr int BLOCK_ROWS = 2, BLOCK_PARTS = 1;
#endif

inline Ints dots_of_shorts(Ints sums, Ints w, Ints x) {
  return sums + multiply_shorts(low_bytes(x), low_bytes(w)) + multiply_shorts(high_bytes(x), high_bytes(w));
}

#if defined(__AVX2__)

inline LeafI ones(LeafI) { return LeafI{} + 0x00010001; }
inline LeafI dots_of_lines(LeafI sums, const LeafI* w, const LeafI* x, int lines) {
  LeafI pairs = pair_dots(w[0], x[0]);
#pragma GCC unroll 4
  for (int i = 1; i < lines; i++) pairs = add_shorts(pairs, pair_dots(w[i], x[i]));
  return sums + multiply_shorts(pairs, ones(sums));
}
#if !defined(__AVX512F__)
template <class V>
inline Pair<V> dots_of_lines(Pair<V> sums, const Pair<V>* w, const Pair<V>* x, int lines) {
  V low[4], high[4], from_low[4], from_high[4];
#pragma GCC unroll 4
  for (int i = 0; i < lines; i++) low[i] = w[i].lo, high[i] = w[i].hi, from_low[i] = x[i].lo, from_high[i] = x[i].hi;
  return {dots_of_lines(sums.lo, low, from_low, lines), dots_of_lines(sums.hi, high, from_high, lines)};
}
#endif

// Signed bytes: |w| times x with the sign of w.
#if defined(__AVX512F__)
inline Ints dots_of_bytes(Ints sums, Ints w, Ints x) { return dots_of_shorts(sums, w, x); }
#else
inline LeafI dots_of_bytes(LeafI sums, LeafI w, LeafI x) {
  return sums + multiply_shorts(pair_dots(size_of_bytes(w), with_sign(x, w)), ones(sums));
}
inline Ints dots_of_bytes(Ints sums, Ints w, Ints x) { return {dots_of_bytes(sums.lo, w.lo, x.lo), dots_of_bytes(sums.hi, w.hi, x.hi)}; }
#endif

// 4 bits: up to 4 lines of 2 * 15 * 127; 6 bits: 2 lines of 2 * 63 * 127.
template <int BITS>
constexpr int LINES_AT_ONCE = BITS == 4 ? 4 : BITS == 8 ? 1 : 2;
template <int BITS>
inline Ints add_dots(Ints sums, const Ints* w, const int32_t* x) {
  constexpr int LINES = LINES_AT_ONCE<BITS>;
  if constexpr (BITS == 8) return dots_of_bytes(sums, w[0], ints(x[0]));
  Ints same[LINES];
#pragma GCC unroll 4
  for (int i = 0; i < LINES; i++) same[i] = ints(x[i]);
  return dots_of_lines(sums, w, same, LINES);
}

#else

template <int BITS>
constexpr int LINES_AT_ONCE = 1;
template <int BITS>
inline Ints add_dots(Ints sums, const Ints* w, const int32_t* x) {
  return dots_of_shorts(sums, w[0], ints(x[0]));
}

#endif

#endif

}  // namespace quire

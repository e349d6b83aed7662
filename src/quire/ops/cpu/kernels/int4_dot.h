// Exact dot products of int4 weights with int8 activations, for every machine. Only this file, gemm_kernel.h and simd.h
// use instructions of one machine.
//
// A line is 64 bytes: for each of 16 outputs four inputs, in the low half of each byte; the high halves are the same inputs of
// 16 further outputs. `part_of(line, 0)` and `(line, 1)` are the two: the nibbles, or with a table (CODED) what it has for them.
// Activations are words of four inputs, as `Word`.
#pragma once
#include <climits>

#include "amx.h"
#include "common.h"

namespace quire {

#if defined(__AVX512F__)
constexpr int NIBBLE_ROWS = 12, NIBBLE_SUMS = 24;
#elif defined(__aarch64__)
constexpr int NIBBLE_ROWS = 6, NIBBLE_SUMS = 24;
#elif defined(__AVX2__)
constexpr int NIBBLE_ROWS = 4, NIBBLE_SUMS = 8;
#else
constexpr int NIBBLE_ROWS = 2, NIBBLE_SUMS = 8;
#endif

struct Shorts {  // two each: the first and third of four inputs, the second and fourth
  int32_t even, odd;
};
inline Shorts shorts_of(const int8_t* x) {
  const auto pair = [](int a, int b) { return (int32_t)(((uint32_t)b << 16) | ((uint32_t)a & 0xffff)); };
  return {pair(x[0], x[2]), pair(x[1], x[3])};
}

inline Ints nibbles_of(Ints line, int part) { return (part ? logical_right(line, 4) : line) & 0x0f0f0f0f; }

// Products are added to `partial` for up to LINES lines; then total_of makes sums of them.
#if defined(__AVX512VNNI__)

template <bool CODED>
struct NibbleDots {
  using Word = int32_t;  // four signed bytes
  using Part = Ints;
  static constexpr long LINES = LONG_MAX;
  static Part part_of(Ints line, int part, Ints table = Ints{}) {
    const Ints nibbles = nibbles_of(line, part);
    return CODED ? bytes_at(table, nibbles) : nibbles;
  }
  static Ints add(Ints partial, Part w, Word x) { return (Ints)_mm512_dpbusd_epi32((__m512i)partial, (__m512i)w, (__m512i)ints(x)); }
  static Ints total_of(Ints partial) { return partial; }
};

#else


template <bool CODED>
struct NibbleDots {
  using Word = Shorts;
  struct Part {
    Ints even, odd;
  };
  static constexpr long LINES = LONG_MAX;
  static Part part_of(Ints line, int part, Ints table = Ints{}) {
    if (CODED) {
      const Ints found = bytes_at(table, nibbles_of(line, part));
      return {found & 0x00ff00ff, logical_right(found, 8) & 0x00ff00ff};
    }
    return {logical_right(line, part * 4) & 0x000f000f, logical_right(line, part * 4 + 8) & 0x000f000f};
  }
  static Ints add(Ints partial, const Part& w, Word x) {
    return partial + multiply_shorts(ints(x.even), w.even) + multiply_shorts(ints(x.odd), w.odd);
  }
  static Ints total_of(Ints partial) { return partial; }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// The sum of eight products of a nibble, at most 15, and a byte fits 16 bits. Half as many instructions as with shorts.
template <>
struct NibbleDots<false> {
  using Word = int32_t;
  using Part = Ints;
  static constexpr long LINES = 8;
  static Part part_of(Ints line, int part, Ints = Ints{}) { return nibbles_of(line, part); }
  static LeafI add(LeafI partial, LeafI w, LeafI x) {
    return (LeafI)_mm256_add_epi16((__m256i)partial, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
  }
  static Ints add(Ints partial, Part w, Word x) { return {add(partial.lo, w.lo, ints(x).lo), add(partial.hi, w.hi, ints(x).hi)}; }
  static Ints total_of(Ints partial) { return multiply_shorts(partial, ints(0x00010001)); }
};
#endif

#endif

#ifdef QUIRE_AMX

inline Ints bytes_minus(Ints a, Ints b) { return (Ints)_mm512_sub_epi8((__m512i)a, (__m512i)b); }

// Tiles 0 and 1 hold sums of `upper` rows, 2 and 3 of `lower` ones, 4 and 5 these rows of x, 6 and 7 outputs, all signed; `deep`
// inputs at a time, 32 or 64.
inline void configure_nibbles(int deep, int upper = 16, int lower = 16) {
  const int rows[8] = {upper, upper, lower, lower, upper, lower, deep / 4, deep / 4};
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = (uint16_t)(i == 4 || i == 5 ? deep : 64);
    config.rows[i] = (uint8_t)rows[i];
  }
  load_config(config);
}

// Sums of up to 16 rows, or of up to 32 with LOWER, and 32 outputs stay in tiles over the inputs; x: x_row bytes from row to row;
// left, right: [deep / 4][64] of 16 outputs each.
template <bool LOWER>
inline void begin_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if (!LOWER) return;
  _tile_zero(2);
  _tile_zero(3);
}
template <bool LOWER>
inline void multiply_few(const int8_t* x, long x_row, const int8_t* left, const int8_t* right) {
  written();
  _tile_loadd(4, x, x_row);
  _tile_loadd(6, left, 64);
  _tile_loadd(7, right, 64);
  _tile_dpbssd(0, 4, 6);
  _tile_dpbssd(1, 4, 7);
  if (!LOWER) return;
  _tile_loadd(5, x + 16 * x_row, x_row);
  _tile_dpbssd(2, 5, 6);
  _tile_dpbssd(3, 5, 7);
}
template <bool LOWER>
inline void end_sums(int32_t* sums) {  // [rows][32]
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (!LOWER) return;
  _tile_stored(2, sums + 16 * 32, 128);
  _tile_stored(3, sums + 16 * 32 + 16, 128);
}

// sums[32][32] of 32 rows and 32 outputs. x: [times][2][16][deep]; w: [times][2][deep / 4][64].
inline void multiply_tiles(const int8_t* x, const int8_t* w, long times, int deep, int32_t* sums) {
  begin_sums<true>();
  for (long i = 0; i < times; i++, x += 32 * deep, w += 32 * deep) multiply_few<true>(x, deep, w, w + 16 * deep);
  end_sums<true>(sums);
}

inline void end_tiles() { _tile_release(); }

#endif

}  // namespace quire

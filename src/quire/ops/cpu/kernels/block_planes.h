// Blocks of GGUF files with integer factors by AMX: 16 rows by 32 outputs, 256 inputs at a time.
//
// A weight times the factor of its group is an integer of up to 13 bits, so it is stored as two bytes in two planes, of which tiles sum all
// 256 inputs exactly: the same integers as in registers, followed by the same float instructions, of the tile before, while tiles multiply.
#pragma once
#include "block_rows.h"

namespace quire {

namespace {

#ifdef QUIRE_AMX

constexpr long PLANE = 256 * 32;  // bytes, [4][2][16][64]: 64 inputs, of them 16 outputs, 4 inputs
constexpr int STEPS = 4;

// Factors of 6 bits and weights of up to 5 are split without a carry between bytes: a weight times the upper and the lower three bits.
template <class F>
constexpr bool SPLIT_FACTORS = F::MINIMA && F::STORED <= 5;
template <class F>
constexpr int LOW_BITS = SPLIT_FACTORS<F> ? 3 : 7;

template <class F>
inline void unpack_planes(const uint8_t* w, const Scales<F>& scales, uint8_t* planes) {
  constexpr int LINES = F::GROUP / 4;
  for (int c = 0; c < F::CHUNKS; c++, w += F::CHUNK) {
    fetch_ahead(w, F::CHUNK);
    for (int half = 0; half < 32 / F::GROUP; half++)
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const Ints factor = load(scales.factor + (c * (32 / F::GROUP) + half) * 32 + part * 16);
        const Ints upper = in_one_word(factor >> 3, factor >> 3), lower = in_one_word(factor & 7, factor & 7), both = in_one_word(factor, factor);
        uint8_t* to = planes + (c / 2 * 2 + part) * 1024 + c % 2 * 512 + half * 256;
#pragma GCC unroll 8
        for (int i = 0; i < LINES; i++, to += 64) {
          const Ints line = line_of<F>(w, half * LINES + i, part, false, scales.table);
          Ints high, low;
          if constexpr (SPLIT_FACTORS<F>) {
            high = multiply_low(line, upper), low = multiply_low(line, lower);
          } else {
            const Ints moved = F::zero(false) ? bytes_minus(line, ints(F::zero(false) * 0x01010101)) : line;
            const Ints even = multiply_low(low_bytes(moved), both), odd = multiply_low(high_bytes(moved), both);
            high = (right_of_shorts(even, 7) & 0x00ff00ff) | ((right_of_shorts(odd, 7) << 8) & (int32_t)0xff00ff00);
            low = (even & 0x007f007f) | ((odd & 0x007f007f) << 8);
          }
          store((int32_t*)to, high), store((int32_t*)(to + PLANE), low);
        }
      }
  }
}

// The sums of a block of rows, [2 planes][2][16][16], that become totals a few at a time beside the tiles of the next.
template <class F>
struct BesidePlanes {
  const Lines& w;
  const CoarseActivations& x;
  const int32_t* sums = nullptr;
  long block = 0, row = 0, rows = 0, next = 0;
  float* total = nullptr;

  void begin(const int32_t* of, long at_block, long first, long count, float* to) {
    sums = of, block = at_block, row = first, rows = count, next = 0, total = to;
  }
  void some(long count) {
    for (const long end = std::min(next + count, rows); next < end; next++) {
      const int16_t* x_sum = sums_of<F>(x, block, row + next);
      const float x_scale = x.scale[block * x.stride + row + next];
#pragma GCC unroll 2
      for (int t = 0; t < 2; t++) {
        const int32_t* at = sums + t * 256 + next * 16;
        const Ints exact = (load(at) << LOW_BITS<F>) + load(at + 512);
        const Floats scale = load(w.scale + t * 16), minimum = F::MINIMA ? load(w.minimum + t * 16) : scale;
        add_block<F>(exact, scale, minimum, w.least_pairs + t * 16, x_sum, x_scale, total + next * 32 + t * 16);
      }
    }
  }
};

#define MEET(sums, left, right)         \
  if constexpr (SPLIT_FACTORS<F>)       \
    _tile_dpbsud(sums, left, right);    \
  else                                  \
    _tile_dpbssd(sums, left, right)

// x: [4][16][64].
template <class F>
inline void multiply_planes(const int8_t* x, const uint8_t* planes, int32_t* sums, BesidePlanes<F>& overlap) {
  written();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
#pragma GCC unroll 4
  for (int k = 0; k < STEPS; k++, x += 1024, planes += 2048) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, planes, 64);
    MEET(0, 4, 6);
    _tile_loadd(7, planes + 1024, 64);
    overlap.some(2);
    MEET(1, 4, 7);
    _tile_loadd(6, planes + PLANE, 64);
    MEET(2, 4, 6);
    _tile_loadd(7, planes + PLANE + 1024, 64);
    overlap.some(2);
    MEET(3, 4, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}
#undef MEET

// total[rows][32] of rows from `first` on, a multiple of 16, and a panel.
template <class F>
void panel_by_tiles(long form, const CoarseActivations& x, const uint8_t* w, long first, long rows, float* total) {
  alignas(64) uint8_t planes[2 * PLANE];
  alignas(64) int32_t sums[2][1024];
  Scales<F> scales(form);
  const Lines lines = lines_of(scales, planes, false);
  BesidePlanes<F> overlap{lines, x};
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = 64;
    config.rows[i] = (uint8_t)(i < 6 ? std::min(16L, rows) : 16);
  }
  load_config(config);
  memset(total, 0, rows * 32 * sizeof(float));
  for (long k = 0; k < x.ins; k += 256, w += F::RECORD) {
    fetch_ahead(w, F::HEADER);
    unpack_scales(w, scales);
    unpack_planes(w + F::HEADER, scales, planes);
    int turn = 0;
    for (long m = 0; m < rows; m += 16, turn ^= 1) {
      multiply_planes<F>(x.bytes + (first + m) * x.ins + k * 16, planes, sums[turn], overlap);
      overlap.some(16);
      overlap.begin(sums[turn], k / 256, first + m, std::min(16L, rows - m), total + m * 32);
    }
    overlap.some(16);
  }
  _tile_release();
}

#endif

}  // namespace

}  // namespace quire

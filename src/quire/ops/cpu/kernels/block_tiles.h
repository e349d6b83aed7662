// Blocks of GGUF files with a scale for each 32 inputs by AMX: 16 rows by 16 outputs, whose totals stay in registers over the groups.
//
// A tile sums one group. Its sums are added to the totals while later tiles multiply: the same integers as in
// registers, followed by the same float instructions.
#pragma once
#include "block_activations.h"

namespace quire {

namespace {

constexpr long TILE_BYTES = 512;  // of 16 rows and 32 inputs

#ifdef QUIRE_AMX

#define SUMS_OF(sums, left, right)           \
  _tile_zero(sums);                          \
  _tile_loadd(left, x, 32);                  \
  _tile_loadd(right, w, 64);                 \
  _tile_dpbssd(sums, left, right);           \
  _tile_stored(sums, to, 64)
template <int TURN>
inline void sums_of_group(const int8_t* x, const uint8_t* w, int32_t* to) {
  if constexpr (TURN == 0) {
    SUMS_OF(0, 4, 6);
  } else {
    SUMS_OF(1, 5, 7);
  }
}
#undef SUMS_OF

// N rows from `row` on by 16 outputs (`part` of a panel) and inputs [first, first + ins); total: [N][32]. F: Products of the form.
template <class F, int N>
__attribute__((noinline)) void tile_of_rows(const FineActivations& x, const Lines& record, long first, long ins, long row, int part,
                                            float* total) {
  const long stride = x.stride, groups = ins / 32;
  const int8_t* rows = x.bytes + row * x.ins + first * 16;
  const float *x_scale = x.scale + first / 32 * stride + row, *x_sum = x.sum + first / 32 * stride + row;
  const uint8_t* w = record.bytes + part * 512;
  const float *scale = record.scale + part * 16, *minimum = record.minimum + part * 16;
  alignas(64) int32_t sums[4][16 * 16];
  Floats kept[N];
  const auto multiply = [&](long g, auto turn) __attribute__((always_inline)) {
    if (g < groups) sums_of_group<turn % 2>(rows + g * TILE_BYTES, w + g * 1024, sums[turn]);
  };
  const auto add = [&](long g, auto turn) __attribute__((always_inline)) {
    if (g >= groups) return;
    const Floats scales = load(scale + g * 32), minima = F::MINIMA ? load(minimum + g * 32) : scales;
    const float* of_rows = x_scale + g * stride;
    alignas(64) float least[16];
    if (F::MINIMA) store(least, load(of_rows) * load(x_sum + g * stride));
#pragma GCC unroll 16
    for (int m = 0; m < N; m++) {
      const Floats more = fma(to_floats(load(sums[turn] + m * 16)), scales * floats(of_rows[m]), kept[m]);
      kept[m] = F::MINIMA ? fnma(minima, floats(least[m]), more) : more;
    }
  };
#pragma GCC unroll 16
  for (int m = 0; m < N; m++) kept[m] = first ? load(total + part * 16 + m * 32) : floats(0.f);
  written();
  using std::integral_constant;
  multiply(0, integral_constant<int, 0>{});
  multiply(1, integral_constant<int, 1>{});
  for (long g = 0; g < groups; g += 4) {  // tiles multiply two groups ahead of the additions
    multiply(g + 2, integral_constant<int, 2>{});
    add(g, integral_constant<int, 0>{});
    multiply(g + 3, integral_constant<int, 3>{});
    add(g + 1, integral_constant<int, 1>{});
    multiply(g + 4, integral_constant<int, 0>{});
    add(g + 2, integral_constant<int, 2>{});
    multiply(g + 5, integral_constant<int, 1>{});
    add(g + 3, integral_constant<int, 3>{});
  }
#pragma GCC unroll 16
  for (int m = 0; m < N; m++) store(total + part * 16 + m * 32, kept[m]);
}

// total[rows][32] of rows from `first` on, a multiple of 16, and a panel; memory for up to 3 rows more.
template <class F>
void panel_by_tiles(long form, const FineActivations& x, const uint8_t* w, long first, long rows, float* total) {
  constexpr int INPUTS = 256;
  Record<F, INPUTS> record(form);
  const Lines lines = lines_of(record, record.bytes, false);
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 32 : 64);
    config.rows[i] = (uint8_t)(i < 6 ? std::min(16L, padded(rows)) : 8);
  }
  load_config(config);
  for (long k = 0; k < x.ins; k += INPUTS) {
    const long ins = std::min<long>(INPUTS, x.ins - k);
    for (long i = 0; i < ins; i += 32, w += F::RECORD) {
      fetch_ahead(w, F::HEADER);
      unpack_scales(w, record, i / 32);
      unpack<F::zero(false)>(w + F::HEADER, record, false, i);
    }
    for (long m = 0; m < rows; m += 16)
      for (int part = 0; part < 2; part++) {
        const auto run = [&](auto n) { tile_of_rows<Products<F>, decltype(n)::value>(x, lines, k, ins, first + m, part, total + m * 32); };
        switch (std::min(16L, padded(rows - m))) {
          case 4: run(std::integral_constant<int, 4>{}); break;
          case 8: run(std::integral_constant<int, 8>{}); break;
          case 12: run(std::integral_constant<int, 12>{}); break;
          default: run(std::integral_constant<int, 16>{});
        }
      }
  }
  _tile_release();
}

#endif

}  // namespace

}  // namespace quire

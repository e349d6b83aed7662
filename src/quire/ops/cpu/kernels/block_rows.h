// Some rows of x by a record of GGUF blocks, in registers.
//
// Sums of a group are exact integers. Without factors each is scaled and added to the totals; with factors the sums of all groups of the
// block are, times their factors, one exact integer for each output, and so is what is subtracted for the minima.
#pragma once
#include "block_activations.h"

namespace quire {

namespace {

// total += scale * scale of x * (sums - zero * sum of x) - minimum * scale of x * sum of x
template <class F>
inline void add_group(Ints sums, int zero, Floats scale, Floats minimum, float x_scale, float x_sum, float* total) {
  const Floats exact = fnma(floats((float)zero), floats(x_sum), to_floats(sums));
  const Floats more = fma(exact, scale * floats(x_scale), load(total));
  store(total, F::MINIMA ? fnma(minimum, floats(x_scale * x_sum), more) : more);
}

// The sum of numbers[g] * x_sum[g] over all groups of a block, for 16 outputs; pairs: [groups / 2][32] words.
template <class F>
inline Ints dots_of_sums(const int32_t* pairs, const int16_t* x_sum) {
  Ints sums = ints(0);
#pragma GCC unroll 8
  for (int g = 0; g < F::GROUPS / 2; g++) {
    int32_t word;
    memcpy(&word, x_sum + g * 2, sizeof(word));
    sums = add_short_dots(sums, load(pairs + g * 32), ints(word));
  }
  return sums;
}

// The sums of x of a row and a block, by which the form's numbers of groups are multiplied.
template <class F>
inline const int16_t* sums_of(const CoarseActivations& x, long block, long row) {
  return (F::GROUP == 16 ? x.half_sum : x.sum) + (block * x.stride + row) * F::GROUPS;
}

// total += scale of x * (scale * sums - minimum * sum of least * sum of x), for 16 outputs
template <class F>
inline void add_block(Ints sums, Floats scale, Floats minimum, const int32_t* least_pairs, const int16_t* x_sum, float x_scale, float* total) {
  Floats more = to_floats(sums) * scale;
  if (F::MINIMA) more = fnma(to_floats(dots_of_sums<F>(least_pairs, x_sum)), minimum, more);
  store(total, fma(more, floats(x_scale), load(total)));
}

// The sums of N rows and group `half` of a chunk of 32 inputs, times `factor` ([32]) if the form has factors: add(m, t, sums) for each row
// and 16 outputs. With PACKED, lines are unpacked as they are used.
template <class F, int N, bool PACKED, class Add>
inline void group_of_rows(const int8_t* from, long x_row, const Lines& w, const uint8_t* packed, int c, int half, const int32_t* factor, const Add& add) {
  constexpr int LINES = F::GROUP / 4, AT_ONCE = std::min(LINES, LINES_AT_ONCE<F::BITS>), PARTS = PACKED && N == 1 ? 2 : BLOCK_PARTS;
  const uint8_t* chunk = packed + c * F::CHUNK;
#pragma GCC unroll 2
  for (int t0 = 0; t0 < 2; t0 += PARTS) {
    const uint8_t* lines = w.bytes + c * 1024 + t0 * 512 + half * 256;
    Ints sums[N][PARTS];
#pragma GCC unroll 4
    for (int i = 0; i < LINES; i += AT_ONCE) {
      Ints partial[N][PARTS];
#pragma GCC unroll 16
      for (int m = 0; m < N; m++)
#pragma GCC unroll 2
        for (int t = 0; t < PARTS; t++) partial[m][t] = ints(0);
#pragma GCC unroll LINES_UNROLLED
      for (int j = i; j < i + AT_ONCE; j++) {
        Ints line[PARTS];
#pragma GCC unroll 2
        for (int t = 0; t < PARTS; t++)
          line[t] = PACKED ? line_of<F>(chunk, half * 4 + j, t0 + t, BYTES_ARE_MOVED, w.table) : load((const int32_t*)(lines + t * 512 + j * 64));
#pragma GCC unroll 16
        for (int m = 0; m < N; m++) {
          int32_t word;
          memcpy(&word, from + m * x_row + j * 4, sizeof(word));
#pragma GCC unroll 2
          for (int t = 0; t < PARTS; t++) partial[m][t] = add_dots<F::BITS>(partial[m][t], line[t], ints(word));
        }
      }
#pragma GCC unroll 2
      for (int t = 0; t < PARTS; t++) {
        const Ints times = F::FACTORS ? load(factor + (t0 + t) * 16) : ints(1);
#pragma GCC unroll 16
        for (int m = 0; m < N; m++) {
          const Ints found = F::FACTORS ? times_factor<F::BITS>(partial[m][t], times) : total_of<F::BITS>(partial[m][t]);
          sums[m][t] = i ? sums[m][t] + found : found;
        }
      }
    }
#pragma GCC unroll 2
    for (int t = 0; t < PARTS; t++)
#pragma GCC unroll 16
      for (int m = 0; m < N; m++) add(m, t0 + t, sums[m][t]);
  }
}

// N rows from `row` on by 32 outputs and a record, whose first input is `first`; total: [N][32]. PACKED is for few rows: F is the weight's
// form then, otherwise its Products. `packed`: the bytes after the header.
template <class F, int N, bool PACKED>
__attribute__((noinline)) void record_of_rows(const FineActivations& x, const Lines& w, const uint8_t* packed, long first, long row, float* total) {
  static_assert(F::BLOCK == 32 && F::GROUP == 32);
  if (PACKED) fetch_ahead(packed, F::CHUNK);
  const long at = first / 32 * x.stride + row;
  group_of_rows<F, N, PACKED>(x.bytes + row * x.ins + first, x.ins, w, packed, 0, 0, nullptr, [&](int m, int t, Ints sums) {
    const Floats scale = load(w.scale + t * 16), minimum = F::MINIMA ? load(w.minimum + t * 16) : scale;
    add_group<F>(sums, w.zero, scale, minimum, x.scale[at + m], x.sum[at + m], total + m * 32 + t * 16);
  });
}

template <class F, int N, bool PACKED>
__attribute__((noinline)) void record_of_rows(const CoarseActivations& x, const Lines& w, const uint8_t* packed, long first, long row, float* total) {
  static_assert(F::BLOCK == 256);
  alignas(64) int32_t sums[N * 32] = {};
  for (int c = 0; c < F::CHUNKS; c++) {
    if (PACKED) fetch_ahead(packed + c * F::CHUNK, F::CHUNK);
    for (int half = 0; half < 32 / F::GROUP; half++) {
      const int8_t* from = x.bytes + row * x.ins + first + c * 32 + half * 16;
      const int32_t* factor = w.factor + (c * (32 / F::GROUP) + half) * 32;
      group_of_rows<F, N, PACKED>(from, x.ins, w, packed, c, half, factor, [&](int m, int t, Ints found) {
        int32_t* at = sums + m * 32 + t * 16;
        store(at, load(at) + found);
      });
    }
  }
  for (int m = 0; m < N; m++) {
    const int16_t* x_sum = sums_of<F>(x, first / 256, row + m);
    for (int t = 0; t < 32; t += 16) {
      Ints exact = load(sums + m * 32 + t);
      if (w.zero) exact = exact - wrapping_times(dots_of_sums<F>(w.factor_pairs + t, x_sum), ints(w.zero));
      const Floats scale = load(w.scale + t), minimum = F::MINIMA ? load(w.minimum + t) : scale;
      add_block<F>(exact, scale, minimum, w.least_pairs + t, x_sum, x.scale[first / 256 * x.stride + row + m], total + m * 32 + t);
    }
  }
}

template <class F>
inline void record_of_rows(int rows, const ActivationsOf<F>& x, const Lines& w, long first, long row, float* total) {
  switch (rows) {
#define CASE(n) \
  case n: return record_of_rows<F, n, false>(x, w, nullptr, first, row, total);
    CASE(1) CASE(2)
#if defined(__AVX2__)
    CASE(3) CASE(4)
#endif
#if defined(__AVX512F__)
    CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
#endif
#if defined(__AVX512VNNI__)
    CASE(11) CASE(12)
#endif
#undef CASE
  }
}

constexpr long PACKED_ROWS = BLOCK_ROWS < 4 ? BLOCK_ROWS : 4;  // the most rows for which lines are unpacked as they are used

template <class F>
inline void packed_of_rows(int rows, const ActivationsOf<F>& x, const Lines& w, const uint8_t* packed, long first, long row, float* total) {
  switch (rows) {
    case 1: return record_of_rows<F, 1, true>(x, w, packed, first, row, total);
    case 2: return record_of_rows<F, 2, true>(x, w, packed, first, row, total);
#if defined(__AVX2__)
    case 3: return record_of_rows<F, 3, true>(x, w, packed, first, row, total);
    case 4: return record_of_rows<F, 4, true>(x, w, packed, first, row, total);
#endif
  }
}

// total[rows][32] of rows from `first` on and a panel.
template <class F>
void panel_in_registers(long form, const ActivationsOf<F>& x, const uint8_t* w, long first, long rows, float* total) {
  Record<F> record(form);
  const Lines lines = lines_of(record, record.bytes, BYTES_ARE_MOVED);
  memset(total, 0, rows * 32 * sizeof(float));
  const long parts = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (long k = 0; k < x.ins; k += F::BLOCK, w += F::RECORD) {
    fetch_ahead(w, F::HEADER);
    unpack_scales(w, record);
    if (rows <= PACKED_ROWS) {
      packed_of_rows<F>((int)rows, x, lines, w + F::HEADER, k, first, total);
      continue;
    }
    unpack<0>(w + F::HEADER, record, BYTES_ARE_MOVED);
    for (long i = 0; i < parts; i++) {
      const long a = rows * i / parts, e = rows * (i + 1) / parts;
      record_of_rows<Products<F>>((int)(e - a), x, lines, k, first + a, total + a * 32);
    }
  }
}

}  // namespace

}  // namespace quire

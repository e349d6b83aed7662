// A bf16 linear layer of many rows with AVX2 or less: rows and weights become floats once for many products.
//
// A panel of bf16 weights that is converted as it is used costs half as many instructions as its products with six rows, and more
// registers than there are. Here a slice of a panel is converted for a block of rows: 64 -> 89 of the 112 GFLOP/s of a Zen 3 core.
// Sums run along k in the same order, with the same products, so gemm_kernel.h gives the same bits.
#pragma once
#include "gemm_epilogue.h"

namespace quire {

constexpr long FLOATS_MIN_ROWS = 4 * ROWS;  // rows, from which on it is faster
constexpr long SLICE = 256;                 // of k: 16 columns of it are 16 KB, which stay in the L1 cache
constexpr long ROWS_BYTES = 256 << 10;      // a block of rows as floats, but at least 32 * ROWS: fewer use a slice too seldom

// sums[N, 16] (+)= a[N, depth] * b[depth, 16]
template <int N, bool ADD>
__attribute__((noinline)) void product_of_floats(const float* a, long a_row, const float* b, long depth, float* c, long c_row) {
  Floats sums[N];
#pragma GCC unroll 16
  for (int m = 0; m < N; m++) sums[m] = ADD ? load(c + m * c_row) : floats(0.f);
  for (long k = 0; k < depth; k++) {
    const Floats line = load(b + k * 16);
#pragma GCC unroll 16
    for (int m = 0; m < N; m++) sums[m] = fma(floats(a[m * a_row + k]), line, sums[m]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < N; m++) store(c + m * c_row, sums[m]);
}

template <bool ADD>
inline void product_of_floats(int rows, const float* a, long a_row, const float* b, long depth, float* c, long c_row) {
  if (rows == ROWS) return product_of_floats<ROWS, ADD>(a, a_row, b, depth, c, c_row);
  for (int m = 0; m < rows; m++) product_of_floats<1, ADD>(a + m * a_row, a_row, b, depth, c + m * c_row, c_row);
}

// 32 values in the order of k -> floats.
inline void widen_32(const bf16* from, float* to) { store(to, widen(from)), store(to + 16, widen(from + 16)); }

// A step of one tile, lines of 16 pairs, -> floats [32, 16].
inline void widen_tile(const bf16* b, float* to) {
  for (long r = 0; r < 16; r++, b += 32, to += 32) {
    const Ints words = load((const int32_t*)b);
    store(to, as_floats(words << 16));
    store(to + 16, as_floats(words & (int32_t)0xffff0000));
  }
}

// Panels [panel0, panel1) by the calling thread alone.
template <Kind KIND>
void panels_of_floats(const Job<Bf16>& job, long panel0, long panel1) {
  static thread_local Scratch<float> keep_rows, keep_sums, keep_tile;
  const long K = job.ins, most = std::max<long>(32 * ROWS, ROWS_BYTES / (K * sizeof(float)) / ROWS * ROWS);
  const long blocks = (job.rows + most - 1) / most;
  float *x = keep_rows.at_least(most * ((K + SLICE - 1) / SLICE * SLICE)), *sums = keep_sums.at_least(most * 32), *tile = keep_tile.at_least(SLICE * 16);
  for (long i = 0; i < blocks; i++) {
    const long first = job.rows * i / blocks, count = job.rows * (i + 1) / blocks - first;
    for (long m = 0; m < count; m++)  // slice by slice: rows further apart would share lines of the L1 cache
      for (long k = 0; k < K; k += 32) widen_32(job.x + (first + m) * job.x_row + k, x + (k / SLICE * count + m) * SLICE + k % SLICE);
    for (long panel = panel0; panel < panel1; panel++) {
      for (long k = 0; k < K; k += SLICE)
        for (long half = 0; half < 2; half++) {
          const long depth = std::min(SLICE, K - k);
          const bf16* w = job.w + (panel * job.steps() + k / 32) * STEP + half * HALF;
          for (long d = 0; d < depth; d += 32, w += STEP) widen_tile(w, tile + d * 16);
          const auto product = k ? product_of_floats<true> : product_of_floats<false>;
          for (long m = 0; m < count; m += ROWS)
            product((int)std::min<long>(ROWS, count - m), x + (k / SLICE * count + m) * SLICE, SLICE, tile, depth, sums + m * 32 + half * 16, 32);
        }
      Finish<KIND, Bf16>(job, panel).rows(first, count, sums);
    }
  }
}

}  // namespace quire

// Quantizes rows of x to bytes around ZERO_BYTE, each with one scale: its largest value is 127 away.
#pragma once
#include "gemm_kernel.h"

namespace quire {

// The factors that quantize N rows, with the largest value of each at 127; writes their scales, `next` apart.
template <int N>
inline void factors(const bf16* x, long x_row, long ins, Floats* factor, float* scales, long next) {
  Floats most[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) most[i] = floats(0.f);
  for (long k = 0; k < ins; k += 16)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) most[i] = max(most[i], magnitude(widen(x + i * x_row + k)));
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    const float top = max_of(most[i]);
    factor[i] = floats(top > 0 ? 127.f / top : 0.f);
    scales[i * next] = top / 127.f;
  }
}

// N rows interleaved: one alone waits for its maximum, and for memory, four times as often (1024 x 2048, two cores: a third of an
// int8 linear to 1024 outputs). The following rows are prefetched: 17 -> 30 GB/s on two cores. 64 bytes of row i, from value k on,
// go to `to` + i * to_row + k / 64 * to_step.
template <int N>
inline void to_bytes(const bf16* x, long x_row, uint8_t* to, long to_row, long to_step, long ins, float* scales) {
  Floats factor[N];
  factors<N>(x, x_row, ins, factor, scales, 1);
  for (long k = 0; k < ins; k += 64, to += to_step)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const char* next = (const char*)(x + (i + 2 * N) * x_row + k);
      fetch(next), fetch(next + LINE);
#pragma GCC unroll 4
      for (int j = 0; j < 64; j += 16)
        store_bytes(to + i * to_row + j, to_ints(widen(x + i * x_row + k + j) * factor[i]) + ZERO_BYTE);
    }
}

inline void rows_to_bytes(const bf16* x, long x_row, long rows, uint8_t* to, long to_row, long to_step, long ins, float* scales) {
  long r = 0;
  for (; r + 4 <= rows; r += 4) to_bytes<4>(x + r * x_row, x_row, to + r * to_row, to_row, to_step, ins, scales + r);
  for (; r < rows; r++) to_bytes<1>(x + r * x_row, 0, to + r * to_row, 0, to_step, ins, scales + r);
}

}  // namespace quire

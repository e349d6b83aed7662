// RMSNorm and RoPE of one vector, for norm_rope_act.cpp and for the heads of a layer.
#pragma once
#include <type_traits>

#include "common.h"

namespace quire {

// y = x / rms(x) * w, of N vectors interleaved: one alone waits for its sum, its root and its division. D is a multiple of 16; y may
// be x.
template <int N>
inline void norms(const bf16* x, long x_step, const bf16* w, bf16* y, long y_step, long D, float eps, bool plus_one) {
  Floats squares[N], factor[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) squares[i] = floats(0.f);
  for (long d = 0; d < D; d += 16)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const Floats v = widen(x + i * x_step + d);
      squares[i] = fma(v, v, squares[i]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) factor[i] = floats(1.f / sqrtf(sum_of(squares[i]) / (float)D + eps));
  for (long d = 0; d < D; d += 16) {
    const Floats weight = plus_one ? floats(1.f) + widen(w + d) : widen(w + d);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const Floats v = widen(x + i * x_step + d) * factor[i];
      store(y + i * y_step + d, (plus_one ? v : rounded(v)) * weight);
    }
  }
}

// Calls f(first, N as a type) for all of `count`, four at a time.
template <class F>
inline void each_four(long count, const F& f) {
  long i = 0;
  for (; i + 4 <= count; i += 4) f(i, std::integral_constant<int, 4>{});
  for (; i + 2 <= count; i += 2) f(i, std::integral_constant<int, 2>{});
  if (i < count) f(i, std::integral_constant<int, 1>{});
}

// Rotates the first 2 * P features: pairs (i, i + P). y may be x.
inline void rotate(const bf16* x, const float* cos, const float* sin, bf16* y, long D, long P) {
  for (long i = 0; i < P; i += 16) {
    const Floats a = widen(x + i), b = widen(x + P + i), c = load(cos + i), s = load(sin + i);
    store(y + i, fnma(b, s, a * c));
    store(y + P + i, fma(b, c, a * s));
  }
  if (y != x) memcpy(y + 2 * P, x + 2 * P, (D - 2 * P) * sizeof(bf16));
}

}  // namespace quire

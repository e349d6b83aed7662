// Norms and RoPE of one vector, for norm_rope_act.cpp and for the heads of a layer.
#pragma once
#include <type_traits>

#include "common.h"

namespace quire {

enum NormKind { NO_NORM, RMS, RMS_PLUS_ONE, LAYER_NORM };  // structs.py has their numbers, too

// y = x / rms(x) * w, of N vectors interleaved: one alone waits for its sum, its root and its division. D is a multiple of 16; y may
// be x; w may be null. A layer norm subtracts the mean first, and may have a bias.
template <int N, bool CENTERED>
inline void norms(const bf16* x, long x_step, const bf16* w, bf16* y, long y_step, long D, float eps, int kind, const bf16* bias = nullptr) {
  Floats mean[N], squares[N], factor[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) mean[i] = squares[i] = floats(0.f);
  if (CENTERED) {
    for (long d = 0; d < D; d += 16)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) mean[i] = mean[i] + widen(x + i * x_step + d);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) mean[i] = floats(sum_of(mean[i]) / (float)D);
  }
  const auto at = [&](int i, long d) {
    const Floats v = widen(x + i * x_step + d);
    return CENTERED ? v - mean[i] : v;
  };
  for (long d = 0; d < D; d += 16)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const Floats v = at(i, d);
      squares[i] = fma(v, v, squares[i]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) factor[i] = floats(1.f / sqrtf(sum_of(squares[i]) / (float)D + eps));
  for (long d = 0; d < D; d += 16) {
    const Floats weight = w ? widen(w + d) : floats(1.f), factors = kind == RMS_PLUS_ONE ? floats(1.f) + weight : weight;
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const Floats v = at(i, d) * factor[i], scaled = (kind == RMS ? rounded(v) : v) * factors;
      store(y + i * y_step + d, CENTERED && bias ? scaled + widen(bias + d) : scaled);
    }
  }
}
template <int N>
inline void norms(const bf16* x, long x_step, const bf16* w, bf16* y, long y_step, long D, float eps, int kind, const bf16* bias = nullptr) {
  const auto run = kind == LAYER_NORM ? norms<N, true> : norms<N, false>;
  run(x, x_step, w, y, y_step, D, eps, kind, bias);
}

// Calls f(first, N as a type) for all of `count`, four at a time.
template <class F>
inline void each_four(long count, const F& f) {
  long i = 0;
  for (; i + 4 <= count; i += 4) f(i, std::integral_constant<int, 4>{});
  for (; i + 2 <= count; i += 2) f(i, std::integral_constant<int, 2>{});
  if (i < count) f(i, std::integral_constant<int, 1>{});
}

// 16 pairs from pair i on, and where they go.
struct Pairs {
  Floats a, b;
  Pairs(const bf16* x, long i, long P, bool interleaved) {
    if (interleaved) {  // a pair is a word
      const Ints pairs = load((const int32_t*)(x + 2 * i));
      a = as_floats(pairs << 16), b = as_floats(pairs & (int32_t)0xffff0000);
    } else
      a = widen(x + i), b = widen(x + P + i);
  }
  void rotate(const float* cos, const float* sin, bf16* y, long i, long P, bool interleaved) const {
    const Floats c = load(cos + i), s = load(sin + i), early = fnma(b, s, a * c), late = fma(b, c, a * s);
    if (interleaved)
      store((int32_t*)(y + 2 * i), logical_right(as_ints(rounded(early)), 16) | as_ints(rounded(late)));
    else
      store(y + i, early), store(y + P + i, late);
  }
};

// Rotates the first 2 * P features: pairs (i, i + P), or (2 i, 2 i + 1) if interleaved. P is at least 16. y may be x: so the last
// pairs, of which some are computed twice where P is no multiple of 16, are read before any is written.
inline void rotate(const bf16* x, const float* cos, const float* sin, bf16* y, long D, long P, bool interleaved) {
  if (!P) return;
  const Pairs last(x, P - 16, P, interleaved);
  for (long i = 0; i + 16 < P; i += 16) Pairs(x, i, P, interleaved).rotate(cos, sin, y, i, P, interleaved);
  last.rotate(cos, sin, y, P - 16, P, interleaved);
  if (y != x) memcpy(y + 2 * P, x + 2 * P, (D - 2 * P) * sizeof(bf16));
}

}  // namespace quire

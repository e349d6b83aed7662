// The norm and the turn of one vector: of rows.cpp, and of a layer's heads.
#pragma once
#include "common.h"

namespace quire {

// y = x / rms(x) * w. D is a multiple of 16.
inline void norm(const bf16* x, const bf16* w, bf16* y, long D, float eps, bool plus_one) {
  Floats squares = floats(0.f);
  for (long d = 0; d < D; d += 16) {
    const Floats v = widen(x + d);
    squares = fma(v, v, squares);
  }
  const Floats factor = floats(1.f / sqrtf(sum_of(squares) / (float)D + eps));
  for (long d = 0; d < D; d += 16) {
    const Floats v = widen(x + d) * factor;
    store(y + d, plus_one ? v * (floats(1.f) + widen(w + d)) : rounded(v) * widen(w + d));
  }
}

// The first 2 * P features turn: pairs (i, i + P). y may be x.
inline void turn(const bf16* x, const float* cos, const float* sin, bf16* y, long D, long P) {
  for (long i = 0; i < P; i += 16) {
    const Floats a = widen(x + i), b = widen(x + P + i), c = load(cos + i), s = load(sin + i);
    store(y + i, fnma(b, s, a * c));
    store(y + P + i, fma(b, c, a * s));
  }
  if (y != x) memcpy(y + 2 * P, x + 2 * P, (D - 2 * P) * sizeof(bf16));
}

}  // namespace quire

// Access to logits, float32 or bf16: sixteen from an index on, or one.
#pragma once
#include "common.h"

namespace quire {

inline Floats sixteen(const float* p) { return load(p); }
inline Floats sixteen(const bf16* p) { return widen(p); }
inline float one(const float* p) { return *p; }
inline float one(const bf16* p) {
  const uint32_t bits = (uint32_t)*p << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

}  // namespace quire

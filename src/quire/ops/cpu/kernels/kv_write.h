// Writes new keys and values to their slots of the cache.
#pragma once
#include "kv_codec.h"

namespace quire {

constexpr long MAX_D = 576;
constexpr float NOTHING = 1e-30f;  // a vector without a larger element is stored as zeros

// One vector of D: its codes, and its scale.
template <class C>
inline void encode(C, const bf16* from, long D, bool key, uint8_t* codes, float* scale) {
  alignas(64) float x[MAX_D];
  for (long d = 0; d < D; d += 16) store(x + d, widen(from + d));
  const bool use_hadamard = key && C::HADAMARD;
  if (use_hadamard) hadamard(x, D);
  Floats most = floats(0.f);
  for (long d = 0; d < D; d += 16) most = max(most, magnitude(load(x + d)));
  const float top = max_of(most), factor = top > NOTHING ? C::TOP / top : 0.f;
  for (long d = 0; d < D; d += 16) store_bytes(codes + d, C::code(load(x + d) * floats(factor)));
  *scale = top / C::TOP / (float)(use_hadamard ? D & -D : 1);
}

// The keys, or the values, of one layer: [blocks, heads, block_size, D]; of a quantized cache, `scales`: [blocks, heads, block_size].
struct Cached {
  void* cache;
  float* scales;
  long heads, D, block_size, kind;
  bool key;

  void write(int64_t slot, const bf16* from) const {  // a token's, of all heads
    const long place = slot / block_size * heads * block_size + slot % block_size;
    for (long h = 0, to = place; h < heads; h++, to += block_size, from += D) {
      if (kind == KV_BF16) memcpy((bf16*)cache + to * D, from, D * sizeof(bf16));
      with_code(kind, [&](auto code) { encode(code, from, D, key, (uint8_t*)cache + to * D, scales + to); });
    }
  }
};

}  // namespace quire

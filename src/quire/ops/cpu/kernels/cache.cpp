// New keys and values to their slots of the cache.
#include "codes.h"
#include "exports.h"

namespace quire {

constexpr long MOST_D = 512;
constexpr float NOTHING = 1e-30f;  // a vector without anything larger has zeros for codes

// One vector of D: its codes, and its scale.
template <class C>
inline void encode(C, const bf16* from, long D, bool key, uint8_t* codes, float* scale) {
  alignas(64) float x[MOST_D];
  for (long d = 0; d < D; d += 16) store(x + d, widen(from + d));
  const bool turned = key && C::TURNED;
  if (turned) turn(x, D);
  Floats most = floats(0.f);
  for (long d = 0; d < D; d += 16) most = max(most, magnitude(load(x + d)));
  const float top = max_of(most), factor = top > NOTHING ? C::TOP / top : 0.f;
  for (long d = 0; d < D; d += 16) store_bytes(codes + d, C::code(load(x + d) * floats(factor)));
  *scale = top / C::TOP / (float)(turned ? D & -D : 1);
}

}  // namespace quire

using namespace quire;

// Keys, or values, of T tokens: [T, heads, D] with `step` elements from token to token. `scales`: of codes.
EXPORT void quire_write_cache(const bf16* from, long step, void* cache, float* scales, const int64_t* slots, long tokens,
                              long heads, long D, long block_size, long kind, int key) {
#pragma omp parallel for if (tokens * (kind == SHORT ? 1 : heads) >= 64) schedule(static)
  for (long t = 0; t < tokens; t++) {
    const long block = slots[t] / block_size, place = slots[t] % block_size;
    for (long h = 0; h < heads; h++) {
      const long at = (block * heads + h) * block_size + place;
      const bf16* x = from + t * step + h * D;
      if (kind == SHORT) memcpy((bf16*)cache + at * D, x, D * sizeof(bf16));
      with_code(kind, [&](auto code) { encode(code, x, D, key, (uint8_t*)cache + at * D, scales + at); });
    }
  }
}

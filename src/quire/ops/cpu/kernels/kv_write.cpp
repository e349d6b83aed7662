// Writes new keys and values to their slots of the cache, outside of the fused layer (layer.cpp).
#include "kv_write.h"

#include "exports.h"
#include "team.h"

using namespace quire;

// Keys, or values, of T tokens: [T, heads, D] with `step` elements from token to token. `scales`: of a quantized cache.
EXPORT void quire_write_cache(const bf16* from, long step, void* cache, float* scales, const int64_t* slots, long tokens,
                              long heads, long D, long block_size, long kind, int key) {
  const Cached to{cache, scales, heads, D, block_size, kind, key != 0};
  each_of(tokens, tokens * (kind == KV_BF16 ? 1 : heads) >= 64, [&](long t) { to.write(slots[t], from + t * step); });
}

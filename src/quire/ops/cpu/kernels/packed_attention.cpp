// Attention of packed prompts to themselves, in both directions: attention.cpp over keys and values that are copied to blocks.
#include "packed_attention.h"
#include "team.h"

namespace quire {

void attend_packed(const Prompts& prompts, const PackedHeads& h, const bf16* q, long q_step, const bf16* k, long k_step, const bf16* v, long v_step,
                   bf16* o) {
  static thread_local Scratch<bf16> keep_keys, keep_values;  // of the calling thread
  const long size = prompts.blocks * Prompts::BLOCK * h.kv_heads * h.D;
  bf16 *keys = keep_keys.at_least(size), *values = keep_values.at_least(size);
  each_of(prompts.tokens(), true, [&](long t) {
    for (long head = 0; head < h.kv_heads; head++) {
      const long to = prompts.at(t, head, h.kv_heads) * h.D, from = head * h.D;
      memcpy(keys + to, k + t * k_step + from, h.D * sizeof(bf16));
      memcpy(values + to, v + t * v_step + from, h.D * sizeof(bf16));
    }
  });
  const Paged cache = {keys, values, nullptr, nullptr, prompts.table, KV_BF16, prompts.table_step, h.kv_heads, Prompts::BLOCK, h.D, h.D};
  attend({q, o, cache, prompts.starts, prompts.lengths, nullptr, q_step, prompts.rows, h.heads, h.window, h.scale, 0.f, true, h.bias, h.distances});
}

}  // namespace quire

using namespace quire;

// D is a multiple of 32. window: tokens to each side, the query's own included; 0: all. bias: see Call; or null.
EXPORT void quire_packed_attention(const bf16* q, long q_step, const bf16* k, long k_step, const bf16* v, long v_step, bf16* o, const int* starts,
                                   long rows, long heads, long kv_heads, long D, long window, float scale, const float* bias,
                                   long distances) {
  attend_packed({starts, rows}, {heads, kv_heads, D, window, scale, bias, distances}, q, q_step, k, k_step, v, v_step, o);
}

// Attention of packed prompts to themselves, in both directions: attention.cpp over keys and values that are copied to blocks.
#include "packed_attention.h"
#include "team.h"

namespace quire {

void attend_packed(const Prompts& prompts, const PackedHeads& h, const bf16* q, long q_step, const bf16* k, long k_step, const bf16* v, long v_step,
                   bf16* o) {
  static thread_local Scratch<bf16> keep_keys, keep_values, keep_q, keep_o;  // of the calling thread
  const long T = prompts.tokens(), D = h.D, wide = padded(D, 32), size = prompts.blocks * Prompts::BLOCK * h.kv_heads * wide;
  const bool pads = wide > D;  // heads of other sizes end with zeros, which change no score
  bf16 *keys = keep_keys.at_least(size), *values = keep_values.at_least(size);
  bf16 *wide_q = pads ? keep_q.at_least(T * h.heads * wide) : nullptr, *wide_o = pads ? keep_o.at_least(T * h.heads * wide) : o;
  const auto copy = [&](const bf16* from, bf16* to) {
    memcpy(to, from, D * sizeof(bf16));
    memset(to + D, 0, (wide - D) * sizeof(bf16));
  };
  each_of(T, true, [&](long t) {
    for (long head = 0; head < h.kv_heads; head++) {
      const long to = prompts.at(t, head, h.kv_heads) * wide;
      copy(k + t * k_step + head * D, keys + to), copy(v + t * v_step + head * D, values + to);
    }
    for (long head = 0; pads && head < h.heads; head++) copy(q + t * q_step + head * D, wide_q + (t * h.heads + head) * wide);
  });
  const Paged cache = {keys, values, nullptr, nullptr, prompts.table, KV_BF16, prompts.table_step, h.kv_heads, Prompts::BLOCK, wide, wide};
  attend({pads ? wide_q : q, wide_o, cache, prompts.starts, prompts.lengths, nullptr, pads ? h.heads * wide : q_step, prompts.rows, h.heads, h.window,
          h.scale, 0.f, true, h.bias, h.distances});
  if (pads) each_of(T * h.heads, true, [&](long i) { memcpy(o + i * D, wide_o + i * wide, D * sizeof(bf16)); });
}

}  // namespace quire

using namespace quire;

// window: tokens to each side, the query's own included; 0: all. bias: see Call; or null.
EXPORT void quire_packed_attention(const bf16* q, long q_step, const bf16* k, long k_step, const bf16* v, long v_step, bf16* o, const int* starts,
                                   long rows, long heads, long kv_heads, long D, long window, float scale, const float* bias,
                                   long distances) {
  attend_packed({starts, rows}, {heads, kv_heads, D, window, scale, bias, distances}, q, q_step, k, k_step, v, v_step, o);
}

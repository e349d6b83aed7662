// A whole decoder layer in one call: the same functions in the same order as from Python, so the same bits, without the host's time
// between them (13 calls a layer cost more than a small model's arithmetic).
//
//   x, residual = norm(x + residual), x + residual
//   q, k, v = qkv(x);  QK-norm and RoPE;  k, v to the cache (one pass over all three);  attention
//   x, residual = norm(o(attention) + residual), ...
//   x = down(silu(gate(x)) * up(x))
#include "layer.h"

#include "kv_write.h"
#include "norm_rope_act.h"

namespace quire {

// Between qkv and attention: QK-norm and RoPE of queries and keys; keys and values go to the cache, quantized from the result in qkv.
template <int N>  // heads from h on, all of queries, keys or values
inline void prepare_heads(const Layer& l, const Step& s, bf16* qkv, long t, long h) {
  const long D = l.D, turning = l.heads + l.kv_heads;
  const bf16* weight = h < l.heads ? l.q_norm : h < turning ? l.k_norm : nullptr;
  const bool turns = l.turns && h < turning;
  bf16* x = qkv + (t * (turning + l.kv_heads) + h) * D;
  alignas(64) bf16 between[N * MAX_D];
  if (weight) norms<N>(x, D, weight, between, D, D, l.head_eps, false);
  for (int i = 0; i < N; i++, h++, x += D) {
    bf16* to = x;
    if (h >= l.heads && l.kind == KV_BF16) {
      const long head = h < turning ? h - l.heads : h - turning, block = s.slots[t] / l.block_size;
      const long at = (block * l.kv_heads + head) * l.block_size + s.slots[t] % l.block_size;
      to = (bf16*)(h < turning ? l.keys : l.values) + at * D;
    }
    const bf16* from = weight ? between + i * D : x;
    const long line = (s.positions ? s.positions[t] : t) * s.pairs;
    if (turns)
      rotate(from, s.cos + line, s.sin + line, to, D, s.pairs);
    else if (from != to)
      memcpy(to, from, D * sizeof(bf16));
  }
}

static void prepare(const Layer& l, const Step& s, bf16* qkv) {
  const long turning = l.heads + l.kv_heads, all = turning + l.kv_heads;
  const Cached keys{l.keys, l.key_scales, l.kv_heads, l.D, l.block_size, l.kind, true};
  const Cached values{l.values, l.value_scales, l.kv_heads, l.D, l.block_size, l.kind, false};
#pragma omp parallel for if (s.tokens > 1) schedule(static)
  for (long t = 0; t < s.tokens; t++) {
    const auto some = [&](long first, long count) {
      each_four(count, [&](long h, auto n) { prepare_heads<n>(l, s, qkv, t, first + h); });
    };
    some(0, l.heads), some(l.heads, l.kv_heads), some(turning, l.kv_heads);
    if (l.kind == KV_BF16) continue;
    keys.write(s.slots[t], qkv + (t * all + l.heads) * l.D);
    values.write(s.slots[t], qkv + (t * all + turning) * l.D);
  }
}

}  // namespace quire

using namespace quire;

// x and residual: [tokens, hidden], overwritten; `first`: residual holds nothing yet.
EXPORT void quire_layer(const Layer* layer, const Step* step, bf16* x, bf16* residual, int first) {
  static thread_local Scratch<bf16> keep_qkv, keep_o, keep_inner;  // of the calling thread
  const Layer& l = *layer;
  const Step& s = *step;
  const long T = s.tokens, D = l.D, width = (l.heads + 2 * l.kv_heads) * D, inner = l.down.ins;
  bf16* qkv = keep_qkv.at_least(T * width);
  bf16* o = keep_o.at_least(T * l.heads * D);
  if (first) {
    memcpy(residual, x, T * l.hidden * sizeof(bf16));
    quire_rms_norm(x, l.hidden, l.first_norm, x, l.hidden, T, 1, l.hidden, l.eps, 0);
  } else {
    quire_add_rms_norm(x, residual, l.first_norm, T, l.hidden, l.eps, 0);
  }
  l.qkv.multiply(x, l.hidden, qkv, width, T, false);
  prepare(l, s, qkv);
  quire_attention(qkv, width, o, l.keys, l.values, l.key_scales, l.value_scales, l.kind, s.table, s.table_step, s.starts,
                  s.lengths, l.sinks, s.rows, l.heads, l.kv_heads, D, D, l.block_size, l.window, l.scale, l.softcap);
  l.o.multiply(o, l.heads * D, x, l.hidden, T, false);
  quire_add_rms_norm(x, residual, l.second_norm, T, l.hidden, l.eps, 0);
  bf16* gated = keep_inner.at_least(T * inner);
  l.gate_up.multiply(x, l.hidden, gated, inner, T, true);
  l.down.multiply(gated, inner, x, l.hidden, T, false);
}

// All layers, each with the step of its KV group, then the final norm: in place in x.
EXPORT void quire_layers(const Layer* const* layers, const int64_t* groups, long count, const Step* const* steps, bf16* x,
                         const bf16* norm, float eps) {
  static thread_local Scratch<bf16> keep;  // of the calling thread
  bf16* residual = keep.at_least(steps[0]->tokens * layers[0]->hidden);
  for (long i = 0; i < count; i++) quire_layer(layers[i], steps[groups[i]], x, residual, i == 0);
  quire_add_rms_norm(x, residual, norm, steps[0]->tokens, layers[0]->hidden, eps, 0);
}

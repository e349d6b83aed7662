// Decoder layers in one call, or halves of them: the same functions in the same order as layer by layer from Python, so the same bits,
// without the host's time between them (13 calls a layer cost more than a small model's arithmetic).
//
//   x, residual = norm(x + residual), x + residual
//   q, k, v = qkv(x);  QK-norm and RoPE;  k, v to the cache (one pass over all three);  attention
//   x, residual = norm(o(attention) + residual), ...
//   x = down(activation(gate(x)) * up(x))
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

// The first half of a layer. `first`: the residual holds nothing yet.
static void attention_half(const Layer& l, const Step& s, bf16* x, bf16* residual, bool first) {
  static thread_local Scratch<bf16> keep_qkv, keep_o;  // of the calling thread
  const long T = s.tokens, D = l.D, width = (l.heads + 2 * l.kv_heads) * D;
  bf16* qkv = keep_qkv.at_least(T * width);
  bf16* o = keep_o.at_least(T * l.heads * D);
  if (first) {
    memcpy(residual, x, T * l.hidden * sizeof(bf16));
    quire_rms_norm(x, l.hidden, l.first_norm, x, l.hidden, T, 1, l.hidden, l.eps, 0);
  } else {
    quire_add_rms_norm(x, residual, l.first_norm, T, l.hidden, l.eps, 0);
  }
  l.qkv.multiply(x, l.hidden, qkv, width, T);
  prepare(l, s, qkv);
  quire_attention(qkv, width, o, l.keys, l.values, l.key_scales, l.value_scales, l.kind, s.table, s.table_step, s.starts,
                  s.lengths, l.sinks, s.rows, l.heads, l.kv_heads, D, D, l.block_size, l.window, l.scale, l.softcap);
  l.o.multiply(o, l.heads * D, x, l.hidden, T);
}

static void mlp_half(const Layer& l, long T, bf16* x, bf16* residual) {
  static thread_local Scratch<bf16> keep_inner;  // of the calling thread
  const long inner = l.down.ins;
  bf16* gated = keep_inner.at_least(T * inner);
  quire_add_rms_norm(x, residual, l.second_norm, T, l.hidden, l.eps, 0);
  l.gate_up.multiply(x, l.hidden, gated, inner, T, l.act);
  l.down.multiply(gated, inner, x, l.hidden, T);
}

}  // namespace quire

using namespace quire;

// Layers, or halves of them, one after the other, each with the step of its group; the norm behind them unless it is null.
// x and residual: [tokens, hidden], written over. `first`: the residual holds nothing yet.
EXPORT void quire_layers(const Layer* const* layers, const int64_t* groups, long count, const Step* const* steps, long tokens,
                         bf16* x, bf16* residual, int first, const bf16* norm, float eps) {
  for (long i = 0; i < count; i++) {
    const Layer& l = *layers[i];
    if (l.qkv.data) attention_half(l, *steps[groups[i]], x, residual, first && i == 0);
    if (l.gate_up.data) mlp_half(l, tokens, x, residual);
  }
  if (norm) quire_add_rms_norm(x, residual, norm, tokens, layers[0]->hidden, eps, 0);
}

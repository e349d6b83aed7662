// A whole decoder layer in one call: the same functions in the same order as layer by layer from Python, so the same bits,
// without the host's time between them (13 calls a layer cost more than a small model's arithmetic).
//
//   x, residual = norm(x + residual), x + residual
//   q, k, v = qkv(x);  q, k normed and turned;  k, v to the cache;  attention
//   x, residual = norm(o(attention) + residual), ...
//   x = down(silu(gate(x)) * up(x))
#include "layer.h"

using namespace quire;

// x and residual: [tokens, hidden], written over; `first`: residual holds nothing yet.
EXPORT void quire_layer(const Layer* layer, const Step* step, bf16* x, bf16* residual, int first) {
  static Scratch<bf16> keep_qkv, keep_o, keep_inner;  // one call at a time
  const Layer& l = *layer;
  const Step& s = *step;
  const long T = s.tokens, D = l.D, width = (l.heads + 2 * l.kv_heads) * D, inner = l.down.ins;
  bf16* qkv = keep_qkv.at_least(T * width);
  bf16* o = keep_o.at_least(T * l.heads * D);
  bf16 *k = qkv + l.heads * D, *v = k + l.kv_heads * D;
  if (first) {
    memcpy(residual, x, T * l.hidden * sizeof(bf16));
    quire_rms_norm(x, l.hidden, l.first_norm, x, l.hidden, T, 1, l.hidden, l.eps, 0);
  } else {
    quire_add_rms_norm(x, residual, l.first_norm, T, l.hidden, l.eps, 0);
  }
  l.qkv.multiply(x, l.hidden, qkv, width, T, false);
  if (l.q_norm) {
    quire_rms_norm(qkv, width, l.q_norm, qkv, width, T, l.heads, D, l.head_eps, 0);
    quire_rms_norm(k, width, l.k_norm, k, width, T, l.kv_heads, D, l.head_eps, 0);
  }
  if (l.turns) {
    quire_rotate(qkv, width, s.cos, s.sin, qkv, width, T, l.heads, D, s.pairs);
    quire_rotate(k, width, s.cos, s.sin, k, width, T, l.kv_heads, D, s.pairs);
  }
  quire_write_cache(k, width, l.keys, l.key_scales, s.slots, T, l.kv_heads, D, l.block_size, l.kind, 1);
  quire_write_cache(v, width, l.values, l.value_scales, s.slots, T, l.kv_heads, D, l.block_size, l.kind, 0);
  quire_attention(qkv, width, o, l.keys, l.values, l.key_scales, l.value_scales, l.kind, s.table, s.table_step, s.starts,
                  s.lengths, l.sinks, s.rows, l.heads, l.kv_heads, D, D, l.block_size, l.window, l.scale, l.softcap);
  l.o.multiply(o, l.heads * D, x, l.hidden, T, false);
  quire_add_rms_norm(x, residual, l.second_norm, T, l.hidden, l.eps, 0);
  bf16* gated = keep_inner.at_least(T * inner);
  l.gate_up.multiply(x, l.hidden, gated, inner, T, true);
  l.down.multiply(gated, inner, x, l.hidden, T, false);
}

// Layers one after the other, each with the step of its group, and the norm behind them: all in x.
EXPORT void quire_layers(const Layer* const* layers, const int64_t* groups, long count, const Step* const* steps, bf16* x,
                         bf16* residual, const bf16* norm, float eps) {
  for (long i = 0; i < count; i++) quire_layer(layers[i], steps[groups[i]], x, residual, i == 0);
  quire_add_rms_norm(x, residual, norm, steps[0]->tokens, layers[0]->hidden, eps, 0);
}

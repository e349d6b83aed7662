// A whole decoder layer in one call: the same functions in the same order as layer by layer from Python, so the same bits,
// without the host's time between them (13 calls a layer cost more than a small model's arithmetic).
//
//   x, residual = norm(x + residual), x + residual
//   q, k, v = qkv(x);  q, k normed and turned;  k, v to the cache;  attention
//   x, residual = norm(o(attention) + residual), ...
//   x = down(silu(gate(x)) * up(x))
#include "exports.h"

namespace quire {

struct Weight {
  const void* data;
  const float* scale;    // null: bf16
  const int32_t* sum;    // int8
  const uint8_t* zero;   // int4: not null
  const int32_t* order;  // int4; may be null
  const bf16* bias;
  int64_t outs, ins, group;

  void multiply(const bf16* x, long x_row, bf16* y, long y_row, long rows, bool gated) const {
    if (zero)
      quire_linear_int4(x, x_row, (const uint8_t*)data, scale, zero, order, bias, y, y_row, rows, outs, ins, group, gated);
    else if (scale)
      quire_linear_int8(x, x_row, (const int8_t*)data, scale, sum, bias, y, y_row, rows, outs, ins, gated);
    else
      quire_linear(x, x_row, (const bf16*)data, bias, y, y_row, rows, outs, ins, gated);
  }
};

struct Layer {  // fixed once the model is loaded
  Weight qkv, o, gate_up, down;
  const bf16 *first_norm, *second_norm, *q_norm, *k_norm;  // the last two may be null
  void *keys, *values;
  float *key_scales, *value_scales;  // of codes
  const float* sinks;
  int64_t kind, hidden, heads, kv_heads, D, turns, block_size, window;
  float eps, head_eps, scale, softcap;
};

struct Step {  // shared by the layers of a group
  const float *cos, *sin;
  const int64_t* slots;
  const int *table, *starts, *lengths;
  int64_t tokens, rows, table_step, pairs;
};

}  // namespace quire

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

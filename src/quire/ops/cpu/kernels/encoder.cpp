// All layers of an encoder in one call: the same functions in the same order as its modules, so the same bits.
//
//   norms after the halves         x = norm(x + attention(x));  x = norm(x + mlp(x))
//   norms before the halves        y = norm(x);  x += attention(y), y = norm(x);  x += mlp(y), y = norm(x)
//
// Either way a half ends with the sum and its norm. With norms after the halves, the next half adds to the norm, else to the sum.
#include "encoder.h"

#include "norm_rope_act.h"

namespace quire {

// y = attention(x).
static void attention(const EncoderLayer& l, const EncoderStep& s, const bf16* x, bf16* y) {
  const Prompts prompts(s.starts[l.runs], s.counts[l.runs]);
  static thread_local Scratch<bf16> keep_qkv, keep_o;  // of the calling thread
  const long T = prompts.tokens(), D = l.D, wide = l.heads * D, width = wide + 2 * l.kv_heads * D;
  bf16 *qkv = keep_qkv.at_least(T * width), *o = keep_o.at_least(T * wide);
  l.qkv.multiply(x, l.qkv.ins, qkv, width, T);
  if (l.rotary >= 0) {
    const float *cos = s.cos[l.rotary], *sin = s.sin[l.rotary];
    quire_rotate(qkv, width, cos, sin, qkv, width, T, l.heads + l.kv_heads, D, s.pairs, false);
  }
  const bf16* k = qkv + wide;
  attend_packed(prompts, {l.heads, l.kv_heads, D, l.window, l.scale, l.bias, l.distances}, qkv, width, k, width, k + l.kv_heads * D, width, o);
  l.o.multiply(o, wide, y, l.o.outs, T);
}

static void mlp(const EncoderLayer& l, long T, const bf16* x, bf16* y) {
  static thread_local Scratch<bf16> keep;  // of the calling thread
  bf16* inner = keep.at_least(T * l.down.ins);
  l.up.multiply(x, l.up.ins, inner, l.down.ins, T, (int)l.act);
  l.down.multiply(inner, l.down.ins, y, l.down.outs, T);
}

}  // namespace quire

using namespace quire;

// x: [tokens, hidden], written over. `first`: the norm before the first layer (NO_NORM: none) of a model with norms before its
// halves, and the result is in y; else null, and the result is in x.
EXPORT void quire_encoder(const EncoderLayer* const* layers, long count, const Norm* first, const EncoderStep* step, long hidden,
                          bf16* x, bf16* y) {
  const long T = step->starts[0][step->counts[0]];
  static thread_local Scratch<bf16> keep;  // of the calling thread
  if (!first) {
    for (long i = 0; i < count; i++) {
      const EncoderLayer& l = *layers[i];
      attention(l, *step, x, y);
      l.after_attention.add(y, x, T, hidden);
      mlp(l, T, y, x);
      l.after_mlp.add(x, y, T, hidden);
    }
    return;
  }
  bf16* z = keep.at_least(T * hidden);
  memcpy(y, x, T * hidden * sizeof(bf16));
  first->in_place(y, hidden, T, 1, hidden);
  for (long i = 0; i < count; i++) {
    const EncoderLayer& l = *layers[i];
    attention(l, *step, y, z);
    l.after_attention.add(z, x, T, hidden);
    mlp(l, T, z, y);
    l.after_mlp.add(y, x, T, hidden);
  }
}

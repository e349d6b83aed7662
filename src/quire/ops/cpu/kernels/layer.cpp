// Decoder layers in one call, or halves of them: the same functions in the same order as layer by layer from Python, so the same bits,
// without the host's time between them (13 calls a layer cost more than a small model's arithmetic).
//
//   x, residual = norm(x + residual), x + residual;  the sum itself where a layer has no norm
//   q, k, v = qkv(x);  QK-norm and RoPE;  k, v to the cache (one pass over all three);  attention
//   x = residual_scale * norm(o(attention)), attention times the sigmoid of its gate; or a gated delta net or Mamba-2 in place of attention
//   x, residual = norm(x + residual), ...
//   x = residual_scale * norm(down(activation(gate(x)) * up(x)))
//
// A parallel layer adds attention to the residual and its input is also the input of the MLP.
#include "layer.h"

#include "delta_net.h"
#include "kv_write.h"
#include "mamba2_mixer.h"
#include "mixture.h"
#include "norm_rope_act.h"
#include "team.h"

namespace quire {

// Between qkv and attention: QK-norm and RoPE of queries and keys; keys and values go to the cache, quantized from the result in qkv.
template <int N>  // heads from h on, all of queries, keys or values
inline void prepare_heads(const Layer& l, const Step& s, bf16* qkv, bf16* q, long t, long h) {
  const long D = l.D, rotary_heads = l.heads + l.kv_heads, source = l.kv_parts == 1 && h >= rotary_heads ? h - l.kv_heads : h;
  const Norm& norm = h < l.heads ? l.q_norm : h < rotary_heads ? l.k_norm : l.v_norm;
  const bool rotates = l.rope && h < rotary_heads, norms_heads = norm.kind && !(l.flat_norms && h < rotary_heads);
  const long gates = l.gated ? l.heads : 0, step = h < l.heads && l.gated ? 2 * D : D;
  bf16* x = qkv + (t * (l.heads + gates + l.kv_parts * l.kv_heads) + (h < l.heads ? 0 : gates + source)) * D + (h < l.heads ? h * step : 0);
  alignas(64) bf16 between[N * MAX_D];
  if (norms_heads) norms<N>(x, step, norm.weight, between, D, D, norm.eps, (int)norm.kind);
  for (int i = 0; i < N; i++, h++, x += step) {
    bf16* to = h < l.heads && l.gated ? q + (t * l.heads + h) * D : x;
    if (h >= l.heads && l.kind == KV_BF16) {
      const long head = h < rotary_heads ? h - l.heads : h - rotary_heads, block = s.slots[t] / l.block_size;
      const long at = (block * l.kv_heads + head) * l.block_size + s.slots[t] % l.block_size;
      to = (bf16*)(h < rotary_heads ? l.keys : l.values) + at * D;
    }
    const bf16* from = norms_heads ? between + i * D : x;
    const long line = (s.positions ? s.positions[t] : t) * s.pairs;
    if (rotates)
      rotate(from, s.cos + line, s.sin + line, to, D, s.pairs, l.interleaved);
    else if (from != to)
      memcpy(to, from, D * sizeof(bf16));
  }
}

// What comes before the heads are apart: norms over all of them, and the scale of queries.
inline void prepare_flat(const Layer& l, const Step& s, bf16* q, long t) {
  const long wide = l.heads * l.D;
  const auto normed = [&](const Norm& norm, bf16* x, long size) { norms<1>(x, 0, norm.weight, x, 0, size, norm.eps, (int)norm.kind); };
  if (l.flat_norms && !l.flat_ranks) normed(l.q_norm, q, wide), normed(l.k_norm, q + wide, l.kv_heads * l.D);
  if (!s.query_scale) return;
  const Floats scale = floats(s.query_scale[s.positions ? s.positions[t] : t]);
  for (long i = 0; i < wide; i += 16) store(q + i, widen(q + i) * scale);
}

// Norms over the heads of all ranks, of which each keeps its own.
static void norm_among_ranks(const Layer& l, bf16* qkv, long width, long T) {
  static thread_local Scratch<bf16> keep_all, keep_ordered;  // of the calling thread
  const long size = l.flat_ranks->size, rank = l.flat_ranks->rank, q = l.heads * l.D, k = l.kv_heads * l.D, own = q + k;
  const long queries = size * q, keys = size / l.kv_copies * k;
  bf16 *all = keep_all.at_least(T * size * own), *ordered = keep_ordered.at_least(T * (queries + keys));
  gather(*l.flat_ranks, qkv, width * sizeof(bf16), T, own * sizeof(bf16), all, size * own * sizeof(bf16));
  each_of(T, T > 1, [&](long t) {
    const bf16* from = all + t * size * own;
    bf16 *to_q = ordered + t * (queries + keys), *to_k = to_q + queries, *to = qkv + t * width;
    for (long r = 0; r < size; r++) memcpy(to_q + r * q, from + r * own, q * sizeof(bf16));
    for (long r = 0; r < size; r += l.kv_copies) memcpy(to_k + r / l.kv_copies * k, from + r * own + q, k * sizeof(bf16));
    norms<1>(to_q, 0, l.q_norm.weight, to_q, 0, queries, l.q_norm.eps, (int)l.q_norm.kind);
    norms<1>(to_k, 0, l.k_norm.weight, to_k, 0, keys, l.k_norm.eps, (int)l.k_norm.kind);
    memcpy(to, to_q + rank * q, q * sizeof(bf16));
    memcpy(to + q, to_k + rank / l.kv_copies * k, k * sizeof(bf16));
  });
}

static void prepare(const Layer& l, const Step& s, bf16* qkv, bf16* q) {
  const long rotary_heads = l.heads + l.kv_heads, queries = l.gated ? 2 * l.heads : l.heads, all = queries + l.kv_parts * l.kv_heads;
  const Cached keys{l.keys, l.key_scales, l.kv_heads, l.D, l.block_size, l.kind, true};
  const Cached values{l.values, l.value_scales, l.kv_heads, l.D, l.block_size, l.kind, false};
  each_of(s.tokens, s.tokens > 1, [&](long t) {
    prepare_flat(l, s, qkv + t * all * l.D, t);
    const auto some = [&](long first, long count) {
      each_four(count, [&](long h, auto n) { prepare_heads<n>(l, s, qkv, q, t, first + h); });
    };
    some(0, l.heads);
    if (!l.kv_parts) return;
    some(l.heads, l.kv_heads), some(rotary_heads, l.kv_heads);
    if (l.kind == KV_BF16) return;
    keys.write(s.slots[t], qkv + (t * all + queries) * l.D);
    values.write(s.slots[t], qkv + (t * all + queries + l.kv_heads) * l.D);
  });
}

static void output(const Layer& l, const Norm& norm, bf16* x, long T) {
  norm.in_place(x, l.hidden, T, 1, l.hidden);
  if (l.residual_scale != 1) quire_scale(x, l.hidden, T, l.hidden, l.residual_scale, 0);
}

// y = attention(x).
static void attend(const Layer& l, const Step& s, const bf16* x, bf16* y) {
  static thread_local Scratch<bf16> keep_qkv, keep_q, keep_o;  // of the calling thread
  const long T = s.tokens, D = l.D, width = (l.heads * (l.gated ? 2 : 1) + l.kv_parts * l.kv_heads) * D, wide = l.heads * D;
  bf16 *qkv = keep_qkv.at_least(T * width), *o = keep_o.at_least(T * wide);
  bf16* q = l.gated ? keep_q.at_least(T * wide) : qkv;
  l.qkv.multiply(x, l.joined ? 2 * l.hidden : l.hidden, qkv, width, T);
  if (l.flat_ranks) norm_among_ranks(l, qkv, width, T);
  prepare(l, s, qkv, q);
  quire_attention(q, l.gated ? wide : width, o, l.keys, l.values, l.key_scales, l.value_scales, l.kind, s.table, s.table_step, s.starts,
                  s.lengths, l.sinks, s.rows, l.heads, l.kv_heads, D, D, l.block_size, l.window, l.scale, l.softcap);
  if (l.gated) quire_multiply_sigmoid(o, qkv + D, width, 2 * D, T, l.heads, D);
  l.o.multiply(o, wide, y, l.hidden, T);
}

// The first half of a layer. `first`: the residual holds nothing yet.
static void attention_sublayer(const Layer& l, const Step& s, bf16* x, bf16* residual, bool first) {
  static thread_local Scratch<bf16> keep_y;  // of the calling thread
  const long T = s.tokens;
  if (first && !l.joined) {
    memcpy(residual, x, T * l.hidden * sizeof(bf16));
    l.attention_in.in_place(x, l.hidden, T, 1, l.hidden);
  } else if (!l.joined) {
    l.attention_in.add(x, residual, T, l.hidden);
  }
  bf16* y = l.parallel ? keep_y.at_least(T * l.hidden) : x;
  if (l.delta_net)
    compute(*l.delta_net, s, x);
  else if (l.mamba2_mixer)
    compute(*l.mamba2_mixer, s, x);
  else
    attend(l, s, x, y);
  if (l.parallel)
    Norm{}.add(y, residual, T, l.hidden);
  else
    output(l, l.attention_out, y, T);
}

static void mlp(const Layer& l, long T, bf16* x) {
  static thread_local Scratch<bf16> keep_inner;  // of the calling thread
  const long inner = l.down.own_ins();
  if (l.mixture) return compute(*l.mixture, x, T);
  bf16* gated = keep_inner.at_least(T * inner);
  l.gate_up.multiply(x, l.hidden, gated, inner, T, l.act);
  l.down.multiply(gated, inner, x, l.hidden, T);
}

static void mlp_sublayer(const Layer& l, long T, bf16* x, bf16* residual) {
  if (!l.parallel) l.mlp_in.add(x, residual, T, l.hidden);
  mlp(l, T, x);
  if (!l.parallel) output(l, l.mlp_out, x, T);
}

}  // namespace quire

using namespace quire;

// Layers, or halves of them, one after the other, each with the step of its group; the norm after them unless it is null.
// adapters: of each token, see lora.h. x and residual: [tokens, hidden], written over. `first`: the residual holds nothing yet.
EXPORT void quire_layers(const Layer* const* layers, const int64_t* groups, long count, const Step* const* steps, long tokens,
                         const int64_t* adapters, bf16* x, bf16* residual, int first, const Norm* norm) {
  const AdapterScope scope(adapters, tokens);
  for (long i = 0; i < count; i++) {
    const Layer& l = *layers[i];
    if (l.qkv.data || l.delta_net || l.mamba2_mixer) attention_sublayer(l, *steps[groups[i]], x, residual, first && i == 0);
    if (l.gate_up.data || l.mixture) mlp_sublayer(l, tokens, x, residual);
  }
  if (norm) norm->add(x, residual, tokens, layers[0]->hidden);
}

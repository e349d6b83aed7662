// A layer in one call has the bits of its parts.
#include "small_layer.h"

CHECK(layer) {
  Random random(5);
  SmallLayer small(random, 2);
  constexpr long hidden = SmallLayer::hidden, heads = SmallLayer::heads, kv = SmallLayer::kv, D = SmallLayer::D;
  constexpr long inner = SmallLayer::inner, block = SmallLayer::block;
  constexpr long width = SmallLayer::width, P = SmallLayer::P, T = 20;
  quire::Layer& l = small.layer;
  auto &keys = small.keys, &values = small.values;
  const auto cos = random.floats(T * P), sin = random.floats(T * P);
  Guarded<int64_t> slots(T);
  for (long t = 0; t < T; t++) slots[t] = t < block ? block + t : t - block;
  Guarded<int> table(2), starts(2), lengths(1);
  table[0] = 1, table[1] = 0, starts[0] = 0, starts[1] = (int)T, lengths[0] = (int)T;
  const quire::Step s{cos, sin, nullptr, slots, table, starts, lengths, T, 1, 2, P};
  for (int first : {1, 0}) {
    auto x = random.bf16s(T * hidden), residual = random.bf16s(T * hidden);
    Guarded<bf16> x2(T * hidden), residual2(T * hidden), qkv(T * width), o(T * heads * D), gated(T * inner);
    memcpy(x2.data, x.data, T * hidden * 2);
    memcpy(residual2.data, first ? x.data : residual.data, T * hidden * 2);
    const quire::Layer* one[] = {&l};
    const quire::Step* only[] = {&s};
    const int64_t none[] = {0};
    quire_layers(one, none, 1, only, T, x, residual, first, nullptr, 0);
    if (first)
      quire_rms_norm(x2, hidden, l.first_norm, x2, hidden, T, 1, hidden, l.eps, 0);
    else
      quire_add_rms_norm(x2, residual2, l.first_norm, T, hidden, l.eps, 0);
    l.qkv.multiply(x2, hidden, qkv, width, T, false);
    bf16 *k = qkv + heads * D, *v = k + kv * D;
    quire_rms_norm(qkv, width, l.q_norm, qkv, width, T, heads, D, l.eps, 0);
    quire_rms_norm(k, width, l.k_norm, k, width, T, kv, D, l.eps, 0);
    quire_rotate(qkv, width, cos, sin, qkv, width, T, heads, D, P);
    quire_rotate(k, width, cos, sin, k, width, T, kv, D, P);
    quire_write_cache(k, width, keys, nullptr, slots, T, kv, D, block, 0, 1);
    quire_write_cache(v, width, values, nullptr, slots, T, kv, D, block, 0, 0);
    quire_attention(qkv, width, o, keys, values, nullptr, nullptr, 0, table, 2, starts, lengths, nullptr, 1, heads, kv, D, D,
                    block, 0, l.scale, 0);
    l.o.multiply(o, heads * D, x2, hidden, T, false);
    quire_add_rms_norm(x2, residual2, l.second_norm, T, hidden, l.eps, 0);
    l.gate_up.multiply(x2, hidden, gated, inner, T, true);
    l.down.multiply(gated, inner, x2, hidden, T, false);
    same("layer", x.data, x2.data, T * hidden);
    same("layer's residual", residual.data, residual2.data, T * hidden);
  }
  const quire::Layer* both[] = {&l, &l};
  const quire::Step* steps[] = {&s};
  const int64_t groups[] = {0, 0};
  auto x = random.bf16s(T * hidden);
  Guarded<bf16> x2(T * hidden), residual2(T * hidden), x3(T * hidden);
  memcpy(x2.data, x.data, T * hidden * 2);
  memcpy(x3.data, x.data, T * hidden * 2);
  Guarded<bf16> residual(T * hidden), residual3(T * hidden);
  quire_layers(both, groups, 2, steps, T, x, residual, 1, l.first_norm, l.eps);
  // The same by halves: each is a layer without the weights of the other.
  quire::Layer attention = l, mlp = l;
  attention.gate_up.data = nullptr, mlp.qkv.data = nullptr;
  const quire::Layer *first_half[] = {&attention}, *second_half[] = {&mlp};
  for (int first : {1, 0}) {
    quire_layers(first_half, groups, 1, steps, T, x2, residual2, first, nullptr, 0);
    quire_layers(second_half, groups, 1, nullptr, T, x2, residual2, 0, nullptr, 0);
  }
  quire_add_rms_norm(x2, residual2, l.first_norm, T, hidden, l.eps, 0);
  same("layers", x.data, x2.data, T * hidden);

  // Angles by position, here the other way round.
  Guarded<float> back_cos(T * P), back_sin(T * P);
  Guarded<int64_t> positions(T);
  for (long t = 0; t < T; t++) {
    positions[t] = T - 1 - t;
    memcpy(back_cos.data + t * P, cos.data + positions[t] * P, P * sizeof(float));
    memcpy(back_sin.data + t * P, sin.data + positions[t] * P, P * sizeof(float));
  }
  const quire::Step placed{back_cos, back_sin, positions, slots, table, starts, lengths, T, 1, 2, P};
  const quire::Step* others[] = {&placed};
  quire_layers(both, groups, 2, others, T, x3, residual3, 1, l.first_norm, l.eps);
  same("layers by position", x3.data, x2.data, T * hidden);
}

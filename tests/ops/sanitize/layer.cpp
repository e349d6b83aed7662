// A layer in one call has the bits of its parts.
#include "delta_net.h"
#include "mamba2_mixer.h"
#include "small_layer.h"

CHECK(layer) {
  Random random(5);
  SmallLayer small(random, 2);
  constexpr long hidden = SmallLayer::hidden, heads = SmallLayer::heads, kv = SmallLayer::kv, D = SmallLayer::D;
  constexpr long inner = SmallLayer::inner, block = SmallLayer::block;
  constexpr long width = SmallLayer::width, P = SmallLayer::P, T = 20;
  quire::Layer& l = small.layer;
  const quire::Norm& in = l.attention_in;
  auto &keys = small.keys, &values = small.values;
  const auto cos = random.floats(T * P), sin = random.floats(T * P);
  Guarded<int64_t> slots(T);
  for (long t = 0; t < T; t++) slots[t] = t < block ? block + t : t - block;
  Guarded<int> table(2), starts(2), lengths(1);
  table[0] = 1, table[1] = 0, starts[0] = 0, starts[1] = (int)T, lengths[0] = (int)T;
  const quire::Step s{cos, sin, nullptr, nullptr, slots, nullptr, nullptr, table, starts, lengths, T, 1, 2, P};
  for (int first : {1, 0}) {
    auto x = random.bf16s(T * hidden), residual = random.bf16s(T * hidden);
    Guarded<bf16> x2(T * hidden), residual2(T * hidden), qkv(T * width), o(T * heads * D), gated(T * inner);
    memcpy(x2.data, x.data, T * hidden * 2);
    memcpy(residual2.data, first ? x.data : residual.data, T * hidden * 2);
    const quire::Layer* one[] = {&l};
    const quire::Step* only[] = {&s};
    const int64_t none[] = {0};
    quire_layers(one, none, 1, only, T, nullptr, x, residual, first, nullptr);
    if (first)
      quire_norm(x2, hidden, in.weight, x2, hidden, T, 1, hidden, in.eps, quire::RMS);
    else
      quire_add_norm(x2, residual2, in.weight, T, hidden, in.eps, quire::RMS);
    l.qkv.multiply(x2, hidden, qkv, width, T);
    bf16 *k = qkv + heads * D, *v = k + kv * D;
    quire_norm(qkv, width, l.q_norm.weight, qkv, width, T, heads, D, in.eps, quire::RMS);
    quire_norm(k, width, l.k_norm.weight, k, width, T, kv, D, in.eps, quire::RMS);
    quire_rotate(qkv, width, cos, sin, qkv, width, T, heads, D, P, 0);
    quire_rotate(k, width, cos, sin, k, width, T, kv, D, P, 0);
    quire_write_cache(k, width, keys, nullptr, slots, T, kv, D, block, 0, 1);
    quire_write_cache(v, width, values, nullptr, slots, T, kv, D, block, 0, 0);
    quire_attention(qkv, width, o, keys, values, nullptr, nullptr, 0, table, 2, starts, lengths, nullptr, 1, heads, kv, D, D,
                    block, 0, l.scale, 0);
    l.o.multiply(o, heads * D, x2, hidden, T);
    quire_add_norm(x2, residual2, l.mlp_in.weight, T, hidden, in.eps, quire::RMS);
    l.gate_up.multiply(x2, hidden, gated, inner, T, quire::SILU);
    l.down.multiply(gated, inner, x2, hidden, T);
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
  quire_layers(both, groups, 2, steps, T, nullptr, x, residual, 1, &in);
  // The same by halves: each is a layer without the weights of the other.
  quire::Layer attention = l, mlp = l;
  attention.gate_up.data = nullptr, mlp.qkv.data = nullptr;
  const quire::Layer *first_half[] = {&attention}, *second_half[] = {&mlp};
  for (int first : {1, 0}) {
    quire_layers(first_half, groups, 1, steps, T, nullptr, x2, residual2, first, nullptr);
    quire_layers(second_half, groups, 1, nullptr, T, nullptr, x2, residual2, 0, nullptr);
  }
  quire_add_norm(x2, residual2, in.weight, T, hidden, in.eps, quire::RMS);
  same("layers", x.data, x2.data, T * hidden);

  // Angles by position, here the other way round.
  Guarded<float> back_cos(T * P), back_sin(T * P);
  Guarded<int64_t> positions(T);
  for (long t = 0; t < T; t++) {
    positions[t] = T - 1 - t;
    memcpy(back_cos.data + t * P, cos.data + positions[t] * P, P * sizeof(float));
    memcpy(back_sin.data + t * P, sin.data + positions[t] * P, P * sizeof(float));
  }
  const quire::Step placed{back_cos, back_sin, nullptr, positions, slots, nullptr, nullptr, table, starts, lengths, T, 1, 2, P};
  const quire::Step* others[] = {&placed};
  quire_layers(both, groups, 2, others, T, nullptr, x3, residual3, 1, &in);
  same("layers by position", x3.data, x2.data, T * hidden);
}

// The options of a layer, together: what they read and write.
CHECK(layer_options) {
  Random random(6);
  SmallLayer small(random, 2);
  constexpr long hidden = SmallLayer::hidden, block = SmallLayer::block, P = SmallLayer::P, T = 20;
  quire::Layer& l = small.layer;
  const auto cos = random.floats(T * P), sin = random.floats(T * P), scales = random.floats(T);
  Guarded<int64_t> slots(T);
  for (long t = 0; t < T; t++) slots[t] = t < block ? block + t : t - block;
  Guarded<int> table(2), starts(2), lengths(1);
  table[0] = 1, table[1] = 0, starts[0] = 0, starts[1] = (int)T, lengths[0] = (int)T;
  const quire::Step s{cos, sin, scales, nullptr, slots, nullptr, nullptr, table, starts, lengths, T, 1, 2, P};
  const auto flat_q = random.bf16s(SmallLayer::heads * SmallLayer::D), flat_k = random.bf16s(SmallLayer::kv * SmallLayer::D);
  const quire::Layer* one[] = {&l};
  const quire::Step* only[] = {&s};
  const int64_t none[] = {0};
  l.q_norm.weight = flat_q, l.k_norm.weight = flat_k, l.v_norm = {nullptr, quire::RMS, 1e-6f};
  l.attention_out = l.mlp_in, l.mlp_out = l.attention_in, l.attention_in.kind = quire::LAYER_NORM;
  l.flat_norms = l.interleaved = 1, l.window = 7, l.softcap = 3, l.act = quire::GELU, l.residual_scale = 0.5f;
  const auto x = random.bf16s(T * hidden);
  std::vector<Guarded<bf16>> found;
  for (bool parallel : {false, true}) {
    l.parallel = parallel;
    Guarded<bf16> y(T * hidden), residual(T * hidden);
    memcpy(y.data, x.data, T * hidden * sizeof(bf16));
    quire_layers(one, none, 1, only, T, nullptr, y, residual, 1, &l.mlp_in);
    std::vector<double> sums(T * hidden);
    for (long i = 0; i < T * hidden; i++) sums[i] = value_of(y[i]);
    near("layer's options", y.data, sums, 1e-6);  // finite
    found.push_back(std::move(y));
  }
  for (long parts : {1L, 0L}) {  // keys are values, too; keys and values of another layer
    l.kv_parts = parts, l.flat_norms = 0, l.q_norm = l.k_norm = quire::Norm{nullptr, quire::RMS, 1e-6f};
    l.qkv.outs = (SmallLayer::heads + parts * SmallLayer::kv) * SmallLayer::D;
    Guarded<bf16> y(T * hidden), residual(T * hidden);
    memcpy(y.data, x.data, T * hidden * sizeof(bf16));
    quire_layers(one, none, 1, only, T, nullptr, y, residual, 1, &l.mlp_in);
  }
  comparisons++;
  if (!memcmp(found[0].data, found[1].data, T * hidden * sizeof(bf16))) failures++, fprintf(stderr, "parallel changes nothing\n");
}

// A gate of attention's output, and a delta net or Mamba-2 in place of attention: whole, and cut into two steps, give the same bits.
CHECK(gated_layers) {
  Random random(7);
  SmallLayer small(random, 2);
  constexpr long hidden = SmallLayer::hidden, block = SmallLayer::block, P = SmallLayer::P, T = 20, CUT = 13;
  constexpr long key_heads = 2, K = 16, heads = 4, V = 32, taps = 3, keys = key_heads * K, values = heads * V;
  constexpr long channels = 2 * keys + values, conv_size = (taps - 1) * channels, size = heads * K * V;
  const auto made = [&](long outs, long ins) { return small.weight(outs, outs, ins, false, random.bf16s(outs * ins, 0.1f)); };
  const auto cos = random.floats(T * P), sin = random.floats(T * P), bias = random.floats(heads), a_log = random.floats(heads);
  const auto conv = random.bf16s(channels * taps), norm = random.bf16s(V), x = random.bf16s(T * hidden);
  Guarded<bf16> conv_state(2 * conv_size);
  Guarded<float> state(2 * size);
  quire::DeltaNet net{made(channels + values, hidden), made(32, hidden), made(hidden, values), conv, norm, bias, a_log, conv_state,
                      state, conv_size, size, key_heads, K, heads, V, taps, 0, heads, key_heads, 0, 1e-6f};
  const auto mamba_bias = random.bf16s(channels), mamba_norm = random.bf16s(values);
  const auto skip = random.floats(heads);
  quire::Mamba2Mixer mamba{made(2 * values + 2 * keys + 32, hidden), made(hidden, values), conv, mamba_bias, mamba_norm, bias, a_log, skip,
                      conv_state, state, conv_size, size, key_heads, K, heads, V, taps, 0, values / key_heads, 1, 0.f, 1e9f, 1e-6f};
  quire::Layer gated = small.layer, recurrent{};
  gated.qkv = made((2 * SmallLayer::heads + 2 * SmallLayer::kv) * SmallLayer::D, hidden), gated.gated = 1;
  recurrent.delta_net = &net, recurrent.attention_in = gated.mlp_in, recurrent.hidden = hidden, recurrent.residual_scale = 1;
  const quire::Layer* layers[] = {&recurrent, &gated};
  const int64_t groups[] = {0, 0}, rows[] = {1};
  Guarded<int64_t> slots(T);
  for (long t = 0; t < T; t++) slots[t] = t < block ? block + t : t - block;
  Guarded<int> table(2), starts(2), lengths(1);
  table[0] = 1, table[1] = 0, starts[0] = 0;
  const auto run = [&](long from, long end, bf16* y) {
    starts[1] = (int)(end - from), lengths[0] = (int)end;
    const quire::Step s{cos + from * P, sin + from * P, nullptr, nullptr, slots + from, rows, nullptr, table, starts, lengths, end - from, 1, 2, P};
    const quire::Step* steps[] = {&s};
    Guarded<bf16> residual((end - from) * hidden);
    memcpy(y, x + from * hidden, (end - from) * hidden * sizeof(bf16));
    quire_layers(layers, groups, 2, steps, end - from, nullptr, y, residual, 1, &gated.mlp_in);
  };
  for (int which : {0, 1, 2}) {
    net.interleaved = which == 1;
    if (which == 2) recurrent.delta_net = nullptr, recurrent.mamba2_mixer = &mamba;
    Guarded<bf16> whole(T * hidden), parts(T * hidden);
    for (auto* y : {&whole, &parts}) {
      memset(conv_state.data, 0, 2 * conv_size * sizeof(bf16)), memset(state.data, 0, 2 * size * sizeof(float));
      if (y == &whole) run(0, T, *y);
      else run(0, CUT, *y), run(CUT, T, *y + CUT * hidden);
    }
    same(named("gated_layers", {which}), parts.data, whole.data, T * hidden);
  }
}

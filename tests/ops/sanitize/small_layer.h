// A small layer with random weights, for the checks of what is made of layers.
#pragma once
#include "harness.h"
#include "layer.h"
#include "norm_rope_act.h"

struct SmallLayer {
  static constexpr long hidden = 64, heads = 4, kv = 2, D = 32, inner = 96, block = 16, width = (heads + 2 * kv) * D, P = D / 2;
  std::vector<Guarded<bf16>> memory;
  Guarded<bf16> keys, values;
  quire::Layer layer{};

  SmallLayer(Random& random, long num_blocks)
      : keys(num_blocks * kv * block * D), values(num_blocks * kv * block * D) {
    const auto made = [&](long outs, long ins, bool gated) {
      return weight(outs, outs, ins, gated, random.bf16s(outs * ins, 0.1f));
    };
    const auto norm = [&](long size) { return quire::Norm{memory.emplace_back(random.bf16s(size)).data, quire::RMS, 1e-6f}; };
    quire::Layer& l = layer;
    l.qkv = made(width, hidden, false), l.o = made(hidden, heads * D, false);
    l.gate_up = made(2 * inner, hidden, true), l.down = made(hidden, inner, false);
    l.attention_in = norm(hidden), l.mlp_in = norm(hidden), l.q_norm = norm(D), l.k_norm = norm(D);
    l.keys = keys.data, l.values = values.data;
    l.hidden = hidden, l.heads = heads, l.kv_heads = kv, l.kv_parts = 2, l.D = D, l.turns = 1, l.block_size = block;
    l.act = quire::SILU, l.scale = 0.2f, l.residual_scale = 1;
  }

  // Packed, of `filled` rows of w and zeros behind them.
  quire::Weight weight(long outs, long filled, long ins, bool gated, const bf16* w) {
    memory.emplace_back(outs * ins);
    quire_pack(w, memory.back(), outs, filled, ins, gated);
    return quire::Weight{memory.back().data, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, outs, ins, 0};
  }
};

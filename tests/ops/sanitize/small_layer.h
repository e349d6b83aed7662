// A small layer with random weights, or a rank's part of it, for the checks of what is made of layers.
#pragma once
#include "harness.h"
#include "layer.h"
#include "norm_rope_act.h"

struct SmallLayer {
  static constexpr long hidden = 64, heads = 4, kv = 2, D = 32, inner = 128, block = 16, width = (heads + 2 * kv) * D, P = D / 2;
  std::vector<Guarded<bf16>> memory;
  Guarded<bf16> keys, values;
  quire::Layer layer{};
  quire::RankLink* link;

  // `link`: of the rank whose part this is; null: the whole layer.
  SmallLayer(Random& random, long num_blocks, quire::RankLink* link = nullptr)
      : keys(num_blocks * kv * block * D), values(num_blocks * kv * block * D), link(link) {
    const auto norm = [&](long size) { return quire::Norm{memory.emplace_back(random.bf16s(size)).data, quire::RMS, 1e-6f}; };
    quire::Layer& l = layer;
    l.qkv = made(random, {heads * D, kv * D, kv * D}, hidden), l.o = made(random, {hidden}, heads * D);
    l.gate_up = made(random, {inner, inner}, hidden, true), l.down = made(random, {hidden}, inner);
    l.o.x_ranks = l.o.y_ranks = l.down.x_ranks = l.down.y_ranks = link;
    l.attention_in = norm(hidden), l.mlp_in = norm(hidden), l.q_norm = norm(D), l.k_norm = norm(D);
    l.keys = keys.data, l.values = values.data;
    l.hidden = hidden, l.heads = heads / size(), l.kv_heads = kv / size(), l.kv_parts = 2, l.D = D, l.rope = 1, l.block_size = block;
    l.act = quire::SILU, l.scale = 0.2f, l.residual_scale = 1;
  }

  long size() const { return link ? link->size : 1; }

  // This rank's rows of each of the sections, which follow each other.
  Guarded<bf16> part(const bf16* w, std::initializer_list<long> sections, long ins) const {
    long outs = 0, to = 0, from = 0;
    for (long section : sections) outs += section / size();
    Guarded<bf16> own(outs * ins);
    for (long section : sections) {
      const long count = section / size();
      memcpy(own.data + to * ins, w + (from + (link ? link->rank : 0) * count) * ins, count * ins * sizeof(bf16));
      to += count, from += section;
    }
    return own;
  }

  quire::Weight made(Random& random, std::initializer_list<long> sections, long ins, bool gated = false) {
    long outs = 0;
    for (long section : sections) outs += section;
    const auto own = part(random.bf16s(outs * ins, 0.1f), sections, ins);
    return weight(outs / size(), outs / size(), ins, gated, own);
  }

  // Packed, of `filled` rows of w and zeros after them.
  quire::Weight weight(long outs, long filled, long ins, bool gated, const bf16* w) {
    memory.emplace_back(outs * ins);
    quire_pack(w, memory.back(), outs, filled, ins, gated);
    return quire::Weight{memory.back().data, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, outs, ins, 0};
  }
};

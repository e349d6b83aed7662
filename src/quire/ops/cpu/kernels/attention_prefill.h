// Many queries against a split of the cache, which is packed once for all of an item's (kv_tiles.h).
#pragma once
#include "attention_decode.h"

namespace quire {

struct Memory {  // of one thread
  Scratch<bf16> keys, values, q, columns, weights;
  Scratch<float> scores, scales, running, merged;
  Scratch<float> query_steps, weight_steps, ordered;  // attention_int8_split.h
  Shape shape;                                        // attention_decode.h
};

// A split of the cache while an item's queries meet it: packed once, as far as they have asked for.
struct Packed {
  Memory& m;
  const Tokens& tokens;
  bool few;  // nothing is packed: attention_decode.h
  long first = 0, stop = 0;
  long keys = 0, values = 0;  // tokens from `first` on that are packed

  void begin(long from, long to) {  // from: a multiple of TILE
    if (first <= from && to <= stop) return;
    first = from, stop = to, keys = values = 0;
    const long room = padded(to - from, TILE);
    m.keys.at_least(room * tokens.cache.D), m.values.at_least(room * tokens.cache.E), m.scales.at_least(2 * room);
  }
  float* scales_of(long t) const { return m.scales.data + 2 * ((t - first) / TILE * TILE) + t % TILE; }

  // Keys and values [t, t + width), which are packed if they are not yet; those of values lie in one tile.
  const bf16* keys_until(long t, long width) {
    const long D = tokens.cache.D;
    for (; keys < t - first + width; keys += 32) {
      float* scales = scales_of(first + keys);
      pack_32_keys(tokens, first + keys, m.keys.data + keys * D, scales, scales + TILE);
    }
    return m.keys.data + (t - first) * D;
  }
  const bf16* values_until(long t, long width) {
    const long E = tokens.cache.E;
    for (; values < t - first + width; values += 32) {
      bf16* to = m.values.data + values / TILE * TILE * E;
      if (tokens.cache.kind == HALVED)
        pack_32_by_fours(tokens, first + values, to + values % TILE / 64 * STEP + values % 64 / 4 * 32, HALVED_PANEL);
      else
        pack_32_values(tokens, first + values, 0, E, to + values % TILE / 32 * STEP, PANEL);
    }
    return m.values.data + (t - first) / TILE * TILE * E + t % TILE / 32 * STEP;
  }
  static constexpr long PANEL = TILE / 32 * STEP, HALVED_PANEL = TILE / 64 * STEP_BYTES;
};

// Queries [first, first + count) of an item against a split. Scores of 32 tokens become weights when those of the next 32 are
// about to be found: what was just written for them, and the products, need not be waited for.
inline void meet_many(const Call& call, const Reach& reach, Packed& packed, long first, int count, State s) {
  Memory& m = packed.m;
  const long D = call.cache.D, E = call.cache.E;
  const long from = std::max(packed.first, reach.low(first) / 32 * 32);
  const long stop = std::min(packed.stop, reach.position(first + count - 1) + 1);
  const bf16* q = m.q.data + first * D;
  s = s.from(first, E);
  Running running(reach, first, count, s.sums);
  long met = from;  // weights of tokens from here on have not met their values
  bool found = false;
  const auto meet_values = [&](long to) {
    if (met == to) return found;
    const bf16* values = packed.values_until(met, to - met);
    const auto product = found ? product_of_rows<Bf16, true> : product_of_rows<Bf16, false>;
    for (long e = 0; e < E; e += 32, values += Packed::PANEL)
      product(count, m.weights.data + met % TILE, TILE, values, STEP, (to - met) / 32, s.sums + e, E, {nullptr, 0});
    met = to;
    return found = true;
  };
  with_softmax(call, running, [&](auto softmax) {
    long t = from;
    for (; t < stop; t += 32) {
      float* scores = m.scores.data + t % 64 * ROWS;
      const bf16* keys = packed.keys_until(t, 32);
      softmax.end([&] { return meet_values(t - 32); });
      if (t % TILE == 0) meet_values(t);
      product_of_rows<Bf16, false>(count, q, D, keys, STEP, D / 32, scores, 32);
      softmax.begin({scores, 32, m.weights.data + t % TILE, TILE, packed.scales_of(t), t});
    }
    softmax.end([&] { return meet_values(t - 32); });
    meet_values(t);
  });
  if (!found) memset(s.sums, 0, count * E * sizeof(float));
  running.end(s);
}

// The same by bytes (attention_int8_split.h), a tile after the other.
inline void meet_many_halves(const Call& call, const Reach& reach, Packed& packed, long first, int count, State s) {
  Memory& m = packed.m;
  const long D = call.cache.D, E = call.cache.E, last = reach.position(first + count - 1);
  const bf16* q = m.q.data + first * D;
  float* sums = s.sums + first * E;
  bool fresh = true;
  for (long start = std::max(packed.first, reach.low(first) / TILE * TILE); start < packed.stop && start <= last; start += TILE) {
    const long end = std::min(start + TILE, packed.tokens.end), width = padded(std::min(end, last + 1) - start, 64);
    const bf16* keys = packed.keys_until(start, width);
    scores_by_halves(q, m.query_steps.data + first, count, keys, D, width, m.scores.data);
    soften_halves(call, reach, m.scores.data, m.weights.data, m.weight_steps.data, packed.scales_of(start), start, end, first,
                  count, width, s);
    const bf16* values = packed.values_until(start, width);
    values_by_halves(m.weights.data, m.weight_steps.data, count, values, Packed::HALVED_PANEL, E, width, fresh, sums);
    fresh = false;
  }
  if (fresh) memset(sums, 0, count * E * sizeof(float));
}

}  // namespace quire

// Many queries against a split of the cache, which is packed once for all queries of an item (kv_tiles.h).
#pragma once
#include "attention_decode.h"

namespace quire {

struct Memory {  // of one thread
  Scratch<bf16> keys, values, q, columns, weights;
  Scratch<float> scores, scales, running, merged;
  Scratch<float> query_steps, weight_steps, ordered;  // attention_int8_split.h
  Shape shape;                                        // attention_decode.h
};

// The packed part of a split, for all queries of an item: packed once, as far as they have needed it.
struct Packed {
  Memory& m;
  const Tokens& tokens;
  bool few;  // reads the cache unpacked: attention_decode.h
  long first = 0, stop = 0;
  long keys = 0, values = 0;  // tokens from `first` on that are packed

  void begin(long from, long to) {  // from: a multiple of TILE
    if (first <= from && to <= stop) return;
    first = from, stop = to, keys = values = 0;
    const long room = padded(to - from, TILE);
    m.keys.at_least(room * tokens.cache.D), m.values.at_least(room * tokens.cache.E), m.scales.at_least(2 * room);
  }
  float* scales_of(long t) const { return m.scales.data + 2 * ((t - first) / TILE * TILE) + t % TILE; }

  // Keys and values [t, t + width), packed on first use; the values must be in one tile.
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
      if (tokens.cache.kind == KV_INT8_SPLIT)
        pack_32_bytes(tokens, first + values, to + values % TILE / 64 * STEP + values % 64 / 4 * 32, SPLIT_PANEL);
      else
        pack_32_values(tokens, first + values, 0, E, to + values % TILE / 32 * STEP, PANEL);
    }
    return m.values.data + (t - first) / TILE * TILE * E + t % TILE / 32 * STEP;
  }
  static constexpr long PANEL = TILE / 32 * STEP, SPLIT_PANEL = TILE / 64 * STEP_BYTES;
};

// Queries [first, first + count) of an item against a split. Scores of 32 tokens become weights just before the next 32 are
// computed, so that neither step waits for stores that it has just made.
inline void attend_many(const Call& call, const Reach& reach, Packed& packed, long first, int count, State s) {
  Memory& m = packed.m;
  const long D = call.cache.D, E = call.cache.E;
  const long from = std::max(packed.first, reach.low(first) / 32 * 32);
  const long stop = std::min(packed.stop, reach.high(first + count - 1));
  const bf16* q = m.q.data + first * D;
  s = s.from(first, E);
  RunningSoftmax running(reach, first, count, s.sums);
  long done = from;  // values before this token are added
  bool found = false;
  const auto add_values_until = [&](long to) {
    if (done == to) return found;
    const bf16* values = packed.values_until(done, to - done);
    const auto product = found ? product_of_rows<Bf16, true> : product_of_rows<Bf16, false>;
    for (long e = 0; e < E; e += 32, values += Packed::PANEL)
      product(count, m.weights.data + done % TILE, TILE, values, STEP, (to - done) / 32, s.sums + e, E, {nullptr, 0});
    done = to;
    return found = true;
  };
  with_softmax(call, running, [&](auto softmax) {
    long t = from;
    for (; t < stop; t += 32) {
      float* scores = m.scores.data + t % 64 * ROWS;
      const bf16* keys = packed.keys_until(t, 32);
      softmax.end([&] { return add_values_until(t - 32); });
      if (t % TILE == 0) add_values_until(t);
      product_of_rows<Bf16, false>(count, q, D, keys, STEP, D / 32, scores, 32);
      softmax.begin({scores, 32, m.weights.data + t % TILE, TILE, packed.scales_of(t), t});
    }
    softmax.end([&] { return add_values_until(t - 32); });
    add_values_until(t);
  });
  if (!found) memset(s.sums, 0, count * E * sizeof(float));
  running.end(s);
}

// The same for a cache of split int8 (attention_int8_split.h), one tile at a time.
inline void attend_many_split(const Call& call, const Reach& reach, Packed& packed, long first, int count, State s) {
  Memory& m = packed.m;
  const long D = call.cache.D, E = call.cache.E, last = reach.high(first + count - 1) - 1;
  const bf16* q = m.q.data + first * D;
  float* sums = s.sums + first * E;
  bool fresh = true;
  for (long start = std::max(packed.first, reach.low(first) / TILE * TILE); start < packed.stop && start <= last; start += TILE) {
    const long end = std::min(start + TILE, packed.tokens.end), width = padded(std::min(end, last + 1) - start, 64);
    const bf16* keys = packed.keys_until(start, width);
    scores_split(q, m.query_steps.data + first, count, keys, D, width, m.scores.data);
    softmax_split(call, reach, m.scores.data, m.weights.data, m.weight_steps.data, packed.scales_of(start), start, end, first,
                  count, width, s);
    const bf16* values = packed.values_until(start, width);
    values_split(m.weights.data, m.weight_steps.data, count, values, Packed::SPLIT_PANEL, E, width, fresh, sums);
    fresh = false;
  }
  if (fresh) memset(sums, 0, count * E * sizeof(float));
}

}  // namespace quire

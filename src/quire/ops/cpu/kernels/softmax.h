// Scores of a tile -> weights, and the running softmax: the largest score so far, the sum of all weights, the sums of values.
#pragma once
#include "attention.h"

namespace quire {

// The keys [from, to) of a tile that a query sees.
struct Seen {
  long from, to;
  bool all(long t) const { return t >= from && t + 16 <= to; }  // of the 16 from t on
  Mask some(long t) const { return span(from - t, to - t); }
  long first() const { return from / 16 * 16; }
};

// What scores are multiplied by before 2^x. PLAIN: neither codes nor a softcap, and the product is left to `weigh`.
inline float factor_of(const Call& call) { return call.softcap > 0 ? call.scale / call.softcap : call.scale * LOG2E; }

// The largest score. scales: of codes, [2, TILE], keys' and values'.
template <bool PLAIN>
inline float peak(const Call& call, float* scores, Seen seen, const float* scales) {
  const Floats factor = floats(factor_of(call)), lowest = floats(LOWEST);
  Floats even = lowest, odd = lowest;
  for (long t = seen.first(); t < seen.to; t += 16) {
    Floats x = load(scores + t);
    if (!PLAIN) {
      x = x * factor;
      if (call.cache.kind != SHORT) x = x * load(scales + t);
      if (call.softcap > 0) x = tanh_of(x) * floats(call.softcap * LOG2E);
      store(scores + t, x);
    }
    if (!seen.all(t)) x = select(seen.some(t), x, lowest);
    const Floats last = even;
    even = max(odd, x);
    odd = last;
  }
  return max_of(max(even, odd)) * (PLAIN ? factor_of(call) : 1.f);
}

// Scores -> weights in bf16, 0 for keys that are not seen, up to `width`; the state moves on.
template <bool PLAIN>
inline void weigh(const Call& call, const float* scores, bf16* weights, Seen seen, long width, const float* scales,
                  float top, State s) {
  const Floats factor = floats(PLAIN ? factor_of(call) : 1.f), below = floats(-top);
  Floats total = floats(0.f);
  const auto weight = [&](long t) {
    Floats x = exp2_below(fma(load(scores + t), factor, below));
    if (!seen.all(t)) x = keep(seen.some(t), x);
    total = total + x;
    return !PLAIN && call.cache.kind != SHORT ? x * load(scales + TILE + t) : x;
  };
  const long first = seen.from / 32 * 32, last = padded(seen.to, 32);
  memset(weights, 0, first * sizeof(bf16));
  for (long t = first; t < last; t += 32) {
    const Floats x = weight(t);
    store(weights + t, x, weight(t + 16));
  }
  memset(weights + last, 0, (width - last) * sizeof(bf16));
  // Before any key there is nothing to shrink (and exp2f of so little is slow).
  const float shrink = *s.top == top || *s.top == LOWEST ? 1.f : exp2f(*s.top - top);
  *s.total = fmaf(*s.total, shrink, sum_of(total));
  *s.top = top;
  if (shrink == 1.f) return;
  for (long e = 0; e < call.cache.E; e += 16) store(s.sums + e, floats(shrink) * load(s.sums + e));
}

// Scores of `count` queries -> weights: [count, TILE] each.
template <bool PLAIN>
void soften(const Call& call, const Reach& reach, float* scores, bf16* weights, const float* scales, long start, long end,
            long first, int count, long width, State s) {
  Seen seen[ROWS];
  float top[ROWS];
  for (int i = 0; i < count; i++) {
    const long position = reach.position(first + i), low = reach.low(first + i);
    seen[i] = {std::max<long>(0, low - start), std::min(end, position + 1) - start};
    if (seen[i].to > seen[i].from)
      top[i] = std::max(s.top[first + i], peak<PLAIN>(call, scores + i * TILE, seen[i], scales));
  }
  for (int i = 0; i < count; i++) {
    const State one = {s.top + first + i, s.total + first + i, s.sums + (first + i) * call.cache.E};
    if (seen[i].to > seen[i].from)
      weigh<PLAIN>(call, scores + i * TILE, weights + i * TILE, seen[i], width, scales, top[i], one);
    else
      memset(weights + i * TILE, 0, width * sizeof(bf16));
  }
}

}  // namespace quire

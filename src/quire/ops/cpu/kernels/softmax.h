// Scores of a tile -> weights, and the running softmax: the largest score so far, the sum of all weights, the sums of values.
#pragma once
#include <type_traits>

#include "halves.h"

namespace quire {

// The keys [from, to) of a tile that a query sees.
struct Seen {
  long from, to;
  bool any() const { return to > from; }
  bool operator==(const Seen& other) const { return from == other.from && to == other.to; }
  Mask some(long t) const { return span(from - t, to - t); }  // of the 16 from t on
};

// What scores are multiplied by before 2^x. PLAIN: neither codes nor a softcap, and the product is left to `weigh`.
inline float factor_of(const Call& call) { return call.softcap > 0 ? call.scale / call.softcap : call.scale * LOG2E; }

// 2^x of x that are not above 0, but for rounding; relative error up to 8e-5, a fiftieth of what rounding to bf16 loses.
inline Floats weight_of(Floats x) {
#if defined(__AVX512DQ__)
  const Floats part = _mm512_reduce_ps(x, 9);  // less the whole number below
#else
  x = max(x, floats(-126.f));
  const Floats whole = nearest(x - floats(0.5f)), part = x - whole;
#endif
  Floats p = fma(floats(0.07802452f), part, floats(0.22606717f));
  p = fma(p, part, floats(0.6958334f));
  p = fma(p, part, floats(0.9999252f));
#if defined(__AVX512DQ__)
  return times_power(p, x);  // takes the whole number itself
#else
  return times_power(p, whole);
#endif
}

// Calls f(t, all) for each 32 that hold something seen; `all`, a type: nothing else is among them.
template <class F>
inline void each_32(Seen seen, const F& f) {
  long t = seen.from / 32 * 32;
  if (t < seen.from) f(t, std::false_type{}), t += 32;
  for (; t + 32 <= seen.to; t += 32) f(t, std::true_type{});
  if (t < seen.to) f(t, std::false_type{});
}

// The largest scores, of each 16 lanes one. scales: of codes, [2, TILE], keys' and values'.
template <bool PLAIN>
inline Floats peak(const Call& call, float* scores, Seen seen, const float* scales) {
  const Floats factor = floats(factor_of(call)), lowest = floats(LOWEST);
  const bool coded = call.cache.kind != SHORT;
  const float softcap = call.softcap;
  Floats early = lowest, late = lowest;
  const auto score = [&](long t, bool all) {
    Floats x = load(scores + t);
    if (!PLAIN) {
      x = x * factor;
      if (coded) x = x * load(scales + t);
      if (softcap > 0) x = tanh_of(x) * floats(softcap * LOG2E);
      store(scores + t, x);
    }
    return all ? x : select(seen.some(t), x, lowest);
  };
  each_32(seen, [&](long t, auto all) {
    early = max(early, score(t, all));
    late = max(late, score(t + 16, all));
  });
  return max(early, late);
}

// Of HALVED weights.
inline float step_of(const float* value_scales, Seen seen) {
  Floats most = floats(0.f);
  if (!seen.any()) return 0.f;
  each_32(seen, [&](long t, auto all) {
    for (long n = t; n < t + 32; n += 16) {
      const Floats some = load(value_scales + n);
      most = max(most, all ? some : keep(seen.some(n), some));
    }
  });
  return max_of(most) / WEIGHT_STEPS;
}

// Weights of a query and a tile as the values' product takes them: of bf16, of codes (halves.h has another kind). PLAIN: neither
// codes nor a softcap.
template <bool CODED, bool IS_PLAIN>
struct ShortWeights {
  static constexpr bool PLAIN = IS_PLAIN, HALVED = false;
  bf16* to;
  const float* scales;
  ShortWeights(bf16* row, const float* scales, float) : to(row), scales(scales + TILE) {}
  void put(long t, Floats x, Floats y) const {
    if (CODED)
      store(to + t, x * load(scales + t), y * load(scales + t + 16));
    else
      store(to + t, x, y);
  }
  void zero(long from, long end) const {  // multiples of 32
    for (long t = from; t < end; t += 32) store(to + t, floats(0.f), floats(0.f));
  }
};

// Scores -> weights, 0 for keys that are not seen, up to `width`; their sum, of each 16 lanes one.
template <class W>
inline Floats weigh(const float* scores, const W& weights, Seen seen, long width, float by, float top) {
  const Floats factor = floats(by), below = floats(-top);
  Floats early = floats(0.f), late = floats(0.f);
  const auto weight = [&](long t, bool all) {
    const Floats x = weight_of(fma(load(scores + t), factor, below));
    return all ? x : keep(seen.some(t), x);
  };
  weights.zero(0, seen.from / 32 * 32);
  each_32(seen, [&](long t, auto all) {
    const Floats x = weight(t, all), y = weight(t + 16, all);
    early = early + x;
    late = late + y;
    weights.put(t, x, y);
  });
  weights.zero(padded(seen.to, 32), width);
  return early + late;
}

// lanes: [count, 16] -> of each row one number, as max_of and sum_of find it. Many are turned, and found side by side.
template <class F, class G>
inline void reduce(float (*lanes)[16], int count, float* found, const F& both, const G& of_one) {
  if (count <= 4) {
    for (int i = 0; i < count; i++) found[i] = of_one(load(lanes[i]));
    return;
  }
  alignas(64) float turned[16][16];
  for (int i = 0; i < count; i += 16) {
    transpose_words(lanes[i], 64, turned);
    Floats x[8];
    for (int l = 0; l < 8; l++) x[l] = both(load(turned[l + 8]), load(turned[l]));
    for (int half = 4; half; half /= 2)
      for (int l = 0; l < half; l++) x[l] = both(x[l + half], x[l]);
    store(found + i, x[0]);
  }
}

// Scores of `count` queries -> weights: [count, TILE] each; the state moves on. steps: of HALVED weights, [count].
template <class W>
void soften(const Call& call, const Reach& reach, float* scores, bf16* weights, float* steps, const float* scales, long start,
            long end, long first, int count, long width, State s) {
  constexpr bool PLAIN = W::PLAIN;
  constexpr int MOST = (ROWS + 15) / 16 * 16;
  Seen seen[MOST];
  alignas(64) float lanes[MOST][16], top[MOST], before[MOST], shrink[MOST], total[MOST];
  const float factor = PLAIN ? factor_of(call) : 1.f;
  s = {s.top + first, s.total + first, s.sums + first * call.cache.E};
  for (int i = 0; i < count; i++) {
    const long position = reach.position(first + i), low = reach.low(first + i);
    seen[i] = {std::max<long>(0, low - start), std::min(end, position + 1) - start};
    if (seen[i].any()) store(lanes[i], peak<PLAIN>(call, scores + i * TILE, seen[i], scales));
  }
  reduce(lanes, count, top, [](Floats a, Floats b) { return max(a, b); }, [](Floats x) { return max_of(x); });
  for (int i = 0; i < count; i++) {
    before[i] = s.top[i];
    top[i] = seen[i].any() ? std::max(before[i], top[i] * factor) : before[i];
  }
  for (int i = 0; i < count; i += 16) store(shrink + i, exp2_below(load(before + i) - load(top + i)));
  for (int i = 0; i < count; i++) {
    if (W::HALVED) steps[i] = i && seen[i] == seen[i - 1] ? steps[i - 1] : step_of(scales + TILE, seen[i]);
    const W to(weights + i * TILE, scales, steps[i]);
    if (seen[i].any())
      store(lanes[i], weigh(scores + i * TILE, to, seen[i], width, factor, top[i]));
    else
      to.zero(0, width), store(lanes[i], floats(0.f));
  }
  reduce(lanes, count, total, [](Floats a, Floats b) { return a + b; }, [](Floats x) { return sum_of(x); });
  for (int i = 0; i < count; i++) {
    s.total[i] = s.total[i] * shrink[i] + total[i];
    s.top[i] = top[i];
    if (before[i] == top[i] || before[i] == LOWEST) continue;  // before any key there is nothing to shrink
    float* sums = s.sums + i * call.cache.E;
    for (long e = 0; e < call.cache.E; e += 16) store(sums + e, floats(shrink[i]) * load(sums + e));
  }
}

}  // namespace quire

// Online softmax, 32 tokens at a time: scores -> weights, with a running maximum, the sum of all weights, and the sums of values.
//
// A weight is 2^(score - max), and `max` may be less than the largest score: floats and bf16 hold 2^20 as exactly as 1. So it is the
// maximum of the first 32 scores with a visible key, and rises to the maximum of a later 32 only where weights would be too large.
// Then scores are read once, and sums are seldom rescaled. The groups of 32 tokens are fixed by their positions, so a query's maximum
// does not depend on other queries. (attention_int8_split.h needs the exact maximum.)
#pragma once
#include "attention.h"

namespace quire {

// The factor of scores before 2^x, or before the softcap.
inline float factor_of(const Call& call) { return call.softcap > 0 ? call.scale / call.softcap : call.scale * LOG2E; }

// 2^x, relative error up to 8e-5, a fiftieth of the rounding error of bf16; for x from 127 on, a value that is too large.
inline Floats weight_of(Floats x) {
#if defined(__AVX512DQ__)
  const Floats part = _mm512_reduce_ps(x, 9);  // the fraction
#else
  x = min(max(x, floats(-126.f)), floats(126.f));
  const Floats whole = nearest(x - floats(0.5f)), part = x - whole;
#endif
  Floats p = fma(floats(0.07802452f), part, floats(0.22606717f));
  p = fma(p, part, floats(0.6958334f));
  p = fma(p, part, floats(0.9999252f));
#if defined(__AVX512DQ__)
  return times_power(p, x);  // uses the integer part
#else
  return times_power(p, whole);
#endif
}

constexpr int LANES_OF_ROWS = (ROWS + 15) / 16 * 16;

// lanes: [count, 16] -> one number for each row, as max_of and sum_of compute it. Many rows are transposed and reduced in parallel.
template <class F, class G>
inline void reduce(float (*lanes)[16], int count, float* found, const F& both, const G& of_one) {
  if (count <= 4) {
    for (int i = 0; i < count; i++) found[i] = of_one(load(lanes[i]));
    return;
  }
  alignas(64) float transposed[16][16];
  for (int i = 0; i < count; i += 16) {
    transpose_words(lanes[i], 64, transposed);
    Floats x[8];
    for (int l = 0; l < 8; l++) x[l] = both(load(transposed[l + 8]), load(transposed[l]));
    for (int half = 4; half; half /= 2)
      for (int l = 0; l < half; l++) x[l] = both(x[l + half], x[l]);
    store(found + i, x[0]);
  }
}
inline void largest_of(float (*lanes)[16], int count, float* found) {
  reduce(lanes, count, found, [](Floats a, Floats b) { return max(a, b); }, [](Floats x) { return max_of(x); });
}
inline void sums_of(float (*lanes)[16], int count, float* found) {
  reduce(lanes, count, found, [](Floats a, Floats b) { return a + b; }, [](Floats x) { return sum_of(x); });
}

// Queries of an item in the order of their positions, within a split: the keys that they see, and their state.
struct RunningSoftmax {
  int count;
  float* sums;                 // [count, E]
  long low[ROWS], high[ROWS];  // each sees [low, high)
  const float* biases[ROWS];   // by token; only where the call has some
  int turn = 0;
  float below[LANES_OF_ROWS];  // -top
  alignas(64) float totals[2][LANES_OF_ROWS][16];  // by lane: before 32 tokens, and after them

  RunningSoftmax(const Reach& reach, long first, int count, float* sums) : count(count), sums(sums) {
    for (int i = 0; i < count; i++) {
      low[i] = reach.low(first + i), high[i] = reach.high(first + i);
      if (reach.call.bias) biases[i] = reach.biases(first + i);
      below[i] = -LOWEST;
      store(totals[0][i], floats(0.f));
    }
  }
  void end(State s) {  // of these queries
    alignas(64) float found[LANES_OF_ROWS];
    sums_of(totals[turn], count, found);
    for (int i = 0; i < count; i++) s.top[i] = -below[i], s.total[i] = found[i];
  }
};

// 32 tokens from `start` on, whose scores become weights. scales: of a quantized cache, the keys', and TILE further the values'.
struct Block {
  const float* scores;
  long score_row;
  bf16* weights;
  long weight_row;
  const float* scales;
  long start;
};

enum ScoreForm { PLAIN, CAPPED, QUANTIZED, BIASED };  // PLAIN: no softcap, not quantized, no bias

template <ScoreForm FORM>
class Softmax {
  static constexpr float WEIGHT_LIMIT = 0x1p32f;  // the limit of the sum of two weights

 public:
  Softmax(const Call& call, RunningSoftmax& running) : r(running), E(call.cache.E), factor(floats(factor_of(call))), softcap(call.softcap) {}

  void begin(const Block& next) {
    block = next, most = floats(0.f), waits = true;
    all = r.low[r.count - 1] <= block.start && block.start + 32 <= r.high[0];
    if (!begun) begun = begin_at_largest(0, r.count);
  }

  // Turns the block's scores into weights. flush(): adds the values before the block, in case a maximum rises; false: there are none.
  template <class F>
  void end(const F& flush) {
    if (!waits) return;
    all ? compute_weights<true>(0, r.count) : compute_weights<false>(0, r.count);
    if (any(less(floats(WEIGHT_LIMIT), most))) raise_max(flush());
    r.turn ^= 1, waits = false;
  }

 private:
  RunningSoftmax& r;
  const long E;
  const Floats factor;
  const float softcap;
  Block block{};
  bool begun = false;  // each query has a maximum
  bool waits = false;  // the block is to become weights
  bool all = false;    // each query sees all of it
  Floats most{};       // of the sums of two weights

  // 16 scores minus the maximum, from the block's t-th token on, of query i.
  Floats score(int i, long t, const float* scores, const float* key_scales, Floats below) const {
    Floats x = load(scores);
    if (FORM == BIASED) return fma(x, factor, load(r.biases[i] + block.start + t)) + below;
    if (FORM == PLAIN) return fma(x, factor, below);
    x = x * factor;
    if (FORM == QUANTIZED) x = x * load(key_scales);
    if (softcap > 0) x = tanh_of(x) * floats(softcap * LOG2E);
    return x + below;
  }

  // The mask of 16 tokens, from the block's t-th on, that query i sees.
  Mask seen(int i, long t) const {
    alignas(64) static const int32_t places[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints place = load(places) + (int32_t)(block.start + t);
    return both(less(ints((int32_t)r.low[i] - 1), place), less(place, ints((int32_t)r.high[i])));
  }

  // Sets the maximum of queries [from, to) that have none and see a key; true if then all have one.
  bool begin_at_largest(int from, int to) {
    alignas(64) float lanes[LANES_OF_ROWS][16], found[LANES_OF_ROWS];
    const Floats lowest = floats(LOWEST), nothing = floats(0.f);
    for (int i = from; i < to; i++) {
      const float* at = block.scores + i * block.score_row;
      const Floats early = select(seen(i, 0), score(i, 0, at, block.scales, nothing), lowest);
      const Floats late = select(seen(i, 16), score(i, 16, at + 16, block.scales + 16, nothing), lowest);
      store(lanes[i - from], max(max(early, late), lowest));
    }
    largest_of(lanes, to - from, found);
    bool have = true;
    for (int i = from; i < to; i++) {
      if (r.below[i] == -LOWEST) r.below[i] = -found[i - from];
      have &= r.below[i] != -LOWEST;
    }
    return have;
  }

  // Weights of queries [from, to); ALL: they see the whole block. A local copy of the members keeps them in registers across stores.
  template <bool ALL>
  __attribute__((noinline)) void compute_weights(int from, int to) {
    const Softmax self = *this;
    const Block& b = self.block;
    const float *scores = b.scores + from * b.score_row, *before = r.totals[r.turn][from];
    float* after = r.totals[!r.turn][from];
    bf16* weights = b.weights + from * b.weight_row;
    Floats most = self.most;
    for (int i = from; i < to; i++, scores += b.score_row, weights += b.weight_row, before += 16, after += 16) {
      const Floats below = floats(r.below[i]);
      Floats x = weight_of(self.score(i, 0, scores, b.scales, below)), y = weight_of(self.score(i, 16, scores + 16, b.scales + 16, below));
      if (!ALL) x = keep(self.seen(i, 0), x), y = keep(self.seen(i, 16), y);
      const Floats both = x + y;
      store(after, load(before) + both);
      most = max(both, most);  // ignores NaN
      if (FORM == QUANTIZED) x = x * load(b.scales + TILE), y = y * load(b.scales + TILE + 16);
      store(weights, x, y);
    }
    this->most = most;
  }

  // Raises the maximum of queries whose weights are too large to the maximum of the block. found: there are sums to rescale.
  __attribute__((noinline)) void raise_max(bool found) {
    for (int i = 0; i < r.count; i++) {
      most = floats(0.f);
      compute_weights<false>(i, i + 1);
      if (!any(less(floats(WEIGHT_LIMIT), most))) continue;
      const float before = r.below[i];
      r.below[i] = -LOWEST;
      begin_at_largest(i, i + 1);
      const Floats shrink = exp2_below(floats(r.below[i] - before));
      float *total = r.totals[r.turn][i], *sums = r.sums + i * E;
      store(total, load(total) * shrink);
      for (long e = 0; found && e < E; e += 16) store(sums + e, load(sums + e) * shrink);
      compute_weights<false>(i, i + 1);
    }
  }
};

// Calls f with a Softmax.
template <class F>
inline void with_softmax(const Call& call, RunningSoftmax& running, const F& f) {
  if (call.cache.kind != KV_BF16) return f(Softmax<QUANTIZED>(call, running));
  if (call.bias) return f(Softmax<BIASED>(call, running));
  if (call.softcap > 0) return f(Softmax<CAPPED>(call, running));
  f(Softmax<PLAIN>(call, running));
}

}  // namespace quire

// Scores -> weights, 32 tokens at a time, and the running softmax: what scores are lessened by, the sum of all weights, the sums
// of values.
//
// A weight is 2^(score - top), and top need not be the largest score: floats and bf16 hold 2^20 as exactly as 1. So top is the
// largest of the first 32 scores among which the query sees one, and rises, to the largest of 32 again, only where weights would
// be too large. Scores are then looked at once, and sums seldom shrink. Which 32 tokens belong together is their place in the
// cache, so a query's top does not depend on its company. (Halves of bytes need the largest score: attention_int8_split.h.)
#pragma once
#include "attention.h"

namespace quire {

// What scores are multiplied by before 2^x, or before the softcap.
inline float factor_of(const Call& call) { return call.softcap > 0 ? call.scale / call.softcap : call.scale * LOG2E; }

// 2^x, relative error up to 8e-5, a fiftieth of what rounding to bf16 loses; of x from 127 on, what is too large.
inline Floats weight_of(Floats x) {
#if defined(__AVX512DQ__)
  const Floats part = _mm512_reduce_ps(x, 9);  // less the whole number below
#else
  x = min(max(x, floats(-126.f)), floats(126.f));
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

constexpr int LANES_OF_ROWS = (ROWS + 15) / 16 * 16;

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
inline void largest_of(float (*lanes)[16], int count, float* found) {
  reduce(lanes, count, found, [](Floats a, Floats b) { return max(a, b); }, [](Floats x) { return max_of(x); });
}
inline void sums_of(float (*lanes)[16], int count, float* found) {
  reduce(lanes, count, found, [](Floats a, Floats b) { return a + b; }, [](Floats x) { return sum_of(x); });
}

// Queries of an item, in the order of their positions, among a split: what they see, and have found so far.
struct Running {
  int count;
  float* sums;                 // [count, E]
  long low[ROWS], high[ROWS];  // each sees [low, high)
  int turn = 0;
  float below[LANES_OF_ROWS];  // -top
  alignas(64) float totals[2][LANES_OF_ROWS][16];  // of each 16 lanes one: before 32 tokens, and after them

  Running(const Reach& reach, long first, int count, float* sums) : count(count), sums(sums) {
    for (int i = 0; i < count; i++) {
      low[i] = reach.low(first + i), high[i] = reach.position(first + i) + 1;
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

// 32 tokens from `start` on: scores that are to become weights. scales: of codes, the keys', and TILE further on the values'.
struct Block {
  const float* scores;
  long score_row;
  bf16* weights;
  long weight_row;
  const float* scales;
  long start;
};

enum Way { PLAIN, CAPPED, CODED };  // PLAIN: neither a softcap nor codes

template <Way WAY>
class Softmax {
  static constexpr float MOST = 0x1p32f;  // two weights may be that together

 public:
  Softmax(const Call& call, Running& running) : r(running), E(call.cache.E), factor(floats(factor_of(call))), softcap(call.softcap) {}

  void begin(const Block& next) {
    block = next, most = floats(0.f), waits = true;
    all = r.low[r.count - 1] <= block.start && block.start + 32 <= r.high[0];
    if (!begun) begun = begin_at_largest(0, r.count);
  }

  // The block becomes weights. meet(): those before it meet their values, in case that a top rises; false if there are none.
  template <class F>
  void end(const F& meet) {
    if (!waits) return;
    all ? weigh<true>(0, r.count) : weigh<false>(0, r.count);
    if (any(less(floats(MOST), most))) rise(meet());
    r.turn ^= 1, waits = false;
  }

 private:
  Running& r;
  const long E;
  const Floats factor;
  const float softcap;
  Block block{};
  bool begun = false;  // each query has a top
  bool waits = false;  // the block is to become weights
  bool all = false;    // each query sees all of it
  Floats most{};       // of the sums of two weights

  // 16 scores, less top.
  Floats score(const float* scores, const float* key_scales, Floats below) const {
    Floats x = load(scores);
    if (WAY == PLAIN) return fma(x, factor, below);
    x = x * factor;
    if (WAY == CODED) x = x * load(key_scales);
    if (softcap > 0) x = tanh_of(x) * floats(softcap * LOG2E);
    return x + below;
  }

  // Which of 16 tokens, from the block's t-th on, query i sees.
  Mask seen(int i, long t) const {
    alignas(64) static const int32_t places[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints place = load(places) + (int32_t)(block.start + t);
    return both(less(ints((int32_t)r.low[i] - 1), place), less(place, ints((int32_t)r.high[i])));
  }

  // The tops of those among queries [from, to) that have none and see something; true if then all have.
  bool begin_at_largest(int from, int to) {
    alignas(64) float lanes[LANES_OF_ROWS][16], found[LANES_OF_ROWS];
    const Floats lowest = floats(LOWEST), nothing = floats(0.f);
    for (int i = from; i < to; i++) {
      const float* at = block.scores + i * block.score_row;
      const Floats early = select(seen(i, 0), score(at, block.scales, nothing), lowest);
      const Floats late = select(seen(i, 16), score(at + 16, block.scales + 16, nothing), lowest);
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

  // Of queries [from, to); ALL: they see the whole block. What a loop has in registers may not be changed by what it stores.
  template <bool ALL>
  __attribute__((noinline)) void weigh(int from, int to) {
    const Softmax self = *this;
    const Block& b = self.block;
    const float *scores = b.scores + from * b.score_row, *before = r.totals[r.turn][from];
    float* after = r.totals[!r.turn][from];
    bf16* weights = b.weights + from * b.weight_row;
    Floats most = self.most;
    for (int i = from; i < to; i++, scores += b.score_row, weights += b.weight_row, before += 16, after += 16) {
      const Floats below = floats(r.below[i]);
      Floats x = weight_of(self.score(scores, b.scales, below)), y = weight_of(self.score(scores + 16, b.scales + 16, below));
      if (!ALL) x = keep(self.seen(i, 0), x), y = keep(self.seen(i, 16), y);
      const Floats both = x + y;
      store(after, load(before) + both);
      most = max(both, most);  // what is no number is passed over
      if (WAY == CODED) x = x * load(b.scales + TILE), y = y * load(b.scales + TILE + 16);
      store(weights, x, y);
    }
    this->most = most;
  }

  // A query with weights that are too large goes on from the largest score of the block. found: there are sums.
  __attribute__((noinline)) void rise(bool found) {
    for (int i = 0; i < r.count; i++) {
      most = floats(0.f);
      weigh<false>(i, i + 1);
      if (!any(less(floats(MOST), most))) continue;
      const float before = r.below[i];
      r.below[i] = -LOWEST;
      begin_at_largest(i, i + 1);
      const Floats shrink = exp2_below(floats(r.below[i] - before));
      float *total = r.totals[r.turn][i], *sums = r.sums + i * E;
      store(total, load(total) * shrink);
      for (long e = 0; found && e < E; e += 16) store(sums + e, load(sums + e) * shrink);
      weigh<false>(i, i + 1);
    }
  }
};

// Calls f with a Softmax.
template <class F>
inline void with_softmax(const Call& call, Running& running, const F& f) {
  if (call.cache.kind != SHORT) return f(Softmax<CODED>(call, running));
  if (call.softcap > 0) return f(Softmax<CAPPED>(call, running));
  f(Softmax<PLAIN>(call, running));
}

}  // namespace quire

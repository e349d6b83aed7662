// Sampling: the cutoff of a row of logits by top-k, top-p and min-p, and the draw from the tokens that are left.
//
// worker/sampling/top_k_top_p.py and gumbel.py have the definitions. Tokens are in the order (logit descending, id ascending), of
// which top-k, top-p and min-p keep a prefix. The noise of a token is a function of its id and its row's two words, so a row's token
// does not depend on the other rows. The integers are the definition's; exp and log differ from torch's in the last bit, as torch's
// own do from machine to machine.
#include <vector>

#include "common.h"
#include "exports.h"
#include "logits.h"
#include "team.h"

namespace quire {

namespace {

alignas(64) const int32_t PLACES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

constexpr int32_t GOLDEN = (int32_t)0x9E3779B9;
constexpr float MAX_NOISE = 22.2f;   // -log(0.5 / 2^31), and a little more
constexpr float MIN_NOISE = -2.9f;  // -log(-log(2^-24)), and a little less
constexpr float MAX_DISTANCE = 28.f;         // exp(-28) * 2^40 < 1: a token so far below the top has no weight
constexpr long BUCKETS = 4096;        // of logits, from the top down to MAX_DISTANCE below it

// -- functions -------------------------------------------------------------------------------------------------------

inline Ints mix(Ints x) {
  x = x ^ logical_right(x, 16);
  x = wrapping_times(x, ints((int32_t)0x7FEB352D));
  x = x ^ logical_right(x, 15);
  x = wrapping_times(x, ints((int32_t)0x846CA68B));
  return x ^ logical_right(x, 16);
}

inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352D;
  x ^= x >> 15;
  x *= 0x846CA68B;
  return x ^ x >> 16;
}

// log x of normal positive x, relative error about 1e-7 (Cephes: 2^e * m with m from sqrt(1/2) to sqrt 2, a polynomial of m - 1).
inline Floats log_of(Floats x) {
  const Ints bits = as_ints(x), shifted = bits - ints(0x3f3504f3);  // of sqrt(1/2)
  const Floats exponent = to_floats(shifted >> 23);
  const Floats f = as_floats((shifted & 0x7fffff) + ints(0x3f3504f3)) - floats(1.f), square = f * f;
  Floats p = floats(7.0376836292e-2f);
  p = fma(p, f, floats(-1.1514610310e-1f));
  p = fma(p, f, floats(1.1676998740e-1f));
  p = fma(p, f, floats(-1.2420140846e-1f));
  p = fma(p, f, floats(1.4249322787e-1f));
  p = fma(p, f, floats(-1.6668057665e-1f));
  p = fma(p, f, floats(2.0000714765e-1f));
  p = fma(p, f, floats(-2.4999993993e-1f));
  p = fma(p, f, floats(3.3333331174e-1f));
  Floats y = p * f * square;
  y = fma(exponent, floats(-2.12194440e-4f), y);  // log 2 in two parts
  y = fnma(square, floats(0.5f), y);
  return fma(exponent, floats(0.693359375f), f + y);
}

// e^x for x from -87 to 0, relative error about 1e-7.
inline Floats exp_of(Floats x) {
  const Floats whole = nearest(x * floats(LOG2E));
  Floats part = fnma(whole, floats(0.693359375f), x);
  part = fnma(whole, floats(-2.12194440e-4f), part);
  Floats p = floats(1.9875691500e-4f);
  p = fma(p, part, floats(1.3981999507e-3f));
  p = fma(p, part, floats(8.3334519073e-3f));
  p = fma(p, part, floats(4.1665795894e-2f));
  p = fma(p, part, floats(1.6666665459e-1f));
  p = fma(p, part, floats(5.0000001201e-1f));
  return times_power(fma(p, part * part, part) + floats(1.f), whole);
}

// 31 bits of the tokens from `v` on.
inline Ints words_of(long v, int32_t a, int32_t b) {
  const Ints x = wrapping_plus(wrapping_times(load(PLACES) + (int32_t)v, ints(GOLDEN)), ints(a));
  return mix(mix(x) ^ ints(b)) & 0x7fffffff;
}

// -log(-log1p(-v)), v from (0.5 + the token's word) / 2^31.
inline Floats gumbel(Ints words) {
  const Floats v = min(fma(to_floats(words), floats(0x1p-31f), floats(0x1p-32f)), floats(1.f - 0x1p-24f));
  const Floats u = floats(1.f) - v, lost = v - (floats(1.f) - u);  // 1 - v = u - lost, exactly
  return floats(0.f) - log_of(lost / u - log_of(u));
}

// A token with noise of `most` or more (from 1 on) has a word below this: log1p(-v) <= -v, so v < exp(-most).
struct Rarity {
  int32_t words[32];
  Rarity() {
    for (int i = 0; i < 32; i++) words[i] = (int32_t)(exp(-std::max(i, 1)) * 0x1p31) + 2;
  }
  int32_t operator()(float most) const { return words[(int)(most - 0.01f)]; }
};
const Rarity word_for;

// Sixteen tokens from `v` on; beyond V they are -inf.
inline Floats up_to_sixteen(const float* x, long v, long V) {
  if (v + 16 <= V) return load(x + v);
  alignas(64) float edge[16];
  for (int i = 0; i < 16; i++) edge[i] = v + i < V ? x[v + i] : -INFINITY;
  return load(edge);
}

inline float top_of(const float* x, long V) {
  Floats top = floats(-INFINITY);
  for (long v = 0; v < V; v += 16) top = max(up_to_sixteen(x, v, V), top);
  return max_of(top);
}

// -- the draw --------------------------------------------------------------------------------------------------------

// The last token that survives, in the order; by default all survive.
struct Cutoff {
  float logit = -INFINITY;
  int64_t id = INT32_MAX;
};

// The token of the largest x + noise among those up to `last`; among equals the first. 0 if there is none.
//
// Few tokens need their noise: the others cannot win, by the largest logit among them or by their words.
long draw(const float* x, long V, float top, int32_t a, int32_t b, Cutoff last) {
  const Floats nothing = floats(-INFINITY), floor = floats(last.logit);
  const Ints last_id = ints((int32_t)last.id);
  Floats best = nothing;
  Ints found = ints(0);
  float sure = top + MIN_NOISE;  // a lower bound of the winner
  for (long v = 0; v < V; v += 16) {
    const Floats value = up_to_sixteen(x, v, V);
    const float most = max_of(value), needed = sure - most;
    if (!(most >= last.logit) || needed > MAX_NOISE) continue;
    const Ints words = words_of(v, a, b);
    if (needed > 1.1f && !any(less(words, ints(word_for(needed))))) continue;
    const Ints ids = load(PLACES) + (int32_t)v;
    const Floats noisy = value + gumbel(words);
    const Floats score = select(less(floor, value), noisy,  // else it is the last logit, a lower one, or NaN
                                select(less(value, floor), nothing, select(less(last_id, ids), nothing, noisy)));
    const Mask better = less(best, score);
    best = select(better, score, best);
    found = select(better, ids, found);
    if (any(better)) sure = std::max(sure, max_of(best));
  }
  alignas(64) float values[16];
  alignas(64) int32_t places[16];
  store(values, best);
  store(places, found);
  const float most = max_of(best);
  long id = V;
  for (int i = 0; i < 16; i++)
    if (values[i] == most && places[i] < id) id = places[i];
  return id < V ? id : 0;
}

// -- the cut ---------------------------------------------------------------------------------------------------------

inline int64_t weight_of(float e) { return (int64_t)(e * 0x1p40f); }

struct Token {
  float logit;
  int32_t id;
};

struct Histogram {  // of one row: counts and weights of tokens by their distance below the maximum
  std::vector<int64_t> weights = std::vector<int64_t>(BUCKETS);
  std::vector<int32_t> counts = std::vector<int32_t>(BUCKETS);
  std::vector<Token> inside;
  std::vector<float> peaks;

  void clear() {
    std::fill(weights.begin(), weights.end(), 0);
    std::fill(counts.begin(), counts.end(), 0);
  }
};

// A value that at least k tokens reach: the k-th largest of the maxima of pieces of the row. -inf if there are too few pieces.
float reached_by(Histogram& h, const float* x, long V, long k) {
  constexpr long PIECE = 256;
  h.peaks.clear();
  for (long v = 0; v + PIECE <= V; v += PIECE) h.peaks.push_back(top_of(x + v, PIECE));
  if ((long)h.peaks.size() < k) return -INFINITY;
  std::nth_element(h.peaks.begin(), h.peaks.begin() + k - 1, h.peaks.end(), std::greater<float>());
  return h.peaks[k - 1];
}

inline Ints bucket_of(Floats value, float top) {
  return to_ints(min((floats(top) - value) * floats(BUCKETS / MAX_DISTANCE), floats(BUCKETS - 1)));
}

void fill(Histogram& h, const float* x, long V, float top, float floor) {
  alignas(64) float e[16], values[16];
  alignas(64) int32_t bucket[16];
  h.clear();
  for (long v = 0; v < V; v += 16) {
    const long here = std::min<long>(16, V - v);
    const Floats value = up_to_sixteen(x, v, V);
    if (!(max_of(value) >= floor)) continue;
    store(values, value);
    store(e, exp_of(max(value - floats(top), floats(-87.f))));
    store(bucket, bucket_of(value, top));
    for (int i = 0; i < here; i++)
      if (values[i] >= floor) h.counts[bucket[i]]++, h.weights[bucket[i]] += weight_of(e[i]);
  }
}

// The tokens of a bucket that are not below the floor, in the order.
void collect(Histogram& h, const float* x, long V, float top, float floor, int32_t bucket) {
  alignas(64) float values[16];
  alignas(64) int32_t places[16];
  h.inside.clear();
  for (long v = 0; v < V; v += 16) {
    const Floats value = up_to_sixteen(x, v, V);
    if (!(max_of(value) >= floor)) continue;
    store(places, bucket_of(value, top));
    store(values, value);
    for (int i = 0; i < std::min<long>(16, V - v); i++)
      if (places[i] == bucket && values[i] >= floor) h.inside.push_back({values[i], (int32_t)(v + i)});
  }
  std::sort(h.inside.begin(), h.inside.end(),
            [](Token a, Token b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); });
}

inline int64_t weight(float value, float top) {
  alignas(64) float e[16];
  store(e, exp_of(max(floats(value - top), floats(-87.f))));
  return weight_of(e[0]);
}

Cutoff cut(Histogram& h, const float* x, long V, float top, const RowParams& params) {
  const auto [temperature, seed, top_k, top_p, log_min_p] = params;
  if (!(fabsf(top) < INFINITY)) return {};
  Cutoff last;
  if (log_min_p != -INFINITY) last.logit = std::min((float)(top + log_min_p), top);
  const bool ranked = 0 < top_k && top_k < V;
  if (!ranked && !(top_p < 1)) return last;
  // Top-k excludes all tokens below a value that k tokens reach.
  const float floor = ranked ? std::max(last.logit, reached_by(h, x, V, top_k)) : last.logit;
  fill(h, x, V, top, floor);
  if (ranked) {
    int64_t before = 0;
    long b = 0;
    for (; b < BUCKETS && before + h.counts[b] < top_k; b++) before += h.counts[b];
    if (b < BUCKETS) {  // else fewer than k survive min-p
      collect(h, x, V, top, floor, (int32_t)b);
      h.inside.resize(top_k - before);
      last = {h.inside.back().logit, h.inside.back().id};
      for (long rest = b; rest < BUCKETS; rest++) h.weights[rest] = 0;
      for (Token token : h.inside) h.weights[b] += weight(token.logit, top);
    }
  }
  if (!(top_p < 1)) return last;
  int64_t total = 0, sum = 0;
  for (int64_t each : h.weights) total += each;
  const int64_t wanted = std::min(total, (int64_t)ceil((double)total * top_p));
  long b = 0;
  for (; b < BUCKETS - 1 && sum + h.weights[b] < wanted; b++) sum += h.weights[b];
  collect(h, x, V, top, floor, (int32_t)b);
  for (Token token : h.inside)
    if ((sum += weight(token.logit, top)) >= wanted) return {token.logit, token.id};
  return last;
}

// -- cutoff and draw of unscaled logits ------------------------------------------------------------------------------------

// y = x / temperature. Returns the highest of x, NaN if one is NaN or +inf.
template <class T>
float scaled(const T* x, float* y, long V, float temperature) {
  Floats top = floats(-INFINITY), wrong = floats(0.f);
  long v = 0;
  for (; v + 16 <= V; v += 16) {
    const Floats value = sixteen(x + v);
    wrong = select(less(value, floats(INFINITY)), wrong, floats(1.f));
    top = max(value, top);
    store(y + v, temperature == 1.f ? value : value / floats(temperature));
  }
  float most = max_of(top);
  bool bad = sum_of(wrong) > 0.f;
  for (; v < V; v++) {
    const float value = one(x + v);
    bad |= !(value < INFINITY);
    most = most < value ? value : most;
    y[v] = value / temperature;
  }
  return bad ? NAN : most;
}

}  // namespace

}  // namespace quire

using namespace quire;

// x: [rows, V], `step` from row to row. a, b: each row's words. floors, last_ids: each row's last token that may be drawn; or
// both null.
EXPORT void quire_draw(const float* x, long step, const int32_t* a, const int32_t* b, const float* floors,
                       const int64_t* last_ids, long rows, long V, int64_t* tokens) {
  in_pieces(rows, [&](long r) {
    const float* row = x + r * step;
    tokens[r] = draw(row, V, top_of(row, V), a[r], b[r], floors ? Cutoff{floors[r], last_ids[r]} : Cutoff{});
  });
}

EXPORT void quire_cut(const float* x, long step, const RowParams* params, long rows, long V, float* floors, int64_t* last_ids) {
  in_pieces(rows, [&](long r) {
    static thread_local Histogram histogram;
    const float* row = x + r * step;
    const Cutoff last = cut(histogram, row, V, top_of(row, V), params[r]);
    floors[r] = last.logit, last_ids[r] = last.id;
  });
}

// Cuts and draws in one pass over x, which is float32 or bf16. Seeds and positions make the words a and b.
// max_logit: the highest logit of each row, NaN if one is NaN or +inf.
EXPORT void quire_sample(const void* x, long step, int is_bf16, const RowParams* params, const int64_t* positions, long rows,
                         long V, int64_t* tokens, float* max_logit) {
  static thread_local Scratch<float> keep_allowed;  // of the calling thread
  if (std::all_of(params, params + rows, [](const RowParams& p) { return p.temperature == 0.f; }))
    return quire_masked_argmax(x, step, is_bf16, nullptr, rows, V, tokens, max_logit, keep_allowed.at_least(rows));
  in_pieces(rows, [&](long r) {
    static thread_local Histogram histogram;
    static thread_local Scratch<float> keep;
    float *row = keep.at_least(V), max_allowed;
    const char* from = (const char*)x + r * step * (is_bf16 ? sizeof(bf16) : sizeof(float));
    const float temperature = params[r].temperature;
    if (temperature == 0.f)
      return quire_masked_argmax(from, step, is_bf16, nullptr, 1, V, tokens + r, max_logit + r, &max_allowed);
    max_logit[r] = is_bf16 ? scaled((const bf16*)from, row, V, temperature) : scaled((const float*)from, row, V, temperature);
    const float top = max_logit[r] / temperature;
    const Cutoff last = cut(histogram, row, V, top, params[r]);
    const uint32_t a = mix(params[r].seed ^ (uint32_t)positions[r]), b = mix(mix(a) + 0x85EBCA6B);
    tokens[r] = draw(row, V, top, (int32_t)a, (int32_t)b, last);
  });
}

// Attention over int8 codes without conversion: all products are of bytes, and no code becomes bf16. AMX; head sizes of 64, 128 ...
//
// Queries and weights are split into a high and a low byte; the two sums are combined in float (decision 39):
//
//   query    (128 high + low) steps, signed, low from 0 to 127; its largest element has 16383 steps
//   weight   times its value's scale: (256 high + low) steps, unsigned; the largest value scale that the query sees in the tile has
//            65024 steps
//
// Sums of products of bytes are exact, so few queries and many may add in different orders and get the same bits. The two bytes
// take the place of one bf16 in every buffer. Sums of values have the layout [E / 64, 4, 16]: [p, w] is column 4 w + p, since each
// word holds four columns.
#pragma once
#include "softmax.h"

namespace quire {

constexpr float QUERY_STEPS = 16383.f, WEIGHT_STEPS = 65024.f;  // a weight is up to 1.0001: below 2^16 then
constexpr float TINY = 0x1p-110f;  // smaller maxima count as 0, so that no step is infinite

// 32 numbers of 16 bits -> their high and low bytes; for signed ones, the low 7 bits.
template <bool SIGNED>
inline void store_split(uint8_t* high, uint8_t* low, Ints a, Ints b) {
#ifdef QUIRE_AMX
  const __m512i early = (__m512i)a, late = (__m512i)b;
  const __m512i all = SIGNED ? _mm512_packs_epi32(early, late) : _mm512_packus_epi32(early, late);
  const __m512i upper = SIGNED ? _mm512_srai_epi16(all, 7) : _mm512_srli_epi16(all, 8);
  const __m512i lower = _mm512_and_si512(all, _mm512_set1_epi16(SIGNED ? 127 : 255));
  const __m512i bytes = SIGNED ? _mm512_packs_epi16(upper, lower) : _mm512_packus_epi16(upper, lower);
  // The pack instruction works on lanes of 16 bytes: each has 4 numbers of a and 4 of b.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i ordered = _mm512_permutexvar_epi32(order, bytes);
  _mm256_storeu_si256((__m256i*)high, _mm512_castsi512_si256(ordered));
  _mm256_storeu_si256((__m256i*)low, _mm512_extracti64x4_epi64(ordered, 1));
#else
  constexpr int BITS = SIGNED ? 7 : 8;
  store_bytes(high, a >> BITS), store_bytes(high + 16, b >> BITS);
  store_bytes(low, a & ((1 << BITS) - 1)), store_bytes(low + 16, b & ((1 << BITS) - 1));
#endif
}

// Splits a query into [2, D] bytes; returns its step.
inline float split_query(const float* x, long D, uint8_t* to) {
  Floats most = floats(0.f);
  for (long d = 0; d < D; d += 16) most = max(most, magnitude(load(x + d)));
  const float top = max_of(most);
  const Floats steps = floats(top > TINY ? QUERY_STEPS / top : 0.f);
  for (long d = 0; d < D; d += 32)
    store_split<true>(to + d, to + D + d, to_ints(load(x + d) * steps), to_ints(load(x + d + 16) * steps));
  return top / QUERY_STEPS;
}

inline Floats combine_bytes(Ints high, Ints low, float base) { return fma(to_floats(high), floats(base), to_floats(low)); }

inline Floats score_of(Ints high, Ints low, float step) { return combine_bytes(high, low, 128.f) * floats(step); }

inline void add_values(float* sums, Ints high, Ints low, float step, bool fresh) {
  const Floats found = combine_bytes(high, low, 256.f);
  store(sums, fresh ? found * floats(step) : fma(found, floats(step), load(sums)));
}

// -- the softmax -------------------------------------------------------------------------------------------------------
//
// A tile at a time, and top is the largest score so far: of larger weights too little would be left to the small ones.

// The keys [from, to) of a tile that a query sees.
struct KeyRange {
  long from, to;
  bool any() const { return to > from; }
  bool operator==(const KeyRange& other) const { return from == other.from && to == other.to; }
  Mask mask(long t) const { return span(from - t, to - t); }  // of the 16 from t on
};

// Calls f(t, all) for each group of 32 with a visible key; `all`, a type: all 32 are visible.
template <class F>
inline void each_32(KeyRange seen, const F& f) {
  long t = seen.from / 32 * 32;
  if (t < seen.from) f(t, std::false_type{}), t += 32;
  for (; t + 32 <= seen.to; t += 32) f(t, std::true_type{});
  if (t < seen.to) f(t, std::false_type{});
}

// Scales the scores; returns the maximum of each of 16 lanes. scales: [2, TILE], keys' and values'.
inline Floats peak(const Call& call, float* scores, KeyRange seen, const float* scales) {
  const Floats factor = floats(factor_of(call)), lowest = floats(LOWEST);
  const float softcap = call.softcap;
  Floats early = lowest, late = lowest;
  const auto score = [&](long t, bool all) {
    Floats x = load(scores + t) * factor * load(scales + t);
    if (softcap > 0) x = tanh_of(x) * floats(softcap * LOG2E);
    store(scores + t, x);
    return all ? x : select(seen.mask(t), x, lowest);
  };
  each_32(seen, [&](long t, auto all) {
    early = max(early, score(t, all));
    late = max(late, score(t + 16, all));
  });
  return max(early, late);
}

inline float step_of(const float* value_scales, KeyRange seen) {
  Floats most = floats(0.f);
  if (!seen.any()) return 0.f;
  each_32(seen, [&](long t, auto all) {
    for (long n = t; n < t + 32; n += 16) {
      const Floats some = load(value_scales + n);
      most = max(most, all ? some : keep(seen.mask(n), some));
    }
  });
  return max_of(most) / WEIGHT_STEPS;
}

// Scores -> weights, [2, TILE] bytes, 0 for keys that are not visible, up to `width`; returns their sum by lane.
inline Floats compute_weights(const float* scores, uint8_t* to, const float* value_scales, KeyRange seen, long width, float step, float top) {
  const Floats steps = floats(step > TINY ? 1 / step : 0.f), below = floats(-top);
  Floats early = floats(0.f), late = floats(0.f);
  const auto zero = [&](long from, long end) {
    if (from < end) memset(to + from, 0, end - from), memset(to + TILE + from, 0, end - from);
  };
  const auto weight = [&](long t, bool all) {
    const Floats x = weight_of(load(scores + t) + below);
    return all ? x : keep(seen.mask(t), x);
  };
  zero(0, seen.from / 32 * 32);
  each_32(seen, [&](long t, auto all) {
    const Floats x = weight(t, all), y = weight(t + 16, all);
    early = early + x;
    late = late + y;
    const Floats x_steps = load(value_scales + t) * steps, y_steps = load(value_scales + t + 16) * steps;
    store_split<false>(to + t, to + TILE + t, to_ints(x * x_steps), to_ints(y * y_steps));
  });
  zero(padded(seen.to, 32), width);
  return early + late;
}

// Scores of `count` queries -> weights: [count, TILE] each; updates the softmax state. steps: of the weights, [count].
inline void softmax_split(const Call& call, const Reach& reach, float* scores, bf16* weights, float* steps, const float* scales,
                          long start, long end, long first, int count, long width, State s) {
  KeyRange seen[LANES_OF_ROWS];
  alignas(64) float lanes[LANES_OF_ROWS][16], top[LANES_OF_ROWS], before[LANES_OF_ROWS], shrink[LANES_OF_ROWS], total[LANES_OF_ROWS];
  s = s.from(first, call.cache.E);
  for (int i = 0; i < count; i++) {
    const long position = reach.position(first + i), low = reach.low(first + i);
    seen[i] = {std::max<long>(0, low - start), std::min(end, position + 1) - start};
    if (seen[i].any()) store(lanes[i], peak(call, scores + i * TILE, seen[i], scales));
  }
  largest_of(lanes, count, top);
  for (int i = 0; i < count; i++) {
    before[i] = s.top[i];
    top[i] = seen[i].any() ? std::max(before[i], top[i]) : before[i];
  }
  for (int i = 0; i < count; i += 16) store(shrink + i, exp2_below(load(before + i) - load(top + i)));
  for (int i = 0; i < count; i++) {
    steps[i] = i && seen[i] == seen[i - 1] ? steps[i - 1] : step_of(scales + TILE, seen[i]);
    uint8_t* to = (uint8_t*)(weights + i * TILE);
    if (seen[i].any())
      store(lanes[i], compute_weights(scores + i * TILE, to, scales + TILE, seen[i], width, steps[i], top[i]));
    else
      memset(to, 0, width), memset(to + TILE, 0, width), store(lanes[i], floats(0.f));
  }
  sums_of(lanes, count, total);
  for (int i = 0; i < count; i++) {
    s.total[i] = s.total[i] * shrink[i] + total[i];
    s.top[i] = top[i];
    if (before[i] == top[i] || before[i] == LOWEST) continue;  // no sums yet
    float* sums = s.sums + i * call.cache.E;
    for (long e = 0; e < call.cache.E; e += 16) store(sums + e, floats(shrink[i]) * load(sums + e));
  }
}

// -- products ----------------------------------------------------------------------------------------------------------

#ifdef QUIRE_AMX

inline bool is_split(long kind, long D, long E) { return kind == KV_INT8 && D % 64 == 0 && E % 64 == 0; }

// Packs values t..t+31 as half a step of each of [E / 32] panels of 32 columns: a line has four tokens.
inline void pack_32_bytes(const Tokens& tokens, long t, bf16* values, long panel_step) {
  const long E = tokens.cache.E;
  uint8_t* to = (uint8_t*)values;
  for (long half = 0; half < 2; half++, t += 16) {
    const uint8_t* from = (const uint8_t*)tokens.cache.values + tokens.slot(t) * E;
    Prefetch ahead = tokens.ahead(tokens.cache.values, t, E);
    for (long four = 0; four < 4; four++, to += LINE, ahead.issue(E / 16))
      for (long e = 0; e < E; e += 64) {
        const auto token = [&](long i) { return load((const int32_t*)(from + (four * 4 + i) * E + e)); };
        const Ints a = token(0), b = token(1), c = token(2), d = token(3);
        const auto store_two = [](uint8_t* at, Ints ac, Ints bd) {  // bytes of words that hold two columns of two tokens
          store((int32_t*)at, (ac & 0x00ff00ff) | (bd & 0x00ff00ff) << 8);
          store((int32_t*)(at + HALF_BYTES), (logical_right(ac, 8) & 0x00ff00ff) | (bd & (int32_t)0xff00ff00));
        };
        const auto upper = [](Ints low, Ints high) { return logical_right(low, 16) | (high & (int32_t)0xffff0000); };
        uint8_t* panel = to + e / 32 * panel_step;
        store_two(panel, (a & 0xffff) | c << 16, (b & 0xffff) | d << 16);
        store_two(panel + panel_step, upper(a, c), upper(b, d));
      }
  }
}

// Scores of `count` queries; keys: bytes in panels of 32 tokens, with the panel stride of bf16.
inline void scores_split(const bf16* queries, const float* query_steps, int count, const bf16* keys, long D, long width,
                             float* scores) {
  alignas(64) int32_t high[ROWS * 32], low[ROWS * 32];
  const uint8_t* q = (const uint8_t*)queries;
  for (long t = 0; t < width; t += 32, keys += 32 * D) {
    product_of_rows<Int8, false>(count, q, 2 * D, (const int8_t*)keys, STEP_BYTES, D / 64, high, 32);
    product_of_rows<Int8, false>(count, q + D, 2 * D, (const int8_t*)keys, STEP_BYTES, D / 64, low, 32);
    for (int i = 0; i < count; i++)
      for (long n = 0; n < 32; n += 16)
        store(scores + i * TILE + t + n, score_of(load(high + i * 32 + n), load(low + i * 32 + n), query_steps[i]));
  }
}

// values: as pack_32_bytes packs them; sums: [count, E].
inline void values_split(const bf16* weights, const float* steps, int count, const bf16* values, long panel_step, long E,
                             long width, bool fresh, float* sums) {
  alignas(64) int32_t high[ROWS * 32], low[ROWS * 32];
  const uint8_t* w = (const uint8_t*)weights;
  const int8_t* panel = (const int8_t*)values;
  for (long e = 0; e < E; e += 32, panel += panel_step) {
    product_of_rows<Unsigned, false>(count, w, 2 * TILE, panel, STEP_BYTES, width / 64, high, 32);
    product_of_rows<Unsigned, false>(count, w + TILE, 2 * TILE, panel, STEP_BYTES, width / 64, low, 32);
    for (int i = 0; i < count; i++)
      for (long n = 0; n < 32; n += 16)
        add_values(sums + i * E + e + n, load(high + i * 32 + n), load(low + i * 32 + n), steps[i], fresh);
  }
}

// Reorders sums to the order of columns: of each 64, [4, 16] -> [16, 4].
inline void natural_order(const float* sums, long E, float* to) {
  using D = __m512d;
  for (long e = 0; e < E; e += 64, sums += 64) {
    const __m512 p0 = load(sums), p1 = load(sums + 16), p2 = load(sums + 32), p3 = load(sums + 48);
    const D low01 = (D)_mm512_unpacklo_ps(p0, p1), low23 = (D)_mm512_unpacklo_ps(p2, p3);
    const D high01 = (D)_mm512_unpackhi_ps(p0, p1), high23 = (D)_mm512_unpackhi_ps(p2, p3);
    // Words 0, 4, 8 and 12, then the following ones ...
    const D w0 = _mm512_unpacklo_pd(low01, low23), w1 = _mm512_unpackhi_pd(low01, low23);
    const D w2 = _mm512_unpacklo_pd(high01, high23), w3 = _mm512_unpackhi_pd(high01, high23);
    const D early01 = _mm512_shuffle_f64x2(w0, w1, 0x44), early23 = _mm512_shuffle_f64x2(w2, w3, 0x44);
    const D late01 = _mm512_shuffle_f64x2(w0, w1, 0xee), late23 = _mm512_shuffle_f64x2(w2, w3, 0xee);
    store(to + e, (Floats)_mm512_shuffle_f64x2(early01, early23, 0x88));
    store(to + e + 16, (Floats)_mm512_shuffle_f64x2(early01, early23, 0xdd));
    store(to + e + 32, (Floats)_mm512_shuffle_f64x2(late01, late23, 0x88));
    store(to + e + 48, (Floats)_mm512_shuffle_f64x2(late01, late23, 0xdd));
  }
}

#else

inline bool is_split(long, long, long) { return false; }
inline void pack_32_bytes(const Tokens&, long, bf16*, long) {}
inline void scores_split(const bf16*, const float*, int, const bf16*, long, long, float*) {}
inline void values_split(const bf16*, const float*, int, const bf16*, long, long, long, bool, float*) {}
inline void natural_order(const float*, long, float*) {}

#endif

}  // namespace quire

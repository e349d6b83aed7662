// Few queries against a bf16 cache, with AVX-512: tokens go from memory through registers into the product, unpacked, since no
// other queries use them. The same products in the same order as with packed tokens (gemm_kernel.h).
#pragma once
#include "attention.h"

namespace quire {

#if defined(__AVX512F__) && !defined(QUIRE_AMX)

inline Floats dot_pair(Floats sums, const bf16* pair, Ints line) {
  const Ints word = ints(word_at(pair));
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sums, (__m512bh)word, (__m512bh)line);
#else
  const int32_t late = (int32_t)0xffff0000;
  return fma(as_floats(word & late), as_floats(line & late), fma(as_floats(word << 16), as_floats(line << 16), sums));
#endif
}

// q: [N, D]; scores of the 16 * PARTS tokens from t on: [N, TILE]. A sum is a chain of D / 2 dependent instructions, so several
// run in parallel.
template <int N, int PARTS>
void scores_direct(const bf16* q, const Tokens& tokens, long t, float* scores) {
  const long D = tokens.cache.D;
  KvRows keys[PARTS];
  Floats sums[PARTS][N];
#pragma GCC unroll 2
  for (int p = 0; p < PARTS; p++) {
    keys[p] = key_rows(tokens, t + p * 16, nullptr, nullptr);
#pragma GCC unroll 12
    for (int n = 0; n < N; n++) sums[p][n] = floats(0.f);
  }
  for (long d = 0; d < D; d += 32)
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) {
      keys[p].ahead.issue(16);
      each_transposed(keys[p].from + d * 2, D * 2, [&](int word, Ints line) {
#pragma GCC unroll 12
        for (int n = 0; n < N; n++) sums[p][n] = dot_pair(sums[p][n], q + n * D + d + word * 2, line);
      });
    }
#pragma GCC unroll 2
  for (int p = 0; p < PARTS; p++)
#pragma GCC unroll 12
    for (int n = 0; n < N; n++) store(scores + n * TILE + p * 16, sums[p][n]);
}

// sums [N, E], columns [e, e + 32 * PANELS), += weights [N, from..width] * values; `fresh`: instead of adding.
template <int N, int PANELS>
void values_direct(const bf16* weights, const Tokens& tokens, long start, long from, long width, long e, bool fresh, float* sums) {
  const long E = tokens.cache.E, step = tokens.cache.value_step();
  Floats c[N][2 * PANELS];
#pragma GCC unroll 12
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * PANELS; i++) c[n][i] = fresh ? floats(0.f) : load(sums + n * E + e + i * 16);
  for (long t = from; t < width; t += 16) {
    const long count = tokens.end - start - t;
    const bf16* values = (const bf16*)tokens.cache.values + tokens.slot(start + t) * step + e;
    Prefetch ahead = e ? Prefetch{nullptr} : tokens.ahead(tokens.cache.values, start + t, step * 2);
    for (long i = 0; i < 16; i += 2, values += 2 * step) {
      ahead.issue(step / 16);
#pragma GCC unroll 4
      for (int panel = 0; panel < PANELS; panel++) {
        const bf16* at = values + panel * 32;
        Ints early, late;
        interleave(i < count ? at : nullptr, i + 1 < count ? at + step : nullptr, early, late);
#pragma GCC unroll 12
        for (int n = 0; n < N; n++) {
          const bf16* pair = weights + n * TILE + t + i;
          c[n][2 * panel] = dot_pair(c[n][2 * panel], pair, early);
          c[n][2 * panel + 1] = dot_pair(c[n][2 * panel + 1], pair, late);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * PANELS; i++) store(sums + n * E + e + i * 16, c[n][i]);
}

template <int N>
struct DirectDot {
  static void scores(const bf16* q, const Tokens& tokens, long t, float* scores) {
    if constexpr (N <= 4) return scores_direct<N, 2>(q, tokens, t, scores);
    scores_direct<N, 1>(q, tokens, t, scores);
    scores_direct<N, 1>(q, tokens, t + 16, scores + 16);
  }
  static void values(const bf16* weights, const Tokens& tokens, long start, long from, long width, bool fresh, float* sums) {
    constexpr int PANELS = N <= 3 ? 4 : N <= 6 ? 2 : 1;  // at most 24 registers of sums
    long e = 0;
    for (; e + 32 * PANELS <= tokens.cache.E; e += 32 * PANELS)
      values_direct<N, PANELS>(weights, tokens, start, from, width, e, fresh, sums);
    for (; e < tokens.cache.E; e += 32) values_direct<N, 1>(weights, tokens, start, from, width, e, fresh, sums);
  }
};

// Calls f(DirectDot<count>()) if the cache is bf16; false otherwise.
template <class F>
inline bool with_direct_dot(const Tokens& tokens, int count, const F& f) {
  if (tokens.cache.kind != KV_BF16) return false;
  switch (count) {
#define CASE(n) \
  case n: return f(DirectDot<n>()), true;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
  return false;
}

#else

template <class F>
inline bool with_direct_dot(const Tokens&, int, const F&) {
  return false;
}

#endif

}  // namespace quire

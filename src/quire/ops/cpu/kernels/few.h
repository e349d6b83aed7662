// Up to FEW queries against a tile of the cache that nobody else asks for: what is packed for them need not last.
//
// AMX takes keys as they lie, as the rows of the product, and the queries as its columns: 16 tokens of 128 are then 4 loads of
// tiles instead of 4 transposes of 16 x 16 words. Exchanging the sides of a product changes no bit of it.
#pragma once
#include "straight.h"

namespace quire {

// What few queries need, of one item.
struct Few {
  const bf16* q;           // [count, D], with room for `touched(count)`
  bf16* columns;           // AMX: the queries as columns, [D / 32] tiles
  bf16* packed;            // room for 32 tokens
  float *scores, *scales;  // [count, TILE], [2, TILE]
  bf16* weights;           // [count, TILE]
  int count;
};

#ifdef QUIRE_AMX

constexpr int FEW = 16;

inline void begin_few(const Few& f, long D) {
  for (long d = 0; d < D / 32; d++) transpose_words(f.q + d * 32, D * 2, f.columns + d * HALF);
}

// [16 tokens, 16] -> `count` rows of 16 tokens, TILE apart.
inline void transpose_scores(const float* found, int count, float* scores) {
  for (int i = 0; i < count; i += 4) {
    __m512 x[4];
    for (int t = 0; t < 4; t++) {
      const float* at = found + t * 16 + i;
      x[t] = _mm512_castps128_ps512(_mm_loadu_ps(at));
      x[t] = _mm512_insertf32x4(x[t], _mm_loadu_ps(at + 64), 1);
      x[t] = _mm512_insertf32x4(x[t], _mm_loadu_ps(at + 128), 2);
      x[t] = _mm512_insertf32x4(x[t], _mm_loadu_ps(at + 192), 3);
    }
    const __m512d low01 = (__m512d)_mm512_unpacklo_ps(x[0], x[1]), low23 = (__m512d)_mm512_unpacklo_ps(x[2], x[3]);
    float* to = scores + i * TILE;
    _mm512_storeu_ps(to, (__m512)_mm512_unpacklo_pd(low01, low23));
    if (i + 1 < count) _mm512_storeu_ps(to + TILE, (__m512)_mm512_unpackhi_pd(low01, low23));
    if (i + 2 >= count) return;
    const __m512d high01 = (__m512d)_mm512_unpackhi_ps(x[0], x[1]), high23 = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
    _mm512_storeu_ps(to + 2 * TILE, (__m512)_mm512_unpacklo_pd(high01, high23));
    if (i + 3 < count) _mm512_storeu_ps(to + 3 * TILE, (__m512)_mm512_unpackhi_pd(high01, high23));
  }
}

// Scores of the 32 tokens from t on, the tile's `at`-th.
inline void scores_of_few(const Few& f, const Tokens& tokens, long t, long at) {
  const long D = tokens.cache.D;
  alignas(64) float found[2][16 * 16];
  alignas(64) bf16 wide[2][16 * 32];
  Near keys[2];
  for (int i = 0; i < 2; i++) keys[i] = keys_near(tokens, t + 16 * i, f.scales + at + 16 * i, f.scales + TILE + at + 16 * i);
  _tile_zero(0);
  _tile_zero(1);
  for (long d = 0; d < D; d += 32) {
    for (Near& near : keys) near.ahead.some(8 * tokens.bytes());
    _tile_loadd(6, f.columns + d * 16, 64);
    if (tokens.cache.kind == SHORT) {
      _tile_loadd(4, keys[0].from + d * 2, D * 2);
      _tile_loadd(5, keys[1].from + d * 2, D * 2);
    } else {
      with_code(tokens.cache.kind, [&](auto code) {
        for (int i = 0; i < 32; i++) widen_32(code, (const uint8_t*)keys[i / 16].from + i % 16 * D + d, wide[i / 16] + i % 16 * 32);
      });
      _tile_loadd(4, wide[0], 64);
      _tile_loadd(5, wide[1], 64);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
  }
  _tile_stored(0, found[0], 64);
  _tile_stored(1, found[1], 64);
  transpose_scores(found[0], f.count, f.scores + at);
  transpose_scores(found[1], f.count, f.scores + at + 16);
}

// sums [16, E] += weights [16, from..width] * values; `fresh`: instead of adding.
inline void values_of_few(const Few& f, const Tokens& tokens, long start, long from, long width,
                          bool fresh, float* sums) {
  const long E = tokens.cache.E;
  for (long e = 0; e < E; e += 64) {
    const bool more = e + 32 < E;
    float* c = sums + e;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (!fresh) {
      _tile_loadd(0, c, E * 4);
      _tile_loadd(1, c + 16, E * 4);
    }
    if (!fresh && more) {
      _tile_loadd(2, c + 32, E * 4);
      _tile_loadd(3, c + 48, E * 4);
    }
    for (long t = from; t < width; t += 32) {
      pack_32_values(tokens, start + t, e, more ? 64 : 32, f.packed, STEP);
      _tile_loadd(4, f.weights + t, TILE * 2);
      _tile_loadd(6, f.packed, 64);
      _tile_loadd(7, f.packed + HALF, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (!more) continue;
      _tile_loadd(6, f.packed + STEP, 64);
      _tile_loadd(7, f.packed + STEP + HALF, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, c, E * 4);
    _tile_stored(1, c + 16, E * 4);
    if (!more) continue;
    _tile_stored(2, c + 32, E * 4);
    _tile_stored(3, c + 48, E * 4);
  }
}

#else

constexpr int FEW = ROWS;

inline void begin_few(const Few&, long) {}

inline void scores_of_few(const Few& f, const Tokens& tokens, long t, long at) {
  if (straight(tokens, f.count, [&](auto way) { way.scores(f.q, tokens, t, f.scores + at); })) return;
  const long D = tokens.cache.D;
  pack_32_keys(tokens, t, f.packed, f.scales + at, f.scales + TILE + at);
  product_of_rows<Bf16, false>(f.count, f.q, D, f.packed, STEP, D / 32, f.scores + at, TILE);
}

inline void values_of_few(const Few& f, const Tokens& tokens, long start, long from, long width,
                          bool fresh, float* sums) {
  if (straight(tokens, f.count, [&](auto way) { way.values(f.weights, tokens, start, from, width, fresh, sums); })) return;
  const long E = tokens.cache.E;
  if (fresh) memset(sums, 0, f.count * E * sizeof(float));
  for (long t = from; t < width; t += 32) {
    pack_32_values(tokens, start + t, 0, E, f.packed, STEP);
    for (long e = 0; e < E; e += 32)
      product_of_rows<Bf16, true>(f.count, f.weights + t, TILE, f.packed + e * 32, STEP, 1, sums + e, E);
  }
}

#endif

}  // namespace quire

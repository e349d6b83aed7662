// Up to DECODE_MAX_QUERIES queries against a tile of the cache that no other queries use, so packed data is not kept.
//
// AMX loads keys unpacked, as the rows of the product, with the queries as its columns: 16 tokens of 128 features are 4 tile loads
// instead of 4 transposes of 16 x 16 words. Exchanging the operands of a product changes no bit. Values are unpacked too
// (decision 44).
#pragma once
#include "attention_int8_split.h"
#include "attention_decode_avx512.h"

namespace quire {

// The buffers of an item with few queries.
struct DecodeQueries {
  const bf16* q;           // [count, D], with room for `touched(count)`
  bf16* columns;           // AMX: the queries as columns, [D / 32] tiles
  bf16* packed;            // room for 32 tokens
  float *scores, *scales;  // [count, TILE], [2, TILE]
  bf16* weights;           // [count, TILE]
  const float* query_steps;  // attention_int8_split.h: [count]
  float* weight_steps;
  int count;
};

#ifdef QUIRE_AMX

constexpr int DECODE_MAX_QUERIES = 16;

// The number of rows of tiles 2, 3 and 7; 16 for packed products. It is kept from item to item: configuring tiles takes 65 ns.
struct Shape {
  int rows = 16;
  void take(int wanted) {
    if (rows == wanted) return;
    rows = wanted;
    TileConfig config;
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = i == 2 || i == 3 || i == 7 ? rows : 16;
    load_config(config);
  }
};

// [16 tokens, 16] -> `count` rows of 16 tokens, `step` apart.
inline void transpose_scores(const float* found, int count, float* scores, long step) {
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
    float* to = scores + i * step;
    _mm512_storeu_ps(to, (__m512)_mm512_unpacklo_pd(low01, low23));
    if (i + 1 < count) _mm512_storeu_ps(to + step, (__m512)_mm512_unpackhi_pd(low01, low23));
    if (i + 2 >= count) return;
    const __m512d high01 = (__m512d)_mm512_unpackhi_ps(x[0], x[1]), high23 = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
    _mm512_storeu_ps(to + 2 * step, (__m512)_mm512_unpacklo_pd(high01, high23));
    if (i + 3 < count) _mm512_storeu_ps(to + 3 * step, (__m512)_mm512_unpackhi_pd(high01, high23));
  }
}

// Transposes the queries' rows of high and low bytes to columns: 8 queries a tile.
inline void begin_few_split(const DecodeQueries& f, long D) {
  const char* rows = (const char*)f.q;
  char* to = (char*)f.columns;
  for (int i = 0; i < f.count; i += 8)
    for (long d = 0; d < D; d += 64, to += HALF_BYTES) transpose_words(rows + i * 2 * D + d, D, to);
  written();
}

inline void scores_of_few_split(const DecodeQueries& f, const Tokens& tokens, long t, long at) {
  const long D = tokens.cache.D;
  alignas(64) int32_t found[2][16 * 16], transposed[16][16];
  const char* columns = (const char*)f.columns;
  KvRows keys[2];
  for (int i = 0; i < 2; i++) keys[i] = key_rows(tokens, t + 16 * i, f.scales + at + 16 * i, f.scales + TILE + at + 16 * i);
  for (int i = 0; i < f.count; i += 8) {
    _tile_zero(0);
    _tile_zero(1);
    for (long d = 0; d < D; d += 64, columns += HALF_BYTES) {
      _tile_loadd(6, columns, 64);
      keys[0].ahead.issue(8);
      _tile_loadd(4, keys[0].from + d, D);
      keys[0].ahead.issue(8);
      _tile_loadd(5, keys[1].from + d, D);
      keys[1].ahead.issue(8);
      _tile_dpbssd(0, 4, 6);
      keys[1].ahead.issue(8);
      _tile_dpbssd(1, 5, 6);
    }
    for (KvRows& rows : keys) rows.ahead.from = nullptr;
    _tile_stored(0, found[0], 64);
    _tile_stored(1, found[1], 64);
    const int count = std::min(8, f.count - i);
    for (int half = 0; half < 2; half++) {
      transpose_scores((const float*)found[half], 2 * count, (float*)transposed, 16);
      for (int n = 0; n < count; n++)
        store(f.scores + (i + n) * TILE + at + half * 16,
              score_of(load(transposed[2 * n]), load(transposed[2 * n + 1]), f.query_steps[i + n]));
    }
  }
}

// The weights of two queries for 16 tokens, as rows for a product with unpacked values. A word of values has four columns of one
// token, so each of the four has a row of its own, with zeros for the others. Prefetches four times `lines`.
inline void rows_of_split_weights(const uint8_t* weights, int count, int32_t (*rows)[16], Prefetch& ahead, long lines) {
  for (int i = 0; i < 2; i++, weights += 2 * TILE)
    for (int half = 0; half < 2; half++) {
      const Ints w = i < count ? widen(weights + half * TILE) : ints(0);
      for (int p = 0; p < 4; p++, rows++) store(rows[0], w << 8 * p);
      ahead.issue(8);
    }
  written();
}

// sums [16, E] += weights [16, from..width] * values; `fresh`: instead of adding.
inline void values_of_few_split(const DecodeQueries& f, const Tokens& tokens, long start, long from, long width, bool fresh, float* sums) {
  const long E = tokens.cache.E;
  alignas(64) int32_t rows[16][16], found[2][2][2][4][16];  // 128 columns, queries, halves
  for (int i = 0; i < f.count; i += 2)
    for (long e = 0; e < E; e += 128) {
      const int more = e + 64 < E, count = std::min(2, f.count - i);
      _tile_zero(0);
      _tile_zero(1);
      for (long t = from; t < width; t += 16) {
        const char* values = (const char*)tokens.cache.values + tokens.slot(start + t) * E + e;
        Prefetch ahead = i + e ? Prefetch{nullptr} : tokens.ahead(tokens.cache.values, start + t, E);
        rows_of_split_weights((const uint8_t*)f.weights + i * 2 * TILE + t, count, rows, ahead, E / 32);
        _tile_loadd(4, rows, 64);
        ahead.issue(E / 32);
        _tile_loadd(6, values, E);
        ahead.issue(E / 32);
        _tile_dpbusd(0, 4, 6);
        ahead.issue(E / 16);
        if (!more) continue;
        _tile_loadd(7, values + 64, E);
        _tile_dpbusd(1, 4, 7);
      }
      _tile_stored(0, found[0], 64);
      _tile_stored(1, found[1], 64);
      for (int n = 0; n < count; n++)
        for (int part = 0; part <= more; part++)
          for (int p = 0; p < 4; p++)
            add_values(sums + (i + n) * E + e + part * 64 + p * 16, load(found[part][n][0][p]), load(found[part][n][1][p]),
                       f.weight_steps[i + n], fresh);
    }
}

// Whether values are used unpacked: then each query has two rows of weights.
inline bool takes_unpacked_values(const DecodeQueries& f, const Paged& cache) {
  return cache.kind == KV_BF16 && cache.value_step() == cache.E && 2 * f.count <= 16;
}

inline void begin_few(const DecodeQueries& f, const Paged& cache, Shape& shape) {
  const long D = cache.D;
  shape.take(takes_unpacked_values(f, cache) ? 2 * f.count : 16);
  if (cache.kind == KV_INT8_SPLIT) return begin_few_split(f, D);
  for (long d = 0; d < D / 32; d++) transpose_words(f.q + d * 32, D * 2, f.columns + d * HALF);
  written();
}

// Scores of the 32 tokens from t on, to column `at` of the tile.
inline void scores_of_few(const DecodeQueries& f, const Tokens& tokens, long t, long at) {
  if (tokens.cache.kind == KV_INT8_SPLIT) return scores_of_few_split(f, tokens, t, at);
  const long D = tokens.cache.D;
  alignas(64) float found[2][16 * 16];
  alignas(64) bf16 wide[2][16 * 32];
  KvRows keys[2];
  for (int i = 0; i < 2; i++) keys[i] = key_rows(tokens, t + 16 * i, f.scales + at + 16 * i, f.scales + TILE + at + 16 * i);
  _tile_zero(0);
  _tile_zero(1);
  for (long d = 0; d < D; d += 32) {
    _tile_loadd(6, f.columns + d * 16, 64);
    keys[0].ahead.issue(8);
    if (tokens.cache.kind == KV_BF16) {
      _tile_loadd(4, keys[0].from + d * 2, D * 2);
      keys[0].ahead.issue(8);
      keys[1].ahead.issue(8);
      _tile_loadd(5, keys[1].from + d * 2, D * 2);
    } else {
      with_code(tokens.cache.kind, [&](auto code) {
        for (int i = 0; i < 32; i++) widen_32(code, (const uint8_t*)keys[i / 16].from + i % 16 * D + d, wide[i / 16] + i % 16 * 32);
      });
      written();
      _tile_loadd(4, wide[0], 64);
      _tile_loadd(5, wide[1], 64);
    }
    keys[1].ahead.issue(8);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
  }
  _tile_stored(0, found[0], 64);
  _tile_stored(1, found[1], 64);
  transpose_scores(found[0], f.count, f.scores + at, TILE);
  transpose_scores(found[1], f.count, f.scores + at + 16, TILE);
}

// 32 columns -> the even ones, then the odd ones; and back.
inline void split_even_odd(float* at) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 x = load(at), y = load(at + 16);
  store(at, (Floats)_mm512_permutex2var_ps(x, even, y));
  store(at + 16, (Floats)_mm512_permutex2var_ps(x, _mm512_add_epi32(even, _mm512_set1_epi32(1)), y));
}
inline void merge_even_odd(float* at) {
  const __m512i early = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512 x = load(at), y = load(at + 16);
  store(at, (Floats)_mm512_permutex2var_ps(x, early, y));
  store(at + 16, (Floats)_mm512_permutex2var_ps(x, _mm512_add_epi32(early, _mm512_set1_epi32(8)), y));
}

// Values t..t+31 as contiguous memory: in the cache, if they are contiguous there and none is missing; else a copy padded with zeros.
inline const bf16* contiguous_values(const Tokens& tokens, long t, bf16* copy) {
  const long E = tokens.cache.E, count = tokens.end - t, early = tokens.slot(t), late = tokens.slot(t + 16);
  const bf16* values = (const bf16*)tokens.cache.values;
  if (count >= 32 && late == early + 16) return values + early * E;
  memcpy(copy, values + early * E, std::min<long>(16, count) * E * sizeof(bf16));
  if (count > 16) memcpy(copy + 16 * E, values + late * E, std::min<long>(16, count - 16) * E * sizeof(bf16));
  if (count < 32) memset(copy + count * E, 0, (32 - count) * E * sizeof(bf16));
  return copy;
}

// A word of a line has two columns of one token, so a weight has two rows: one with zeros for the odd columns, one for the even.
// What 32 packed tokens add to a sum is the sum over the even tokens plus the sum over the odd ones: the same here.
inline void values_unpacked(const DecodeQueries& f, const Tokens& tokens, long start, long from, long width, bool fresh, float* sums) {
  const long E = tokens.cache.E;
  alignas(64) int32_t even[16][16], odd[16][16];
  alignas(64) float found[16][16];
  if (fresh) memset(sums, 0, f.count * E * sizeof(float));
  for (long e = 0; e < f.count * E; e += 32) split_even_odd(sums + e);
  for (long t = from; t < width; t += 32) {
    const bf16* values = contiguous_values(tokens, start + t, f.packed);
    Prefetch early = tokens.ahead(tokens.cache.values, start + t, E * 2);
    Prefetch late = tokens.ahead(tokens.cache.values, start + t + 16, E * 2);
    for (int i = 0; i < f.count; i++) {
      const Ints pairs = load((const int32_t*)(f.weights + i * TILE + t));
      store(even[2 * i], pairs & 0xffff), store(even[2 * i + 1], pairs << 16);
      store(odd[2 * i], logical_right(pairs, 16)), store(odd[2 * i + 1], pairs & (int32_t)0xffff0000);
    }
    written();
    _tile_loadd(2, even, 64);
    _tile_loadd(3, odd, 64);
    for (long e = 0; e < E; e += 32) {
      early.issue(8);
      _tile_zero(7);
      _tile_loadd(4, values + e, E * 4);
      early.issue(8);
      _tile_dpbf16ps(7, 2, 4);
      late.issue(8);
      _tile_loadd(5, values + E + e, E * 4);
      late.issue(8);
      _tile_dpbf16ps(7, 3, 5);
      _tile_stored(7, found, 64);
      for (int i = 0; i < f.count; i++)
        for (int n = 0; n < 2; n++) {
          float* to = sums + i * E + e + n * 16;
          store(to, load(to) + load(found[2 * i + n]));
        }
    }
  }
  for (long e = 0; e < f.count * E; e += 32) merge_even_odd(sums + e);
}

// sums [16, E] += weights [16, from..width] * values; `fresh`: instead of adding.
inline void values_of_few(const DecodeQueries& f, const Tokens& tokens, long start, long from, long width,
                          bool fresh, float* sums) {
  if (tokens.cache.kind == KV_INT8_SPLIT) return values_of_few_split(f, tokens, start, from, width, fresh, sums);
  if (takes_unpacked_values(f, tokens.cache)) return values_unpacked(f, tokens, start, from, width, fresh, sums);
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
      written();
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

constexpr int DECODE_MAX_QUERIES = ROWS;

struct Shape {
  void take(int) {}
};

inline void begin_few(const DecodeQueries&, const Paged&, Shape&) {}

inline void scores_of_few(const DecodeQueries& f, const Tokens& tokens, long t, long at) {
  if (with_direct_dot(tokens, f.count, [&](auto way) { way.scores(f.q, tokens, t, f.scores + at); })) return;
  const long D = tokens.cache.D;
  pack_32_keys(tokens, t, f.packed, f.scales + at, f.scales + TILE + at);
  product_of_rows<Bf16, false>(f.count, f.q, D, f.packed, STEP, D / 32, f.scores + at, TILE);
}

inline void values_of_few(const DecodeQueries& f, const Tokens& tokens, long start, long from, long width,
                          bool fresh, float* sums) {
  if (with_direct_dot(tokens, f.count, [&](auto way) { way.values(f.weights, tokens, start, from, width, fresh, sums); })) return;
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

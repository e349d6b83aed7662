// Tokens of a paged cache as the product wants them (product.h): 32 at a time, in bf16, whatever the cache keeps.
//
// Cache: keys [blocks, heads, block_size, D], values [blocks, heads, block_size, E], of codes also the scales of both
// [blocks, heads, block_size]; a block holds a multiple of 16 tokens. Codes become bf16 exactly; their scales come along.
#pragma once
#include "codes.h"
#include "product.h"

namespace quire {

constexpr long AHEAD = 64;  // tokens: how far ahead the cache is fetched

inline long padded(long n, long to) { return (n + to - 1) / to * to; }

struct Paged {
  const void *keys, *values;
  const float *key_scales, *value_scales;  // of codes
  const int* table;                        // [rows, table_step]: blocks of each row
  long kind, table_step, heads, block_size, D, E;
};

// One row and head of it; tokens from `end` on are not looked at.
struct Tokens {
  const Paged& cache;
  const int* blocks;
  long head, end;

  Tokens(const Paged& cache, long row, long head, long end)
      : cache(cache), blocks(cache.table + row * cache.table_step), head(head), end(end) {}

  // Of the 16 tokens around t, or of the last 16 there are: the first one's place in the cache.
  long slot(long t) const {
    const long at = std::min(t, end - 1) / 16 * 16;
    return ((long)blocks[at / cache.block_size] * cache.heads + head) * cache.block_size + at % cache.block_size;
  }
  long bytes() const { return cache.kind == SHORT ? 2 : 1; }
};

// Spreads fetches over the packing: `lines` of them a call.
struct Fetches {
  const char* from;
  long left;
  void some(long lines) {
    for (lines = std::min(lines, left), left -= lines; lines > 0; lines--, from += LINE) fetch(from);
  }
};

// 16 keys -> the two halves of a panel of 32 columns, for each 32 of D.
inline void pack_keys(const bf16* from, long D, bf16* to, Fetches ahead) {
  for (long d = 0; d < D / 32; d++, ahead.some(16)) transpose_words(from + d * 32, D * 2, to + d * STEP);
}
template <class C>
inline void pack_keys(C, const uint8_t* from, long D, bf16* to, Fetches ahead) {
  alignas(64) bf16 wide[16 * 32];
  for (long d = 0; d < D / 32; d++, ahead.some(8)) {
    for (long i = 0; i < 16; i++) widen_32(C{}, from + i * D + d * 32, wide + i * 32);
    transpose_words(wide, 64, to + d * STEP);
  }
}

// 16 values -> 8 lines (of pairs of tokens) of each panel of 32 columns; tokens from `count` on are zeros.
inline void pack_values(const bf16* from, long E, long count, bf16* to, long panel_step, Fetches ahead) {
  for (long pair = 0; pair < 8; pair++, ahead.some(E / 16))
    for (long e = 0; e < E / 32; e++) {
      const bf16* at = from + 2 * pair * E + e * 32;
      bf16* line = to + e * panel_step + pair * 32;
      interleave(2 * pair < count ? at : nullptr, 2 * pair + 1 < count ? at + E : nullptr, line, line + HALF);
    }
}
template <class C>
inline void pack_values(C, const uint8_t* from, long E, long count, bf16* to, long panel_step, Fetches ahead) {
  alignas(64) bf16 a[32], b[32];
  for (long pair = 0; pair < 8; pair++, ahead.some(E / 32))
    for (long e = 0; e < E / 32; e++) {
      const uint8_t* at = from + 2 * pair * E + e * 32;
      bf16* line = to + e * panel_step + pair * 32;
      widen_32(C{}, at, a);
      widen_32(C{}, at + E, b);
      interleave(2 * pair < count ? a : nullptr, 2 * pair + 1 < count ? b : nullptr, line, line + HALF);
    }
}
// Of int8, words are put together in 32 bits, where they become floats anyway.
inline void pack_values(Int8Code, const uint8_t* from, long E, long count, bf16* to, long panel_step, Fetches ahead) {
  using C = Int8Code;
  for (long pair = 0; pair < 8; pair++, ahead.some(E / 32))
    for (long e = 0; e < E / 32; e++)
      for (long half = 0; half < 2; half++) {
        const uint8_t* at = from + 2 * pair * E + e * 32 + half * 16;
        const Ints a = 2 * pair < count ? as_ints(C::value(at)) : ints(0);
        const Ints b = 2 * pair + 1 < count ? as_ints(C::value(at + E)) : ints(0);
        store((int32_t*)(to + e * panel_step + half * HALF + pair * 32), logical_right(a, 16) | (b & (int32_t)0xffff0000));
      }
}

// Keys t..t+31 as [D / 32] steps; and the scales of these keys and values, which are 0 from `end` on.
inline void pack_32_keys(const Tokens& tokens, long t, bf16* to, float* key_scales, float* value_scales) {
  const Paged& cache = tokens.cache;
  const long D = cache.D, size = D * tokens.bytes();
  for (long half = 0; half < 2; half++, t += 16, to += HALF, key_scales += 16, value_scales += 16) {
    const long slot = tokens.slot(t), next = tokens.slot(t + AHEAD);
    const char* from = (const char*)cache.keys + slot * size;
    const Fetches ahead = {(const char*)cache.keys + next * size, 16 * size / LINE};
    if (cache.kind == SHORT) {
      pack_keys((const bf16*)from, D, to, ahead);
      continue;
    }
    with_code(cache.kind, [&](auto code) { pack_keys(code, (const uint8_t*)from, D, to, ahead); });
    fetch(cache.key_scales + next);
    fetch(cache.value_scales + next);
    const Mask there = span(0, tokens.end - t);
    store(key_scales, keep(there, load(cache.key_scales + slot)));
    store(value_scales, keep(there, load(cache.value_scales + slot)));
  }
}

// Values t..t+31 as one step of each of [E / 32] panels, `panel_step` apart; those from `end` on are zeros.
inline void pack_32_values(const Tokens& tokens, long t, bf16* to, long panel_step) {
  const Paged& cache = tokens.cache;
  const long E = cache.E, size = E * tokens.bytes();
  for (long half = 0; half < 2; half++, t += 16, to += 8 * 32) {
    const long count = std::max<long>(0, std::min<long>(16, tokens.end - t));
    const char* from = (const char*)cache.values + tokens.slot(t) * size;
    const Fetches ahead = {(const char*)cache.values + tokens.slot(t + AHEAD) * size, 16 * size / LINE};
    if (cache.kind == SHORT) pack_values((const bf16*)from, E, count, to, panel_step, ahead);
    with_code(cache.kind, [&](auto code) { pack_values(code, (const uint8_t*)from, E, count, to, panel_step, ahead); });
  }
}

}  // namespace quire

// Tokens of a paged cache as the product wants them (gemm_kernel.h): 32 at a time, in bf16, whatever the cache keeps.
//
// Cache: keys [blocks, heads, block_size, D], values [blocks, heads, block_size, E], of codes also the scales of both
// [blocks, heads, block_size]; a block holds a multiple of 16 tokens. Codes become bf16 exactly; their scales come along.
#pragma once
#include "kv_codec.h"
#include "gemm_kernel.h"

namespace quire {

constexpr long AHEAD = 64;  // tokens: how far ahead the cache is fetched

inline long padded(long n, long to) { return (n + to - 1) / to * to; }

struct Paged {
  const void *keys, *values;
  const float *key_scales, *value_scales;  // of codes
  const int* table;                        // [rows, table_step]: blocks of each row
  long kind, table_step, heads, block_size, D, E;
};

// What is to be fetched, some lines at a time: a burst would fill the core's 16 fill buffers, and its own loads wait for one.
struct Fetches {
  const char* from;  // or null
  void some(long lines) {
    if (!from) return;
#pragma GCC unroll 16
    for (long i = 0; i < lines; i++) fetch(from + i * LINE);
    from += lines * LINE;
  }
};

// One row and head of it: what is read from `first` on; tokens from `end` on are not looked at.
struct Tokens {
  const Paged& cache;
  const int* blocks;
  long head, first, end;
  const Tokens* next = nullptr;  // what is read after this

  Tokens(const Paged& cache, long row, long head, long first, long end)
      : cache(cache), blocks(cache.table + row * cache.table_step), head(head), first(first), end(end) {}

  // Of the 16 tokens around t, or of the last 16 there are: the first one's place in the cache.
  long slot(long t) const {
    const unsigned at = (unsigned)(std::min(t, end - 1) & -16), size = (unsigned)cache.block_size;
    return ((long)blocks[at / size] * cache.heads + head) * size + at % size;
  }
  long bytes() const { return cache.kind == SHORT ? 2 : 1; }

  // Where the 16 tokens lie that are read AHEAD tokens after those at t, of which each has `size` bytes.
  Fetches ahead(const void* data, long t, long size) const {
    const Tokens* of = this;
    const long stop = padded(end, 32);  // more are not asked for
    if ((t += AHEAD) >= stop) {
      of = next, t += next ? next->first - stop : 0;
      if (!of || t >= of->end) return {nullptr};
    }
    return {(const char*)data + of->slot(t) * size};
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

// 16 values, `columns` of their E -> 8 lines (of pairs of tokens) of each panel of 32; tokens from `count` on are zeros.
inline void pack_values(const bf16* from, long E, long columns, long count, bf16* to, long panel_step, Fetches ahead) {
  for (long pair = 0; pair < 8; pair++, ahead.some(E / 16))
    for (long e = 0; e < columns / 32; e++) {
      const bf16* at = from + 2 * pair * E + e * 32;
      bf16* line = to + e * panel_step + pair * 32;
      interleave(2 * pair < count ? at : nullptr, 2 * pair + 1 < count ? at + E : nullptr, line, line + HALF);
    }
}
template <class C>
inline void pack_values(C, const uint8_t* from, long E, long columns, long count, bf16* to, long panel_step, Fetches ahead) {
  alignas(64) bf16 a[32], b[32];
  for (long pair = 0; pair < 8; pair++, ahead.some(E / 32))
    for (long e = 0; e < columns / 32; e++) {
      const uint8_t* at = from + 2 * pair * E + e * 32;
      bf16* line = to + e * panel_step + pair * 32;
      widen_32(C{}, at, a);
      widen_32(C{}, at + E, b);
      interleave(2 * pair < count ? a : nullptr, 2 * pair + 1 < count ? b : nullptr, line, line + HALF);
    }
}
// Of int8, words are put together in 32 bits, where they become floats anyway.
inline void pack_values(Int8Code, const uint8_t* from, long E, long columns, long count, bf16* to, long panel_step, Fetches ahead) {
  using C = Int8Code;
  for (long pair = 0; pair < 8; pair++, ahead.some(E / 32))
    for (long e = 0; e < columns / 32; e++)
      for (long half = 0; half < 2; half++) {
        const uint8_t* at = from + 2 * pair * E + e * 32 + half * 16;
        const Ints a = 2 * pair < count ? as_ints(C::value(at)) : ints(0);
        const Ints b = 2 * pair + 1 < count ? as_ints(C::value(at + E)) : ints(0);
        store((int32_t*)(to + e * panel_step + half * HALF + pair * 32), logical_right(a, 16) | (b & (int32_t)0xffff0000));
      }
}

// 16 tokens as they lie, and what is fetched while they are read.
struct Near {
  const char* from;
  Fetches ahead;
};

// Keys t..t+15; and the scales of these keys and values, which are 0 from `end` on.
inline Near keys_near(const Tokens& tokens, long t, float* key_scales, float* value_scales) {
  const Paged& cache = tokens.cache;
  const long size = cache.D * tokens.bytes(), slot = tokens.slot(t);
  if (cache.kind != SHORT) {
    tokens.ahead(cache.key_scales, t, sizeof(float)).some(1);
    tokens.ahead(cache.value_scales, t, sizeof(float)).some(1);
    const Mask there = span(0, tokens.end - t);
    store(key_scales, keep(there, load(cache.key_scales + slot)));
    store(value_scales, keep(there, load(cache.value_scales + slot)));
  }
  return {(const char*)cache.keys + slot * size, tokens.ahead(cache.keys, t, size)};
}

// Keys t..t+31 as [D / 32] steps.
inline void pack_32_keys(const Tokens& tokens, long t, bf16* to, float* key_scales, float* value_scales) {
  const long D = tokens.cache.D, kind = tokens.cache.kind;
  for (long half = 0; half < 32; half += 16, to += HALF) {
    const Near keys = keys_near(tokens, t + half, key_scales + half, value_scales + half);
    if (kind == SHORT) pack_keys((const bf16*)keys.from, D, to, keys.ahead);
    if (kind == HALVED) pack_keys((const bf16*)keys.from, D / 2, to, keys.ahead);  // two bytes go where a bf16 does
    with_code(kind, [&](auto code) { pack_keys(code, (const uint8_t*)keys.from, D, to, keys.ahead); });
  }
}

// Values t..t+31, of each the columns [e, e + columns), as one step of each of [columns / 32] panels, `panel_step` apart; those
// from `end` on are zeros.
inline void pack_32_values(const Tokens& tokens, long t, long e, long columns, bf16* to, long panel_step) {
  const Paged& cache = tokens.cache;
  const long E = cache.E, size = E * tokens.bytes();
  for (long half = 0; half < 2; half++, t += 16, to += 8 * 32) {
    const long count = std::max<long>(0, std::min<long>(16, tokens.end - t));
    const char* from = (const char*)cache.values + tokens.slot(t) * size + e * tokens.bytes();
    const Fetches ahead = e ? Fetches{nullptr} : tokens.ahead(cache.values, t, size);
    if (cache.kind == SHORT) pack_values((const bf16*)from, E, columns, count, to, panel_step, ahead);
    with_code(cache.kind, [&](auto code) { pack_values(code, (const uint8_t*)from, E, columns, count, to, panel_step, ahead); });
  }
}

}  // namespace quire

// Packs tokens of a paged cache for the product (gemm_kernel.h): 32 at a time, in bf16, from any element format.
//
// Cache: keys [blocks, heads, block_size, D], values [blocks, heads, block_size, E]; a quantized one also has the scales of both,
// [blocks, heads, block_size]; a block holds a multiple of 16 tokens. Codes are converted to bf16 exactly; their scales are returned.
// If keys and values are at one address (MLA), a bf16 value is the first E elements of its key.
#pragma once
#include "kv_codec.h"
#include "gemm_kernel.h"

namespace quire {

constexpr long AHEAD = 64;  // tokens: how far ahead the cache is fetched

inline long padded(long n, long to) { return (n + to - 1) / to * to; }

struct Paged {
  const void *keys, *values;
  const float *key_scales, *value_scales;  // of a quantized cache
  const int* table;                        // [rows, table_step]: blocks of each row
  long kind, table_step, heads, block_size, D, E;
  long value_step() const { return keys == values ? D : E; }  // elements from a value to the next
};

// A prefetch of some lines at a time: a burst would fill the core's 16 fill buffers, and its own loads would wait for one.
struct Prefetch {
  const char* from;  // or null
  void issue(long lines) {
    if (!from) return;
#pragma GCC unroll 16
    for (long i = 0; i < lines; i++) fetch(from + i * LINE);
    from += lines * LINE;
  }
};

// One row and head of the cache: tokens [first, end).
struct Tokens {
  const Paged& cache;
  const int* blocks;
  long head, first, end;
  const Tokens* next = nullptr;  // the tokens that are read next

  Tokens(const Paged& cache, long row, long head, long first, long end)
      : cache(cache), blocks(cache.table + row * cache.table_step), head(head), first(first), end(end) {}

  // The slot of the first of the 16 tokens around t, or of the last 16 there are.
  long slot(long t) const {
    const unsigned at = (unsigned)(std::min(t, end - 1) & -16), size = (unsigned)cache.block_size;
    return ((long)blocks[at / size] * cache.heads + head) * size + at % size;
  }
  long bytes() const { return cache.kind == KV_BF16 ? 2 : 1; }

  // A prefetch of the 16 tokens that are read AHEAD tokens after those at t; each has `size` bytes.
  Prefetch ahead(const void* data, long t, long size) const {
    const Tokens* of = this;
    const long stop = padded(end, 32);  // tokens beyond are not read
    if ((t += AHEAD) >= stop) {
      of = next, t += next ? next->first - stop : 0;
      if (!of || t >= of->end) return {nullptr};
    }
    return {(const char*)data + of->slot(t) * size};
  }
};

// 16 keys -> the two tiles of a panel of 32 columns, for each 32 of D.
inline void pack_keys(const bf16* from, long D, bf16* to, Prefetch ahead) {
  for (long d = 0; d < D / 32; d++, ahead.issue(16)) transpose_words(from + d * 32, D * 2, to + d * STEP);
}
template <class C>
inline void pack_keys(C, const uint8_t* from, long D, bf16* to, Prefetch ahead) {
  alignas(64) bf16 wide[16 * 32];
  for (long d = 0; d < D / 32; d++, ahead.issue(8)) {
    for (long i = 0; i < 16; i++) widen_32(C{}, from + i * D + d * 32, wide + i * 32);
    transpose_words(wide, 64, to + d * STEP);
  }
}

// 16 values, `columns` of their E -> 8 lines (of pairs of tokens) of each panel of 32; tokens from `count` on are zeros.
inline void pack_values(const bf16* from, long step, long columns, long count, bf16* to, long panel_step, Prefetch ahead) {
  for (long pair = 0; pair < 8; pair++, ahead.issue(step / 16))
    for (long e = 0; e < columns / 32; e++) {
      const bf16* at = from + 2 * pair * step + e * 32;
      bf16* line = to + e * panel_step + pair * 32;
      interleave(2 * pair < count ? at : nullptr, 2 * pair + 1 < count ? at + step : nullptr, line, line + HALF);
    }
}
template <class C>
inline void pack_values(C, const uint8_t* from, long E, long columns, long count, bf16* to, long panel_step, Prefetch ahead) {
  alignas(64) bf16 a[32], b[32];
  for (long pair = 0; pair < 8; pair++, ahead.issue(E / 32))
    for (long e = 0; e < columns / 32; e++) {
      const uint8_t* at = from + 2 * pair * E + e * 32;
      bf16* line = to + e * panel_step + pair * 32;
      widen_32(C{}, at, a);
      widen_32(C{}, at + E, b);
      interleave(2 * pair < count ? a : nullptr, 2 * pair + 1 < count ? b : nullptr, line, line + HALF);
    }
}
// Int8 codes are combined to words in 32 bits, where they become floats anyway.
inline void pack_values(Int8Code, const uint8_t* from, long E, long columns, long count, bf16* to, long panel_step, Prefetch ahead) {
  using C = Int8Code;
  for (long pair = 0; pair < 8; pair++, ahead.issue(E / 32))
    for (long e = 0; e < columns / 32; e++)
      for (long half = 0; half < 2; half++) {
        const uint8_t* at = from + 2 * pair * E + e * 32 + half * 16;
        const Ints a = 2 * pair < count ? as_ints(C::value(at)) : ints(0);
        const Ints b = 2 * pair + 1 < count ? as_ints(C::value(at + E)) : ints(0);
        store((int32_t*)(to + e * panel_step + half * HALF + pair * 32), logical_right(a, 16) | (b & (int32_t)0xffff0000));
      }
}

// 16 tokens in the cache, and the prefetch that runs while they are read.
struct KvRows {
  const char* from;
  Prefetch ahead;
};

// Keys t..t+15; and the scales of these keys and values, which are 0 from `end` on.
inline KvRows key_rows(const Tokens& tokens, long t, float* key_scales, float* value_scales) {
  const Paged& cache = tokens.cache;
  const long size = cache.D * tokens.bytes(), slot = tokens.slot(t);
  if (cache.kind != KV_BF16) {
    tokens.ahead(cache.key_scales, t, sizeof(float)).issue(1);
    tokens.ahead(cache.value_scales, t, sizeof(float)).issue(1);
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
    const KvRows keys = key_rows(tokens, t + half, key_scales + half, value_scales + half);
    if (kind == KV_BF16) pack_keys((const bf16*)keys.from, D, to, keys.ahead);
    if (kind == KV_INT8_SPLIT) pack_keys((const bf16*)keys.from, D / 2, to, keys.ahead);  // two bytes take the place of a bf16
    with_code(kind, [&](auto code) { pack_keys(code, (const uint8_t*)keys.from, D, to, keys.ahead); });
  }
}

// Values t..t+31, of each the columns [e, e + columns), as one step of each of [columns / 32] panels, `panel_step` apart; those
// from `end` on are zeros.
inline void pack_32_values(const Tokens& tokens, long t, long e, long columns, bf16* to, long panel_step) {
  const Paged& cache = tokens.cache;
  const long step = cache.value_step(), size = step * tokens.bytes();
  for (long half = 0; half < 2; half++, t += 16, to += 8 * 32) {
    const long count = std::max<long>(0, std::min<long>(16, tokens.end - t));
    const char* from = (const char*)cache.values + tokens.slot(t) * size + e * tokens.bytes();
    const Prefetch ahead = e ? Prefetch{nullptr} : tokens.ahead(cache.values, t, size);
    if (cache.kind == KV_BF16) pack_values((const bf16*)from, step, columns, count, to, panel_step, ahead);
    with_code(cache.kind, [&](auto code) { pack_values(code, (const uint8_t*)from, step, columns, count, to, panel_step, ahead); });
  }
}

}  // namespace quire

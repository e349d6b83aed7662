// Records of GGUF blocks (gemm_blocks.cpp), unpacked.
#pragma once
#include "block_dot.h"
#include "block_forms.h"
#include "int4_dot.h"

namespace quire {

namespace {

constexpr long FETCH_AHEAD = 8192;  // bytes

inline void fetch_ahead(const uint8_t* w, long bytes) {
  for (long at = 0; at < bytes; at += LINE) fetch(w + FETCH_AHEAD + at);
}

// Scales of BLOCKS blocks of a panel; factors of a form that has them: `factor` as `times_factor` takes them, `factor_pairs` and
// `least_pairs` as 16 bits, of two groups in a word.
template <class F, int BLOCKS = 1>
struct Scales {
  static constexpr int WORDS = F::FACTORS ? F::GROUPS * 32 : 16;
  alignas(64) float scale[BLOCKS * 32], minimum[BLOCKS * 32];
  alignas(64) int32_t factor[WORDS], factor_pairs[WORDS / 2], least_pairs[WORDS / 2];
  const Codes* codes;
  Ints table;  // its bytes, in every 16
  explicit Scales(long form) : codes(F::LOOKUP ? CODES + form - FIRST_CODES : nullptr) {
    int32_t words[16] = {};
    for (int i = 0; F::LOOKUP && i < 16; i++) memcpy(words + i, codes->bytes + i % 4 * 4, 4);
    table = load(words);
  }
};

// INPUTS inputs of a panel: of each 32 inputs 8 lines of 16 outputs, then 8 lines of the other 16 outputs.
template <class F, int INPUTS = F::BLOCK>
struct Record : Scales<F, INPUTS / F::BLOCK> {
  using Scales<F, INPUTS / F::BLOCK>::Scales;
  alignas(64) uint8_t bytes[INPUTS * 32];
};

// What the products of unpacked lines depend on, of a form.
template <class F>
using Products = Form<SAME_PRODUCTS<F::BITS>, F::GROUP, F::BLOCK, F::MINIMA, 0>;

// A record for the products of its lines. `chunks`: of 32 inputs; `zero`: of the form.
struct Lines {
  const uint8_t* bytes;
  const float *scale, *minimum;
  const int32_t *factor, *factor_pairs, *least_pairs;
  Ints table;
  int chunks, zero;
};

template <class F, int BLOCKS>
inline Lines lines_of(const Scales<F, BLOCKS>& of, const uint8_t* bytes, bool moved) {
  return {bytes, of.scale, of.minimum, of.factor, of.factor_pairs, of.least_pairs, of.table, F::CHUNKS, F::zero(moved)};
}

inline Floats from_half(const uint16_t* p) {  // without subnormal numbers of float32, which are slow
  const Ints bits = widen_bits(p), fraction = bits & 1023, exponent = (bits >> 10) & 31;
  const Mask normal = less(ints(0), exponent);
  const Floats whole = to_floats(select(normal, fraction | 1024, fraction));
  const Floats power = as_floats((select(normal, exponent, ints(1)) + ints(127 - 25)) << 23);
  return as_floats(as_ints(whole * power) | ((bits & 0x8000) << 16));
}

inline Ints in_one_word(Ints early, Ints late) { return (early & 0xffff) | (late << 16); }  // as 16 bits each

// Factors of the scale (signed unless the form has minima) and of the minimum, of 16 outputs; `at`: of groups of 32 bytes.
template <class F, int BLOCKS>
inline void unpack_factors(const uint8_t* at, int t, Scales<F, BLOCKS>& to) {
  const auto factor = [&](int g) { return F::MINIMA ? widen(at + g * 32) : widen((const int8_t*)at + g * 32); };
  for (int g = 0; g < F::GROUPS; g += 2, at += 64) {
    const Ints early = factor(0), late = factor(1);
    store(to.factor + g * 32 + t, factor_of<F::BITS>(early));
    store(to.factor + g * 32 + 32 + t, factor_of<F::BITS>(late));
    if (F::zero(true) || F::zero(false)) store(to.factor_pairs + g * 16 + t, in_one_word(early, late));
    if (F::MINIMA) store(to.least_pairs + g * 16 + t, in_one_word(widen(at + F::FACTOR_BYTES), widen(at + F::FACTOR_BYTES + 32)));
  }
}

// Scales of the block at `w`, number `block` of `to`.
template <class F, int BLOCKS>
inline void unpack_scales(const uint8_t* w, Scales<F, BLOCKS>& to, long block = 0) {
#pragma GCC unroll 2
  for (int t = 0; t < 32; t += 16) {
    const uint16_t* first = (const uint16_t*)w + t;
    Floats scale = F::LOOKUP && to.codes->wide ? widen((const bf16*)first) : from_half(first);
    if (F::LOOKUP) scale = scale * floats(to.codes->unit);
    store(to.scale + block * 32 + t, scale);
    if (F::MINIMA) store(to.minimum + block * 32 + t, from_half((const uint16_t*)(w + 64) + t));
    if constexpr (F::FACTORS) unpack_factors(w + (F::MINIMA ? 128 : 64) + t, t, to);
  }
}

// Line i of a chunk of 32 inputs: four inputs of 16 outputs, or of the 16 further ones.
template <class F>
inline Ints line_of(const uint8_t* chunk, int i, int part, bool moved, Ints table) {
  if constexpr (F::LOOKUP) {
    const Ints line = bytes_at(table, logical_right(load((const int32_t*)(chunk + i * 64)), part * 4) & 0x0f0f0f0f);
    return moved ? line ^ ints((int32_t)0x80808080) : line;
  } else if constexpr (F::BITS == 8) {
    const Ints line = load((const int32_t*)(chunk + part * 512 + i * 64));
    return moved ? line ^ ints((int32_t)0x80808080) : line;
  } else {
    constexpr int MORE = F::BITS - 4, EACH = MORE ? 4 / MORE : 1, MASK = ((1 << MORE) - 1) * 0x01010101;  // EACH: lines whose bits a line holds
    const Ints low = logical_right(load((const int32_t*)(chunk + i * 64)), part * 4) & 0x0f0f0f0f;
    if constexpr (MORE == 0) return low;
    const Ints high = load((const int32_t*)(chunk + 512 + i / EACH * 64));
    return low | ((logical_right(high, (i % EACH * 2 + part) * MORE) & MASK) << 4);
  }
}

// `moved`: bytes of 8 bits become 128 more. ZERO is subtracted from each byte.
template <int ZERO, class F, int INPUTS>
inline void unpack(const uint8_t* w, Record<F, INPUTS>& to, bool moved, long first = 0) {
  uint8_t* bytes = to.bytes + first * 32;
  for (int c = 0; c < F::CHUNKS; c++, w += F::CHUNK, bytes += 1024) {
    fetch_ahead(w, F::CHUNK);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        Ints line = line_of<F>(w, i, part, moved, to.table);
#ifdef QUIRE_AMX
        if (ZERO) line = bytes_minus(line, ints(ZERO * 0x01010101));
#endif
        store((int32_t*)(bytes + part * 512 + i * 64), line);
      }
  }
}

}  // namespace

}  // namespace quire

// Records of GGUF blocks (gemm_blocks.cpp) as bytes and float scales.
#pragma once
#include "block_dot.h"
#include "block_forms.h"
#include "int4_dot.h"
#include "norm_rope_act.h"

namespace quire {

namespace {

constexpr long FETCH_AHEAD = 8192;  // bytes

// INPUTS inputs of a panel, unpacked: of each 32 inputs 8 lines of 16 outputs, then 8 lines of the other 16 outputs.
template <class F, int INPUTS = F::BLOCK>
struct Record {
  alignas(64) uint8_t bytes[INPUTS * 32];
  alignas(64) float scale[INPUTS / F::GROUP * 32], minimum[INPUTS / F::GROUP * 32];
  const Codes* codes;
  Ints table;  // its bytes, in every 16
  explicit Record(long form) : codes(F::LOOKUP ? CODES + form - FIRST_CODES : nullptr) {
    int32_t words[16] = {};
    for (int i = 0; F::LOOKUP && i < 16; i++) memcpy(words + i, codes->bytes + i % 4 * 4, 4);
    table = load(words);
  }
};

// What the products of unpacked lines depend on, of a form.
template <class F>
using Products = Form<SAME_PRODUCTS<F::BITS>, F::GROUP, 32, F::MINIMA, 0>;

// A record for the products of its lines. `chunks`: of 32 inputs; `zero`: of the form.
struct Lines {
  const uint8_t* bytes;
  const float *scale, *minimum;
  Ints table;
  int chunks;
  float zero;
};

template <class F, int INPUTS>
inline Lines lines_of(const Record<F, INPUTS>& record, bool moved) {
  return {record.bytes, record.scale, record.minimum, record.table, F::CHUNKS, F::zero(moved)};
}

inline Floats from_half(const uint16_t* p) {  // without subnormal numbers of float32, which are slow
  const Ints bits = widen_bits(p), fraction = bits & 1023, exponent = (bits >> 10) & 31;
  const Mask normal = less(ints(0), exponent);
  const Floats whole = to_floats(select(normal, fraction | 1024, fraction));
  const Floats power = as_floats((select(normal, exponent, ints(1)) + ints(127 - 25)) << 23);
  return as_floats(as_ints(whole * power) | ((bits & 0x8000) << 16));
}

// Scales of the block at `w`, which begins with input `first` of the record.
template <class F, int INPUTS>
inline void unpack_scales(const uint8_t* w, Record<F, INPUTS>& to, long first = 0) {
  const uint8_t* factors = w + (F::MINIMA ? 128 : 64);
  float *scales = to.scale + first / F::GROUP * 32, *minima = to.minimum + first / F::GROUP * 32;
#pragma GCC unroll 2
  for (int t = 0; t < 32; t += 16) {
    const uint16_t* first = (const uint16_t*)w + t;
    Floats scale = F::LOOKUP && to.codes->wide ? widen((const bf16*)first) : from_half(first);
    if (F::LOOKUP) scale = scale * floats(to.codes->unit);
    const Floats minimum = F::MINIMA ? from_half((const uint16_t*)(w + 64) + t) : scale;
    for (int g = 0; g < F::GROUPS; g++) {
      const uint8_t* at = factors + g * 32 + t;
      Floats factor = floats(1.f), least = factor;
      if (F::GROUPS > 1) factor = to_floats(F::MINIMA ? widen(at) : widen((const int8_t*)at));
      if (F::GROUPS > 1 && F::MINIMA) least = to_floats(widen(at + F::FACTORS));
      store(scales + g * 32 + t, scale * factor);
      if (F::MINIMA) store(minima + g * 32 + t, minimum * least);
    }
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
    for (long at = 0; at < F::CHUNK; at += LINE) fetch(w + FETCH_AHEAD + at);
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

// The quantized rows of x. For tiles, `bytes` are [M / 16][K / 32][16][32]; otherwise [M, K].
struct Activations {
  const int8_t* bytes;
  const float *scale, *sum, *half_sum;  // [K / 32, stride]; the last: of 16 inputs, [K / 16, stride]
  long rows, stride, ins;
};

// total += scale * scale of x * (sums - zero * sum of x) - minimum * scale of x * sum of x
template <class F>
inline void add_group(Ints sums, float zero, Floats scale, Floats minimum, float x_scale, float x_sum, float* total) {
  const Floats exact = fnma(floats(zero), floats(x_sum), to_floats(sums));
  const Floats more = fma(exact, scale * floats(x_scale), load(total));
  store(total, F::MINIMA ? fnma(minimum, floats(x_scale * x_sum), more) : more);
}

// Where the numbers of x are for a group of the 32 inputs from `input` on; `row`: of the first row.
template <class F>
struct Group {
  const float *x_scale, *x_sum;
  Group(const Activations& x, long input, int half, long row) {
    x_scale = x.scale + input / 32 * x.stride + row;
    x_sum = F::GROUP == 16 ? x.half_sum + (input / 16 + half) * x.stride + row : x.sum + input / 32 * x.stride + row;
  }
};

}  // namespace

}  // namespace quire

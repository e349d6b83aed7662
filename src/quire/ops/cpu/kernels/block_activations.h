// Rows of x as signed bytes, for blocks of GGUF files: with a scale for each 32 inputs, or for each 256 where a weight's groups have
// integer factors, whose products with the bytes are then added exactly over all 256.
#pragma once
#include "block_record.h"
#include "norm_rope_act.h"
#include "quantize_activations.h"

namespace quire {

namespace {

// `bytes` are [M, K], or for tiles [M / 16][K / DEEP][16][DEEP]; `scale` is [K / STEP, stride].
struct Activations {
  const int8_t* bytes;
  const float* scale;
  long rows, stride, ins;
};
struct FineActivations : Activations {
  static constexpr long STEP = 32, DEEP = 32;
  const float* sum;  // of 32 inputs, [K / 32, stride]
};
struct CoarseActivations : Activations {
  static constexpr long STEP = 256, DEEP = 64;
  const int16_t *sum, *half_sum;  // of 32 inputs, [K / 256, stride, 8], and of 16, [K / 256, stride, 16]
};
template <class F>
using ActivationsOf = std::conditional_t<F::FACTORS, CoarseActivations, FineActivations>;

#ifdef QUIRE_AMX
inline bool by_tiles(long rows) { return rows >= 12; }
inline long padded(long rows) { return (rows + 3) / 4 * 4; }
#else
inline bool by_tiles(long) { return false; }
inline long padded(long rows) { return rows; }
#endif

// 16 values of x from `x` on as bytes; their sum.
inline float to_bytes(const bf16* x, Floats factor, int8_t* to) {
  const Ints bytes = to_ints(widen(x) * factor);
  store_bytes((uint8_t*)to, bytes);
  return sum_of(to_floats(bytes));
}

// Where the bytes of row r begin; `next`: from DEEP of them to the next.
template <class A>
inline int8_t* bytes_of_row(const A& a, long r, long& next) {
  const bool tiles = by_tiles(a.rows);
  next = tiles ? 16 * A::DEEP : A::DEEP;
  return (int8_t*)a.bytes + (tiles ? r / 16 * 16 * a.ins + r % 16 * A::DEEP : r * a.ins);
}

void quantize_row(const FineActivations& a, const bf16* x, long r) {
  long next;
  int8_t* to = bytes_of_row(a, r, next);
  each_four(a.ins / 32, [&](long g, auto n) {
    constexpr int N = decltype(n)::value;
    const long at = g * a.stride + r;
    Floats factor[N];
    factors<N>(x + g * 32, 32, 32, factor, (float*)a.scale + at, a.stride);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      int8_t* bytes = to + (g + i) * next;
      const float early = to_bytes(x + (g + i) * 32, factor[i], bytes), late = to_bytes(x + (g + i) * 32 + 16, factor[i], bytes + 16);
      ((float*)a.sum)[at + i * a.stride] = early + late;
    }
  });
}

void quantize_row(const CoarseActivations& a, const bf16* x, long r) {
  long next;
  int8_t* to = bytes_of_row(a, r, next);
  each_four(a.ins / 256, [&](long b, auto n) {
    constexpr int N = decltype(n)::value;
    const long at = b * a.stride + r;
    Floats factor[N];
    factors<N>(x + b * 256, 256, 256, factor, (float*)a.scale + at, a.stride);
    for (int j = 0; j < 256; j += 32)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) {
        const bf16* from = x + (b + i) * 256 + j;
        int8_t* bytes = to + ((b + i) * 4 + j / 64) * next + j % 64;
        const auto early = (int16_t)to_bytes(from, factor[i], bytes), late = (int16_t)to_bytes(from + 16, factor[i], bytes + 16);
        const long block = at + i * a.stride;
        int16_t* halves = (int16_t*)a.half_sum + block * 16 + j / 16;
        halves[0] = early, halves[1] = late, ((int16_t*)a.sum)[block * 8 + j / 32] = (int16_t)(early + late);
      }
  });
}

// Memory for rows of x.
struct ActivationMemory {
  Scratch<int8_t> fine_bytes, coarse_bytes;
  Scratch<float> fine_scales, coarse_scales;
  Scratch<int16_t> sums;

  FineActivations fine(long rows, long ins) {
    const long stride = by_tiles(rows) ? padded(rows) : rows, each = stride * (ins / 32);
    float* scale = fine_scales.at_least(2 * each + 16);  // a tile reads 16 of them
    for (long i = 0; rows < stride && i < 2 * (ins / 32); i++)
      for (long r = rows; r < stride; r++) scale[i * stride + r] = 0;
    return {{fine_bytes.at_least((rows + 15) / 16 * 16 * ins), scale, rows, stride, ins}, scale + each};
  }
  CoarseActivations coarse(long rows, long ins) {
    const long each = rows * (ins / 256);
    int16_t* sum = sums.at_least(each * 24);
    return {{coarse_bytes.at_least((rows + 15) / 16 * 16 * ins), coarse_scales.at_least(each), rows, rows, ins}, sum, sum + each * 8};
  }
};

// The rows of x as the parts of a weight need them.
struct BothActivations {
  FineActivations fine{};
  CoarseActivations coarse{};

  template <class F>
  const ActivationsOf<F>& of() const {
    if constexpr (F::FACTORS)
      return coarse;
    else
      return fine;
  }
  void quantize(const bf16* x, long r) const {
    if (fine.rows) quantize_row(fine, x, r);
    if (coarse.rows) quantize_row(coarse, x, r);
  }
};

}  // namespace

}  // namespace quire

// Permutations of lanes for packing: transposes and pairs.
#pragma once
#include "simd.h"

namespace quire {

#if defined(__AVX512F__)

// Transposes 16 rows of 16 words of 4 bytes: word j of row i becomes word i of row j, which is passed to `take(j, row)`.
template <class Take>
inline void each_transposed(const void* from, long step, const Take& take) {
  const char* in = (const char*)from;
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(in + i * step);
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) take(i, (Ints)_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) take(i + 8, (Ints)_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
}

inline void transpose_words(const void* from, long step, void* to) {
  each_transposed(from, step, [&](int i, Ints row) { store((int32_t*)((char*)to + i * 64), row); });
}

// 32 values of a and of b -> (a0, b0, a1, b1 ... a15, b15) and the same of the later 16. Null: zeros.
inline void interleave(const bf16* a, const bf16* b, Ints& early, Ints& late) {
  alignas(64) static const uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(order), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  const __m512i x = a ? _mm512_loadu_si512(a) : _mm512_setzero_si512();
  const __m512i y = b ? _mm512_loadu_si512(b) : _mm512_setzero_si512();
  early = (Ints)_mm512_permutex2var_epi16(x, first, y);
  late = (Ints)_mm512_permutex2var_epi16(x, second, y);
}
inline void interleave(const bf16* a, const bf16* b, bf16* early, bf16* late) {
  Ints x, y;
  interleave(a, b, x, y);
  store((int32_t*)early, x), store((int32_t*)late, y);
}

// Lanes i and i + APART, for each i without that bit, become their sum and their difference.
template <int APART>
inline Floats sums_and_differences(Floats x) {
  constexpr __mmask16 upper = APART == 1 ? 0xaaaa : APART == 2 ? 0xcccc : APART == 4 ? 0xf0f0 : 0xff00;
  __m512 other;
  if constexpr (APART < 4)
    other = _mm512_permute_ps(x, APART == 1 ? 0xb1 : 0x4e);
  else
    other = _mm512_shuffle_f32x4(x, x, APART == 4 ? 0xb1 : 0x4e);
  return _mm512_mask_sub_ps(_mm512_add_ps(x, other), upper, other, x);
}

#else

typedef int32_t Words __attribute__((vector_size(16)));

template <int APART>
inline Floats sums_and_differences(Floats x) {
  alignas(64) float in[16], out[16];
  store(in, x);
  for (int i = 0; i < 16; i++) out[i] = i & APART ? in[i - APART] - in[i] : in[i] + in[i + APART];
  return load(out);
}

inline void transpose_words(const void* from, long step, void* to) {
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 16; j += 4) {
      const char* in = (const char*)from + i * step + j * 4;
      char* out = (char*)to + j * 64 + i * 4;
      const Words a = read<Words>(in), b = read<Words>(in + step), c = read<Words>(in + 2 * step), d = read<Words>(in + 3 * step);
      const Words ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Words ef = __builtin_shufflevector(a, b, 2, 6, 3, 7), gh = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const Words lines[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                              __builtin_shufflevector(ef, gh, 0, 1, 4, 5), __builtin_shufflevector(ef, gh, 2, 3, 6, 7)};
      for (int n = 0; n < 4; n++) memcpy(out + n * 64, &lines[n], 16);
    }
}

inline void interleave(const bf16* a, const bf16* b, bf16* early, bf16* late) {
  alignas(64) static const bf16 nothing[32] = {};
  if (!a) a = nothing;
  if (!b) b = nothing;
  for (bf16* to : {early, late}) {
    for (int i = 0; i < 16; i++) {
      const uint32_t word = (uint32_t)b[i] << 16 | a[i];
      memcpy(to + 2 * i, &word, 4);
    }
    a += 16, b += 16;
  }
}

#endif

}  // namespace quire

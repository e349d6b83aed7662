// What every kernel uses: bfloat16, vector functions, transposes, scratch memory.
//
// A kernel's results for a row depend on that row alone: sums run along K in one order, whatever the number of
// rows, threads or chunks. Keep it so; the engine's equality tests compare bits.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace quire {

using bf16 = uint16_t;

constexpr long LINE = 64;           // bytes of a cache line
constexpr float LOG2E = 1.44269504f;

inline __m512 widen(const bf16* p) {  // 16 bf16 -> 16 float
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }  // round to nearest even
inline void store(bf16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline __m512 rounded(__m512 x) {  // to what bf16 holds, as float
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(x)), 16));
}

// 2^x, relative error about 2e-7; x is taken between -126 and 126.
inline __m512 exp2_of(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-126.f)), _mm512_set1_ps(126.f));
  const __m512 whole = _mm512_roundscale_ps(x, 0), part = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.3333558e-3f);
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, whole);
}

inline __m512 tanh_of(__m512 x) {  // 1 - 2 / (e^2x + 1)
  const __m512 one = _mm512_set1_ps(1.f);
  const __m512 e = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(2 * LOG2E)));
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.f), _mm512_add_ps(e, one)));
}

inline __m512 silu_of(__m512 x) {
  const __m512 e = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2E)));
  return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.f)));
}

// 16 rows of 16 words of 4 bytes, transposed: word j of row i becomes word i of row j.
inline void transpose_words(const void* from, long step, void* to) {
  const char* in = (const char*)from;
  char* out = (char*)to;
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
  for (int i = 0; i < 4; i++) {
    _mm512_storeu_si512(out + i * 64, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(out + (i + 4) * 64, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(out + (i + 8) * 64, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_si512(out + (i + 12) * 64, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}

// Memory of one thread that lives as long as the thread and only grows; new memory is zeros.
template <class T>
struct Scratch {
  T* data = nullptr;
  size_t size = 0;
  T* at_least(size_t count) {
    if (count > size) {
      free(data);
      size_t bytes = (count * sizeof(T) + 4095) & ~(size_t)4095;
      data = (T*)aligned_alloc(4096, bytes);
      if (!data) abort();  // a few MB cannot be had: nothing sensible can be done in the middle of a step
      memset(data, 0, bytes);
      size = count;
    }
    return data;
  }
  ~Scratch() { free(data); }
};

}  // namespace quire

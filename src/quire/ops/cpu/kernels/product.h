// The one inner product that everything is made of: C[rows, 32] (+)= A[rows, 32 * steps] * B, bf16 in, float out.
//
// B is packed: [steps][2][16][16][2], that is for each 32 values of k two tiles of 16 columns, in which pairs of
// neighbouring k lie together. Both instruction sets read the same packing:
//
//   AMX           tiles of 16 x 16 floats, four at a time: ROWS = 32
//   AVX512-BF16   12 rows x 2 registers of 16 floats: ROWS = 12
//
// Floats are summed along k in one order, so a row's result does not depend on the rows beside it.
#pragma once
#include "common.h"

namespace quire {

constexpr long STEP = 1024;  // elements of B for 32 values of k
constexpr long HALF = 512;   // of one tile of 16 columns

// How far ahead of the product B is fetched into the L2 cache: `lines` cache lines a step, from `from` on.
struct Ahead {
  const char* from;
  int lines;
  void fetch() {
    for (int i = 0; i < lines; i++) _mm_prefetch(from + i * LINE, _MM_HINT_T1);
    from += lines * LINE;
  }
};

#ifdef QUIRE_AMX

constexpr int ROWS = 32;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0..3 sums, 4 and 5 the rows of A, 6 and 7 the columns of B.
inline void configure(int upper, int lower) {
  TileConfig config;
  const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = 64;
    config.rows[i] = rows[i] ? rows[i] : 16;
  }
  _tile_loadconfig(&config);
}
inline int touched(int rows) { return rows > 16 ? 32 : rows ? 16 : 0; }  // of A and C, when `rows` are asked for
inline void begin_products() { configure(16, 16); }
inline void end_products() { _tile_release(); }

// `a1` is A's 17th row, or null when there are 16 rows or fewer. Steps in bytes.
template <bool ADD>
inline void product(const bf16* a, const bf16* a1, long a_row, long a_next, const bf16* b, long b_next, long steps,
                    float* c, long c_row, Ahead ahead) {
  if (ADD) {
    _tile_loadd(0, c, c_row);
    _tile_loadd(1, c + 16, c_row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  float* c1 = (float*)((char*)c + 16 * c_row);
  if (!a1) {
    for (long k = 0; k < steps; k++) {
      ahead.fetch();
      _tile_loadd(4, a, a_row);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + HALF, 64);
      _tile_dpbf16ps(1, 4, 7);
      a += a_next, b += b_next;
    }
    _tile_stored(0, c, c_row);
    _tile_stored(1, c + 16, c_row);
    return;
  }
  if (ADD) {
    _tile_loadd(2, c1, c_row);
    _tile_loadd(3, c1 + 16, c_row);
  } else {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long k = 0; k < steps; k++) {
    ahead.fetch();
    _tile_loadd(4, a, a_row);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + HALF, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1, a_row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    a += a_next, a1 += a_next, b += b_next;
  }
  _tile_stored(0, c, c_row);
  _tile_stored(1, c + 16, c_row);
  _tile_stored(2, c1, c_row);
  _tile_stored(3, c1 + 16, c_row);
}

// rows <= ROWS, padded to 16 or 32 in memory. a_row, c_row: elements between rows.
template <bool ADD>
inline void product_of_rows(int rows, const bf16* a, long a_row, const bf16* b, long b_next, long steps, float* c,
                            long c_row, Ahead ahead = {nullptr, 0}) {
  product<ADD>(a, rows > 16 ? a + 16 * a_row : nullptr, a_row * 2, 32, b, b_next, steps, c, c_row * 4, ahead);
}

#else

constexpr int ROWS = 12;

inline int touched(int rows) { return rows; }
inline void begin_products() {}
inline void end_products() {}

template <int N, bool ADD>
inline void product(const bf16* a, long a_row, const bf16* b, long b_next, long steps, float* c, long c_row,
                    Ahead ahead) {
  __m512 left[N], right[N];
#pragma GCC unroll 16
  for (int m = 0; m < N; m++) {
    left[m] = ADD ? _mm512_loadu_ps(c + m * c_row) : _mm512_setzero_ps();
    right[m] = ADD ? _mm512_loadu_ps(c + m * c_row + 16) : _mm512_setzero_ps();
  }
  for (long k = 0; k < steps; k++, a += 32, b += b_next) {
    ahead.fetch();
#pragma GCC unroll 4
    for (int r = 0; r < 16; r++) {
      const __m512bh b0 = (__m512bh)_mm512_load_si512(b + r * 32), b1 = (__m512bh)_mm512_load_si512(b + HALF + r * 32);
#pragma GCC unroll 16
      for (int m = 0; m < N; m++) {
        int pair;
        memcpy(&pair, a + m * a_row + r * 2, 4);
        const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
        left[m] = _mm512_dpbf16_ps(left[m], value, b0);
        right[m] = _mm512_dpbf16_ps(right[m], value, b1);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < N; m++) {
    _mm512_storeu_ps(c + m * c_row, left[m]);
    _mm512_storeu_ps(c + m * c_row + 16, right[m]);
  }
}

template <bool ADD>
inline void product_of_rows(int rows, const bf16* a, long a_row, const bf16* b, long b_next, long steps, float* c,
                            long c_row, Ahead ahead = {nullptr, 0}) {
  switch (rows) {
#define CASE(n) \
  case n: return product<n, ADD>(a, a_row, b, b_next, steps, c, c_row, ahead);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
}

#endif

}  // namespace quire

// The one inner product that everything is made of: C[rows, 32] (+)= A[rows, steps] * B.
//
// A step is 64 bytes of a row of A and 2 KB of B: two tiles of 16 columns, in which the words of 4 bytes that meet a word
// of A lie side by side. Two formats, with sums of 4 bytes each:
//
//   Bf16   a step is 32 values of k, a word 2 of them; float sums
//   Int8   a step is 64 values of k, a word 4 of them; A unsigned, B signed; exact integer sums
//
// Both instruction sets read the same packing:
//
//   AMX       tiles of 16 x 16 sums, four at a time: ROWS = 32
//   AVX-512   12 rows x 2 registers of 16 sums: ROWS = 12
//
// Sums run along k in one order, so a row's result does not depend on the rows beside it.
#pragma once
#include <type_traits>

#include "common.h"

namespace quire {

constexpr long STEP_BYTES = 2048;  // of B
constexpr long HALF_BYTES = 1024;  // of one tile of 16 columns

struct Bf16 {
  using Value = bf16;    // of A
  using Weight = bf16;   // of B
  using Sum = float;
  static constexpr long K = 32;  // of a step
};
struct Int8 {
  using Value = uint8_t;
  using Weight = int8_t;
  using Sum = int32_t;
  static constexpr long K = 64;
};

// Elements of B in a step and in a tile.
template <class F>
constexpr long STEP_OF = STEP_BYTES / sizeof(typename F::Weight);
template <class F>
constexpr long HALF_OF = HALF_BYTES / sizeof(typename F::Weight);
constexpr long STEP = STEP_OF<Bf16>, HALF = HALF_OF<Bf16>;

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

template <class F>
inline void multiply_upper() {
  if constexpr (std::is_same_v<F, Bf16>) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  } else {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
  }
}
template <class F>
inline void multiply_lower() {
  if constexpr (std::is_same_v<F, Bf16>) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  } else {
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
}

// `a1` is A's 17th row, or null when there are 16 rows or fewer. a_row, c_row: bytes from row to row; a_next, b_next: elements
// from step to step.
template <class F, bool ADD>
inline void product(const typename F::Value* a, const typename F::Value* a1, long a_row, long a_next,
                    const typename F::Weight* b, long b_next, long steps, typename F::Sum* c, long c_row, Ahead ahead) {
  auto* c1 = (typename F::Sum*)((char*)c + 16 * c_row);
  if (ADD) {
    _tile_loadd(0, c, c_row);
    _tile_loadd(1, c + 16, c_row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (!a1) {
    for (long k = 0; k < steps; k++) {
      ahead.fetch();
      _tile_loadd(4, a, a_row);
      _tile_loadd(6, b, 64);
      _tile_loadd(7, b + HALF_OF<F>, 64);
      multiply_upper<F>();
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
    _tile_loadd(7, b + HALF_OF<F>, 64);
    multiply_upper<F>();
    _tile_loadd(5, a1, a_row);
    multiply_lower<F>();
    a += a_next, a1 += a_next, b += b_next;
  }
  _tile_stored(0, c, c_row);
  _tile_stored(1, c + 16, c_row);
  _tile_stored(2, c1, c_row);
  _tile_stored(3, c1 + 16, c_row);
}

// rows <= ROWS, padded to 16 or 32 in memory. a_row, c_row: elements from row to row.
template <class F, bool ADD>
inline void product_of_rows(int rows, const typename F::Value* a, long a_row, const typename F::Weight* b, long b_next,
                            long steps, typename F::Sum* c, long c_row, Ahead ahead = {nullptr, 0}) {
  const long bytes = a_row * sizeof(typename F::Value);
  product<F, ADD>(a, rows > 16 ? a + 16 * a_row : nullptr, bytes, F::K, b, b_next, steps, c, c_row * 4, ahead);
}

#else

constexpr int ROWS = 12;

inline int touched(int rows) { return rows; }
inline void begin_products() {}
inline void end_products() {}

// 16 sums; words of A are broadcast to all of them.
inline __m512 add_words(Bf16, __m512 sums, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}
inline __m512i add_words(Int8, __m512i sums, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sums, a, b); }
inline __m512 zeros(Bf16) { return _mm512_setzero_ps(); }
inline __m512i zeros(Int8) { return _mm512_setzero_si512(); }
inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline __m512i load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void save(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
inline void save(int32_t* p, __m512i x) { _mm512_storeu_si512(p, x); }

template <class F, int N, bool ADD>
inline void product(const typename F::Value* a, long a_row, const typename F::Weight* b, long b_next, long steps,
                    typename F::Sum* c, long c_row, Ahead ahead) {
  constexpr long WORD = 4 / sizeof(typename F::Value), LINE_OF_B = 64 / sizeof(typename F::Weight);
  decltype(zeros(F{})) left[N], right[N];
#pragma GCC unroll 16
  for (int m = 0; m < N; m++) {
    left[m] = ADD ? load(c + m * c_row) : zeros(F{});
    right[m] = ADD ? load(c + m * c_row + 16) : zeros(F{});
  }
  for (long k = 0; k < steps; k++, a += F::K, b += b_next) {
    ahead.fetch();
#pragma GCC unroll 4
    for (int r = 0; r < 16; r++) {
      const __m512i b0 = _mm512_load_si512(b + r * LINE_OF_B), b1 = _mm512_load_si512(b + HALF_OF<F> + r * LINE_OF_B);
#pragma GCC unroll 16
      for (int m = 0; m < N; m++) {
        int word;
        memcpy(&word, a + m * a_row + r * WORD, 4);
        const __m512i value = _mm512_set1_epi32(word);
        left[m] = add_words(F{}, left[m], value, b0);
        right[m] = add_words(F{}, right[m], value, b1);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < N; m++) {
    save(c + m * c_row, left[m]);
    save(c + m * c_row + 16, right[m]);
  }
}

template <class F, bool ADD>
inline void product_of_rows(int rows, const typename F::Value* a, long a_row, const typename F::Weight* b, long b_next,
                            long steps, typename F::Sum* c, long c_row, Ahead ahead = {nullptr, 0}) {
  switch (rows) {
#define CASE(n) \
  case n: return product<F, n, ADD>(a, a_row, b, b_next, steps, c, c_row, ahead);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
}

#endif

}  // namespace quire

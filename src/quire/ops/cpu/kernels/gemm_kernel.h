// The inner product of all kernels: C[rows, 32] (+)= A[rows, steps] * B.
//
// A step is 64 bytes of a row of A and 2 KB of B: two tiles of 16 columns, in which the 4-byte words that are multiplied by one
// word of A are adjacent. Formats, with sums of 4 bytes each:
//
//   Bf16       a step is 32 values of k, a word 2 of them; float sums
//   Int8       a step is 64 values of k, a word 4 of them; A unsigned around ZERO_BYTE, B signed; exact integer sums
//   Unsigned   the same with A from 0 to 255; AMX only
//
// All builds read the same packing. ROWS is the number of rows of A at a time:
//
//   AMX     tiles of 16 x 16 sums, four at a time
//   else    as many rows x 16 or 32 sums as the registers hold
//
// Sums run along k in one order, so a row's result does not depend on the other rows.
#pragma once
#include <type_traits>

#include "amx.h"
#include "common.h"

namespace quire {

constexpr long STEP_BYTES = 2048;  // of B
constexpr long HALF_BYTES = 1024;  // of one tile of 16 columns
#ifdef QUIRE_AMX
constexpr int ZERO_BYTE = 0;  // A is signed then
#else
constexpr int ZERO_BYTE = 128;
#endif

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

struct Unsigned : Int8 {};

// Elements of B in a step and in a tile.
template <class F>
constexpr long STEP_OF = STEP_BYTES / sizeof(typename F::Weight);
template <class F>
constexpr long HALF_OF = HALF_BYTES / sizeof(typename F::Weight);
constexpr long STEP = STEP_OF<Bf16>, HALF = HALF_OF<Bf16>;

// Prefetches B into the L2 cache ahead of the product: `lines` cache lines a step, from `from` on.
//
// The requests must be issued in order. If gcc knows the addresses it issues three at a time and in any order; then the L2 prefetcher
// loses track, and the product waits for the core's 16 fill buffers: one row of x on two cores, AMX, 24 GB/s instead of 28, 32
// rows 20 instead of 24.
struct Ahead {
  static constexpr bool PASSES = false;  // whether B should not stay in the L1 cache
  const char* from;
  int lines;
  void step() {
    long line = LINE;
    asm("" : "+r"(line));  // hides the distance between two addresses from gcc
    for (int i = 0; i < lines; i++, from += line) quire::fetch(from);
  }
  // A quarter of the lines of a step. Without AVX-512 products wait less for four small bursts than for one: on two Zen 3 cores two
  // to six rows run at 19.5 to 33 GB/s instead of 18 to 30.
  void quarter(int q) {
    Ahead part{from, lines * (q + 1) / 4 - lines * q / 4};
    part.step();
    from = part.from;
  }
};

#ifdef QUIRE_AMX

constexpr int ROWS = 32;

// Tiles 0..3 hold sums, 4 and 5 rows of A, 6 and 7 columns of B.
inline void configure(int upper, int lower) {
  TileConfig config;
  const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = 64;
    config.rows[i] = rows[i] ? rows[i] : 16;
  }
  load_config(config);
}
inline int touched(int rows) { return rows > 16 ? 32 : rows ? 16 : 0; }  // rows of A and C that a product of `rows` reads and writes
inline void begin_products() { configure(16, 16); }
inline void end_products() { _tile_release(); }

template <class F, bool PASSES>
inline void load_columns(const typename F::Weight* b) {
  if constexpr (PASSES) {
    _tile_stream_loadd(6, b, 64);
    _tile_stream_loadd(7, b + HALF_OF<F>, 64);
  } else {
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + HALF_OF<F>, 64);
  }
}
template <class F>
inline void multiply_upper() {
  if constexpr (std::is_same_v<F, Bf16>) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  } else if constexpr (std::is_same_v<F, Unsigned>) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
  } else {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
  }
}
template <class F>
inline void multiply_lower() {
  if constexpr (std::is_same_v<F, Bf16>) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  } else if constexpr (std::is_same_v<F, Unsigned>) {
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  } else {
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

// `a1` is A's 17th row, or null for 16 rows or fewer. a_row, c_row: bytes from row to row; a_next, b_next: elements from step to
// step. `overlap` is called at each step: an Ahead, or more.
//
// A panel that streams through is loaded with a non-temporal hint: A, which every panel uses, then stays in the L1 cache. 32 rows,
// int8, weights from memory, two cores: 24.0 -> 25.6 GB/s.
template <class F, bool ADD, class Overlap>
inline void product(const typename F::Value* a, const typename F::Value* a1, long a_row, long a_next,
                    const typename F::Weight* b, long b_next, long steps, typename F::Sum* c, long c_row, Overlap overlap) {
  auto* c1 = (typename F::Sum*)((char*)c + 16 * c_row);
  written();
  if (ADD) {
    _tile_loadd(0, c, c_row);
    _tile_loadd(1, c + 16, c_row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (!a1) {
    for (long k = 0; k < steps; k++) {
      overlap.step();
      _tile_loadd(4, a, a_row);
      load_columns<F, Overlap::PASSES>(b);
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
    overlap.step();
    _tile_loadd(4, a, a_row);
    load_columns<F, Overlap::PASSES>(b);
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

inline int touched(int rows) { return rows; }
inline void begin_products() {}
inline void end_products() {}

inline Floats zeros(Bf16) { return floats(0.f); }
inline Ints zeros(Int8) { return ints(0); }

inline int32_t word_at(const void* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return word;
}

// The dot product of a word of A with a line of 16 words of B. Line: the converted line, once for all rows. Words: the converted
// step of A, once for all columns. Where one instruction multiplies words nothing is converted; else words are split in two.
template <class F>
struct DotPairs;

#if defined(__AVX512BF16__)
template <>
struct DotPairs<Bf16> {
  using Line = Ints;
  struct Words {};
  static void split(const bf16*, Words&) {}
  static Line line(const bf16* b) { return load((const int32_t*)b); }
  static Floats add(Floats sums, const bf16* a, const Words&, int word, Line b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)ints(word_at(a + word * 2)), (__m512bh)b);
  }
};
#else
// The earlier value of a word becomes a float by a shift, the later one by clearing the earlier.
template <>
struct DotPairs<Bf16> {
  struct Line {
    Floats early, late;
  };
  struct alignas(64) Words {
    float early[16], late[16];
  };
  static Line line(const bf16* b) {
    const Ints words = load((const int32_t*)b);
    return {as_floats(words << 16), as_floats(words & (int32_t)0xffff0000)};
  }
  static void split(const bf16* a, Words& to) {
    const Line both = line(a);
    store(to.early, both.early);
    store(to.late, both.late);
  }
  static Floats add(Floats sums, const bf16*, const Words& a, int word, const Line& b) {
    return fma(floats(a.late[word]), b.late, fma(floats(a.early[word]), b.early, sums));
  }
};
#endif

#if defined(__AVX512VNNI__)
template <>
struct DotPairs<Int8> {
  using Line = Ints;
  struct Words {};
  static void split(const uint8_t*, Words&) {}
  static Line line(const int8_t* b) { return load((const int32_t*)b); }
  static Ints add(Ints sums, const uint8_t* a, const Words&, int word, Line b) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)ints(word_at(a + word * 4)), (__m512i)b);
  }
};
#else
// Bytes are widened to 16 bits, which hold the sums of their products exactly; the instruction for bytes saturates.
template <>
struct DotPairs<Int8> {
  struct Line {
    Ints even, odd;
  };
  struct alignas(64) Words {
    int32_t even[16], odd[16];
  };
  static Line line(const int8_t* b) {
    const Ints words = load((const int32_t*)b);
    return {low_bytes(words), high_bytes(words)};
  }
  static void split(const uint8_t* a, Words& to) {
    const Ints words = load((const int32_t*)a);
    store(to.even, words & 0x00ff00ff);
    store(to.odd, logical_right(words, 8) & 0x00ff00ff);
  }
  static Ints add(Ints sums, const uint8_t*, const Words& a, int word, const Line& b) {
    return sums + multiply_shorts(ints(a.even[word]), b.even) + multiply_shorts(ints(a.odd[word]), b.odd);
  }
};
#endif

// Registers that hold sums: rows x tiles x leaves of 16 lanes. If both tiles do not fit, they are computed one after the other.
#if defined(__AVX512F__)
constexpr int ROWS = 12, SUMS = 24;
#elif defined(__aarch64__)
constexpr int ROWS = 6, SUMS = 24;
#elif defined(__AVX2__)
constexpr int ROWS = 6, SUMS = 12;
#else
constexpr int ROWS = 3, SUMS = 12;
#endif

// Rows and sums of a pass of F. AVX2 converts bf16 words in registers, and the sums of six rows do not fit besides: on Zen 3, 12 rows run
// at 32 billion products a second in two passes of six, at 40 in three of four.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <class F>
constexpr bool FEWER = std::is_same_v<F, Bf16>;
#else
template <class F>
constexpr bool FEWER = false;
#endif
template <class F>
constexpr int PASS_ROWS = FEWER<F> ? ROWS - 1 : ROWS;
template <class F>
constexpr int PASS_SUMS = FEWER<F> ? SUMS - 2 : SUMS;

template <class F, int N, int TILES, bool ADD>
__attribute__((noinline)) void product_of_tiles(const typename F::Value* a, long a_row, const typename F::Weight* b, long b_next, long steps,
                             typename F::Sum* c, long c_row, Ahead ahead) {
  using Dot = DotPairs<F>;
  constexpr long LINE_OF_B = 64 / sizeof(typename F::Weight);
  decltype(zeros(F{})) sums[N][TILES];
#pragma GCC unroll 16
  for (int m = 0; m < N; m++)
#pragma GCC unroll 2
    for (int t = 0; t < TILES; t++) sums[m][t] = ADD ? load(c + m * c_row + t * 16) : zeros(F{});
  for (long k = 0; k < steps; k++, a += F::K, b += b_next) {
    if (LEAF == 16) ahead.step();
    typename Dot::Words words[N];
#pragma GCC unroll 16
    for (int m = 0; m < N; m++) Dot::split(a + m * a_row, words[m]);
#pragma GCC unroll 4
    for (int r = 0; r < 16; r++) {
      if (LEAF < 16 && r % 4 == 0) ahead.quarter(r / 4);
      typename Dot::Line line[TILES];
#pragma GCC unroll 2
      for (int t = 0; t < TILES; t++) line[t] = Dot::line(b + t * HALF_OF<F> + r * LINE_OF_B);
#pragma GCC unroll 16
      for (int m = 0; m < N; m++)
#pragma GCC unroll 2
        for (int t = 0; t < TILES; t++) sums[m][t] = Dot::add(sums[m][t], a + m * a_row, words[m], r, line[t]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < N; m++)
#pragma GCC unroll 2
    for (int t = 0; t < TILES; t++) store(c + m * c_row + t * 16, sums[m][t]);
}

template <class F, int N, bool ADD>
inline void product(const typename F::Value* a, long a_row, const typename F::Weight* b, long b_next, long steps,
                    typename F::Sum* c, long c_row, Ahead ahead) {
  if constexpr (N * 2 * (16 / LEAF) <= PASS_SUMS<F>) {
    product_of_tiles<F, N, 2, ADD>(a, a_row, b, b_next, steps, c, c_row, ahead);
  } else {
    product_of_tiles<F, N, 1, ADD>(a, a_row, b, b_next, steps, c, c_row, ahead);
    product_of_tiles<F, N, 1, ADD>(a, a_row, b + HALF_OF<F>, b_next, steps, c + 16, c_row, {nullptr, 0});
  }
}

#ifndef __AVX512F__
constexpr int PANELS = 4;

// c[PANELS, 32] = a[K] * PANELS panels, each `panel` elements after the one before.
//
// One row needs so few products that memory decides, and an AVX2 core waits if it reads one panel. Four panels, prefetched line by
// line in turns and in small bursts, raise 28.5 to 33 of the 37 GB/s that two Zen 3 cores read without any computation (int8: 27 to
// 31). Each sum runs along k as in product_of_tiles, so the bits are the same.
template <class F>
__attribute__((noinline)) void product_of_panels(const typename F::Value* a, const typename F::Weight* b, long panel, long steps,
                                                 typename F::Sum* c) {
  using Dot = DotPairs<F>;
  constexpr long LINE_OF_B = LINE / sizeof(typename F::Weight), AHEAD = 2;  // steps
  for (int t = 0; t < PANELS * 2; t++) store(c + t * 16, zeros(F{}));
  for (long k = 0; k < steps; k++, a += F::K, b += STEP_OF<F>) {
    const auto* next = b + AHEAD * STEP_OF<F> + (k + AHEAD < steps ? 0 : (PANELS - 1) * panel);  // at the end: of the next panels
    typename Dot::Words words;
    Dot::split(a, words);
    for (int p = 0; p < PANELS; p += 2, c += 64) {
      const auto *one = b + p * panel, *other = one + panel;
      decltype(zeros(F{})) sums[4] = {load(c), load(c + 16), load(c + 32), load(c + 48)};
      for (int r = 0; r < 16; r++) {
        for (int i = 0; i < 4 && r % 4 == 0; i++, next += LINE_OF_B)
#pragma GCC unroll 4
          for (int q = 0; q < PANELS; q++) quire::fetch(next + q * panel);
#pragma GCC unroll 2
        for (int t = 0; t < 2; t++) {
          const long at = t * HALF_OF<F> + r * LINE_OF_B;
          sums[t] = Dot::add(sums[t], a, words, r, Dot::line(one + at));
          sums[2 + t] = Dot::add(sums[2 + t], a, words, r, Dot::line(other + at));
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < 4; t++) store(c + t * 16, sums[t]);
    }
    c -= PANELS * 32;
  }
}
#endif

template <class F, bool ADD>
inline void product_of_rows(int rows, const typename F::Value* a, long a_row, const typename F::Weight* b, long b_next,
                            long steps, typename F::Sum* c, long c_row, Ahead ahead = {nullptr, 0}) {
  switch (rows) {
#define CASE(n) \
  case n: return product<F, n, ADD>(a, a_row, b, b_next, steps, c, c_row, ahead);
    CASE(1) CASE(2) CASE(3)
#if !defined(__x86_64__) || defined(__AVX2__)
    CASE(4) CASE(5) CASE(6)
#endif
#if defined(__AVX512F__)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
  }
}

#endif

}  // namespace quire

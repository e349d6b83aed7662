// Products of many rows with AMX: blocks of 48 or 32 rows by a panel of 32 columns, whose sums stay in tiles for many steps.
//
// Storing sums every 8 steps, with operands in the L1 cache, took 260 cycles a block of 512 steps. So both operands come from the
// L2 cache, whose bandwidth is the bound: five loads a step for six products, 0.75 of the speed out of registers.
//
// Rows are packed in groups: [steps][tiles][16][64 bytes], with three tiles of 16 rows, or two if rows do not divide. Sums of a
// block are [2][tiles * 16][16].
#pragma once
#include "gemm_kernel.h"

#ifdef QUIRE_AMX

namespace quire {

constexpr long TILE_SUMS = 256, MAX_TILES = 3, PARTS = 3;  // PARTS: slots for overlapped work in a step

// How rows are cut into groups of at most 48, all nearly equal.
struct Groups {
  long tiles, count;
  explicit Groups(long rows) : tiles((rows + 15) / 16), count((tiles + MAX_TILES - 1) / MAX_TILES) {}
  long first(long group) const { return tiles * group / count; }  // in tiles
  int size(long group) const { return (int)(first(group + 1) - first(group)); }
};

// Packs rows of x as a group, `steps` long; missing rows of the last tile are zeros. Four rows at a time run at the speed of
// memory (14 GB/s a core); one at a time has 10, since too few lines are in flight.
template <class Value>
inline void gather(const Value* x, long x_row, long rows, long steps, int tiles, char* to) {
  const long step = tiles * 16 * 64;
  for (long r = 0; r < tiles * 16; r += 4)
    for (long k = 0; k < steps; k++)
      for (long i = r; i < r + 4; i++)
        if (i < rows)
          memcpy(to + k * step + i * 64, (const char*)(x + i * x_row) + k * 64, 64);
        else
          memset(to + k * step + i * 64, 0, 64);
}

// The tile store unit goes to sleep after some 1500 idle cycles and takes 750 to wake up (measured on a Sapphire Rapids). A store
// now and then keeps it awake: 32 steps, 1.51 -> 1.85 TFLOP/s a core.
constexpr long AWAKE = 8;  // steps

#define PLACE(tile) (tile % 2 * TILES + tile / 2) * TILE_SUMS
#define LOAD(tile, from) _tile_loadd(tile, from, 64)
#define STORE(tile, to) _tile_stored(tile, to, 64)
#define BEGIN(tile)                       \
  if (from)                               \
    LOAD(tile, from + PLACE(tile));       \
  else                                    \
    _tile_zero(tile)
#define MEET(sums, left, right)           \
  if constexpr (std::is_same_v<F, Bf16>)  \
    _tile_dpbf16ps(sums, left, right);    \
  else                                    \
    _tile_dpbssd(sums, left, right)

// 32 rows: one product a load, all from the L2 cache. Continues the sums in `from`, or starts at zero if it is null.
template <class F, class Overlap>
inline void multiply_two(const char* a, const char* b, long steps, const typename F::Sum* from, typename F::Sum* c, Overlap& overlap) {
  constexpr int TILES = 2;
  alignas(64) char awake[64];
  written();
  BEGIN(0);
  BEGIN(1);
  BEGIN(2);
  BEGIN(3);
  for (long k = 0; k < steps; k++, a += 2048, b += 2048) {
    overlap.step();
    if (k % AWAKE == AWAKE - 1) _tile_stored(4, awake, 0);
    LOAD(4, a);
    LOAD(6, b);
    LOAD(7, b + 1024);
    overlap.part();
    MEET(0, 4, 6);
    MEET(1, 4, 7);
    overlap.part();
    LOAD(5, a + 1024);
    MEET(2, 5, 6);
    overlap.part();
    MEET(3, 5, 7);
  }
  STORE(0, c + PLACE(0));
  STORE(1, c + PLACE(1));
  STORE(2, c + PLACE(2));
  STORE(3, c + PLACE(3));
}

// 48 rows: five loads from the L2 cache for six products, and two again from the L1 cache.
template <class F, class Overlap>
inline void multiply_three(const char* a, const char* b, long steps, const typename F::Sum* from, typename F::Sum* c, Overlap& overlap) {
  constexpr int TILES = 3;
  alignas(64) char awake[64];
  written();
  BEGIN(0);
  BEGIN(1);
  BEGIN(2);
  BEGIN(3);
  BEGIN(4);
  BEGIN(5);
  for (long k = 0; k < steps; k++, a += 3072, b += 2048) {
    overlap.step();
    if (k % AWAKE == AWAKE - 1) _tile_stored(6, awake, 0);
    LOAD(7, b);
    LOAD(6, a);
    MEET(0, 6, 7);
    overlap.part();
    LOAD(6, a + 1024);
    MEET(2, 6, 7);
    LOAD(6, a + 2048);
    MEET(4, 6, 7);
    overlap.part();
    LOAD(7, b + 1024);
    MEET(5, 6, 7);
    LOAD(6, a + 1024);
    MEET(3, 6, 7);
    overlap.part();
    LOAD(6, a);
    MEET(1, 6, 7);
  }
  STORE(0, c + PLACE(0));
  STORE(1, c + PLACE(1));
  STORE(2, c + PLACE(2));
  STORE(3, c + PLACE(3));
  STORE(4, c + PLACE(4));
  STORE(5, c + PLACE(5));
}

#undef BEGIN
#undef PLACE
#undef LOAD
#undef STORE
#undef MEET

}  // namespace quire

#endif

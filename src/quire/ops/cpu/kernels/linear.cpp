// y[M, N] = x[M, K] * w[N, K]^T, bf16, with packed weights; and the packing.
//
// Packed: [N / 32][K / 32][2][16][16][2] (product.h). With GATED the 32 columns of a panel are 16 of the gate and
// the same 16 of the other half, and what is stored is silu(gate) * other, [M, N / 2].
//
// Threads share the panels. Rows are taken in blocks whose x stays in the L2 cache while the panels pass by.
#include "product.h"

namespace quire {

enum Kind { PLAIN = 0, GATED = 1 };

struct Job {
  const bf16* x;
  long x_row;
  const bf16* w;
  const bf16* bias;  // [N], or null
  bf16* y;
  long y_row, rows, outs, ins;
};

// What becomes of 32 sums: `left` and `right` are the panel's two halves.
template <Kind KIND>
inline void finish(const Job& job, long row, long panel, __m512 left, __m512 right) {
  if (job.bias) {
    const bf16* bias = job.bias + panel * (KIND == GATED ? 16 : 32);
    left = _mm512_add_ps(left, widen(bias));
    right = _mm512_add_ps(right, widen(bias + (KIND == GATED ? job.outs / 2 : 16)));
  }
  if (KIND == GATED) {
    const __m512 gate = rounded(silu_of(rounded(left)));
    store(job.y + row * job.y_row + panel * 16, _mm512_mul_ps(gate, rounded(right)));
  } else {
    bf16* y = job.y + row * job.y_row + panel * 32;
    _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(right, left));
  }
}

template <Kind KIND>
inline void finish_rows(const Job& job, long first, int rows, long panel, const float* sums) {
  for (int r = 0; r < rows; r++)
    finish<KIND>(job, first + r, panel, _mm512_load_ps(sums + r * 32), _mm512_load_ps(sums + r * 32 + 16));
}

constexpr long FAR = 16;  // steps ahead that a panel is fetched when it is used once

#ifdef QUIRE_AMX

// Up to 32 rows, straight from x.
template <Kind KIND>
void few_rows(const Job& job, long panel0, long panel1) {
  alignas(64) float sums[32 * 32];
  const int upper = (int)std::min<long>(16, job.rows), lower = (int)job.rows - upper;
  configure(upper, lower);
  const long steps = job.ins / 32;
  for (long panel = panel0; panel < panel1; panel++) {
    const bf16* w = job.w + panel * steps * STEP;
    product<false>(job.x, lower ? job.x + 16 * job.x_row : nullptr, job.x_row * 2, 32, w, STEP, steps, sums, 128,
                   {(const char*)(w + FAR * STEP), 32});
    finish_rows<KIND>(job, 0, (int)job.rows, panel, sums);
  }
}

// 32 rows of x as [K / 32][2][16][32]; rows that are not there are zeros.
inline void gather_rows(const bf16* x, long x_row, long rows, long ins, bf16* to) {
  for (long r = 0; r < 32; r++) {
    bf16* line = to + (r / 16) * HALF + (r % 16) * 32;
    for (long k = 0; k < ins / 32; k++)
      _mm512_store_si512(line + k * STEP, r < rows ? _mm512_loadu_si512(x + r * x_row + k * 32) : _mm512_setzero_si512());
  }
}

template <Kind KIND>
void many_rows(const Job& job, long panel0, long panel1, const bf16* x) {
  constexpr long DEEP = 8;  // steps of k for which 32 rows of x and a panel stay in the L1 cache
  static thread_local Scratch<float> keep;
  const long steps = job.ins / 32, padded = (job.rows + 31) / 32 * 32;
  const long block = std::max<long>(64, std::min<long>(512, (1 << 20) / (job.ins * 2) / 32 * 32));
  float* sums = keep.at_least(block * 32);
  begin_products();
  for (long m0 = 0; m0 < padded; m0 += block) {
    const long m1 = std::min(padded, m0 + block), tiles = (m1 - m0) / 32;
    const int lines = (int)((32 + tiles - 1) / tiles);
    for (long panel = panel0; panel < panel1; panel++) {
      const bf16* w = job.w + panel * steps * STEP;
      for (long k0 = 0; k0 < steps; k0 += DEEP) {
        const long deep = std::min(DEEP, steps - k0);
        Ahead ahead{(const char*)(w + (steps + k0) * STEP), lines};
        for (long m = m0; m < m1; m += 32) {
          const bf16* a = x + m * job.ins + k0 * STEP;
          float* c = sums + (m - m0) * 32;
          if (k0)
            product<true>(a, a + HALF, 64, STEP, w + k0 * STEP, STEP, deep, c, 128, ahead);
          else
            product<false>(a, a + HALF, 64, STEP, w, STEP, deep, c, 128, ahead);
          ahead.from += lines * LINE * deep;
        }
      }
      finish_rows<KIND>(job, m0, (int)(std::min(job.rows, m1) - m0), panel, sums);
    }
  }
}

template <Kind KIND>
void linear(const Job& job) {
  static Scratch<bf16> shared;  // one call at a time: the engine's loop is one thread
  const long panels = job.outs / 32, padded = (job.rows + 31) / 32 * 32;
  bf16* x = job.rows > 32 ? shared.at_least(padded * job.ins) : nullptr;
#pragma omp parallel
  {
    const long t = omp_get_thread_num(), team = omp_get_num_threads();
    const long panel0 = panels * t / team, panel1 = panels * (t + 1) / team;
    if (!x) {
      few_rows<KIND>(job, panel0, panel1);
    } else {
      for (long m = padded / 32 * t / team; m < padded / 32 * (t + 1) / team; m++)
        gather_rows(job.x + m * 32 * job.x_row, job.x_row, job.rows - m * 32, job.ins, x + m * 32 * job.ins);
#pragma omp barrier
      many_rows<KIND>(job, panel0, panel1, x);
    }
    end_products();
  }
}

#else

template <Kind KIND>
void linear(const Job& job) {
  const long panels = job.outs / 32, steps = job.ins / 32;
  long block = std::max<long>(48, (640 << 10) / (job.ins * 2) / ROWS * ROWS);
  if (job.rows <= block * 5 / 4) block = job.rows;
#pragma omp parallel
  {
    alignas(64) float sums[ROWS * 32];
    const long t = omp_get_thread_num(), team = omp_get_num_threads();
    for (long m0 = 0; m0 < job.rows; m0 += block) {
      const long rows = std::min(block, job.rows - m0), groups = (rows + ROWS - 1) / ROWS;
      for (long panel = panels * t / team; panel < panels * (t + 1) / team; panel++) {
        const bf16* w = job.w + panel * steps * STEP;
        // A panel that is used once is fetched a little ahead; else the next panel while this one is used.
        Ahead ahead = groups == 1 ? Ahead{(const char*)(w + FAR * STEP), 32}
                                  : Ahead{(const char*)(w + steps * STEP), (int)((32 + groups - 1) / groups)};
        for (long g = 0; g < groups; g++) {
          const long a = m0 + rows * g / groups, e = m0 + rows * (g + 1) / groups;
          product_of_rows<false>((int)(e - a), job.x + a * job.x_row, job.x_row, w, STEP, steps, sums, 32, ahead);
          ahead.from += (long)ahead.lines * LINE * steps;
          finish_rows<KIND>(job, a, (int)(e - a), panel, sums);
        }
      }
    }
  }
}

#endif

}  // namespace quire

using namespace quire;

// x: [rows, ins] with x_row elements from row to row; ins and outs are multiples of 32.
EXPORT void quire_linear(const bf16* x, long x_row, const bf16* w, const bf16* bias, bf16* y, long y_row, long rows,
                         long outs, long ins, int gated) {
  const Job job{x, x_row, w, bias, y, y_row, rows, outs, ins};
  gated ? linear<GATED>(job) : linear<PLAIN>(job);
}

// w: [outs, ins] row after row; `filled` of the outs exist, the others are zeros. Gated: see above.
EXPORT void quire_pack(const bf16* w, bf16* packed, long outs, long filled, long ins, int gated) {
  const long steps = ins / 32;
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < outs / 32; panel++)
    for (int half = 0; half < 2; half++) {
      const long row = gated ? half * (outs / 2) + panel * 16 : panel * 32 + half * 16;
      for (long k = 0; k < steps; k++) {
        bf16* to = packed + (panel * steps + k) * STEP + half * HALF;
        if (row + 16 <= filled) {
          transpose_words(w + row * ins + k * 32, ins * 2, to);
          continue;
        }
        alignas(64) bf16 edge[16 * 32] = {};
        for (long r = row; r < filled; r++) memcpy(edge + (r - row) * 32, w + r * ins + k * 32, 64);
        transpose_words(edge, 64, to);
      }
    }
}

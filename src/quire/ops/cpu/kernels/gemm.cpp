// y[M, N] = x[M, K] * w[N, K]^T with packed weights (pack.cpp), bf16 or int8.
//
// Packed layout: [N / 32][steps][2 tiles] (gemm_kernel.h). With GATED the 32 columns of a panel are 16 of the gate and the same 16
// of the other half; the output is activation(gate) * other, [M, N / 2].
//
// int8: each row of x is quantized around ZERO_BYTE with one scale; each row of w has its own scale and the sum of its bytes:
// y = (sum - ZERO_BYTE * sum of w) * scale of x * scale of w.
//
// Threads share the panels. Rows are processed in blocks whose x stays in the L2 cache while the panels stream through.
#include "gemm_floats.h"
#include "gemm_many_rows.h"
#include "layer.h"
#include "quantize_activations.h"
#include "team.h"

namespace quire {

#ifdef QUIRE_AMX

constexpr long PREFETCH_STEPS = 6;  // steps ahead that a panel is fetched when it is used once

// Work that overlaps with each step of a panel: the next weights are prefetched, and rows of the previous panel are finished, so
// that memory is never idle.
template <Kind KIND, class F>
struct Overlap {
  static constexpr bool PASSES = true;
  Ahead ahead;
  const Job<F>* job;
  const typename F::Sum* sums;
  long first, panel;  // the sums' first row
  int row, rows, each;
  void step() {
    ahead.step();
    const int end = std::min(row + each, rows);
    if (row < end) Finish<KIND, F>(*job, panel).rows(first + row, end - row, sums + row * 32), row = end;
  }
};

// Rows [first, first + count), read from x directly, in equal blocks of up to 32; if they do not divide, the last block starts
// earlier and computes some of them twice. The next panel is prefetched meanwhile.
template <Kind KIND, class F>
void few_rows(const Job<F>& job, long first, long count, long panel0, long panel1) {
  alignas(64) typename F::Sum sums[2][32 * 32];
  const long steps = job.steps(), blocks = (count + 31) / 32;
  const int rows = (int)((count + blocks - 1) / blocks), upper = std::min(16, rows), lower = rows - upper;
  const int lines = (int)((32 + blocks - 1) / blocks), each = (int)((rows + steps - 1) / steps);
  int turn = 0;
  Overlap<KIND, F> overlap{{nullptr, lines}, &job, nullptr, 0, 0, 0, 0, each};
  configure(upper, lower);
  for (long panel = panel0; panel < panel1; panel++) {
    const auto* w = job.w + panel * steps * STEP_OF<F>;
    overlap.ahead.from = (const char*)w + (blocks > 1 ? steps : PREFETCH_STEPS) * STEP_BYTES;
    for (long i = 0; i < blocks; i++, turn ^= 1) {
      const long at = first + std::min(i * rows, count - rows);
      const auto* x = job.x + at * job.x_row;
      product<F, false>(x, lower ? x + 16 * job.x_row : nullptr, job.x_row * sizeof(*x), F::K, w, STEP_OF<F>, steps,
                        sums[turn], 128, overlap);
      overlap.ahead.from += lines * LINE * steps;
      overlap.sums = sums[turn], overlap.first = at, overlap.panel = panel, overlap.rows = rows;
    }
  }
  if (panel0 < panel1) Finish<KIND, F>(job, overlap.panel).rows(overlap.first, rows, overlap.sums);
}

// 32 rows of x as [steps][2][16][64 bytes]; missing rows are zeros.
template <class F>
inline void gather_rows(const Job<F>& job, long first, typename F::Value* to) {
  for (long r = 0; r < 32; r++) {
    char* line = (char*)to + (r / 16) * HALF_BYTES + (r % 16) * 64;
    const char* from = (const char*)(job.x + (first + r) * job.x_row);
    for (long k = 0; k < job.steps(); k++)
      if (first + r < job.rows)
        memcpy(line + k * STEP_BYTES, from + k * 64, 64);
      else
        memset(line + k * STEP_BYTES, 0, 64);
  }
}

// A panel this short stays in the L1 cache while blocks of rows of x pass by unpacked: 256 to 1280 gated, 64 rows 61 -> 53 us, 512
// rows 455 -> 345. The number of rows at a time keeps x and y in the L2 cache.
constexpr long SHORT_PANEL = 24, ROWS_AT_ONCE = 256;  // steps, rows

template <class F>
bool straight(const Job<F>& job) {
  return job.rows <= 32 || (job.steps() <= SHORT_PANEL && !job.raw);
}

// Too few rows for gemm_amx.h: most of their time is memory traffic.
template <Kind KIND, class F>
void some_rows(const Job<F>& job, long panel0, long panel1, const typename F::Value* x) {
  constexpr long DEEP = 8;  // steps during which 32 rows of x and a panel stay in the L1 cache
  constexpr long A_STEP = STEP_BYTES / sizeof(typename F::Value), A_HALF = A_STEP / 2;
  static thread_local Scratch<typename F::Sum> keep;
  const long steps = job.steps(), padded = (job.rows + 31) / 32 * 32;
  const long block = std::max<long>(64, std::min<long>(512, (1 << 20) / (steps * 64) / 32 * 32));
  auto* both = keep.at_least(2 * block * 32);
  const int each = (int)((32 + steps - 1) / steps);
  begin_products();
  for (long m0 = 0; m0 < padded; m0 += block) {
    const long m1 = std::min(padded, m0 + block), tiles = (m1 - m0) / 32;
    const int lines = (int)((32 + tiles - 1) / tiles);  // each tile of rows prefetches its share of the next steps
    const auto count = [&](long m) { return (int)std::min<long>(32, job.rows - m); };
    for (long panel = panel0; panel < panel1; panel++) {
      const auto* w = job.w + panel * steps * STEP_OF<F>;
      auto *sums = both + panel % 2 * block * 32, *before = both + (panel + 1) % 2 * block * 32;
      for (long k0 = 0; k0 < steps; k0 += DEEP) {
        const long deep = std::min(DEEP, steps - k0);
        const auto* b = w + k0 * STEP_OF<F>;
        Overlap<KIND, F> overlap{{(const char*)(b + DEEP * STEP_OF<F>), lines}, &job, nullptr, 0, panel - 1, 0, 0, each};
        for (long m = m0; m < m1; m += 32) {
          const auto* a = x + (m / 32 * steps + k0) * A_STEP;
          auto* c = sums + (m - m0) * 32;
          overlap.sums = before + (m - m0) * 32, overlap.first = m;
          overlap.row = (int)k0 * each, overlap.rows = panel == panel0 ? 0 : count(m);
          if (k0)
            product<F, true>(a, a + A_HALF, 64, A_STEP, b, STEP_OF<F>, deep, c, 128, overlap);
          else
            product<F, false>(a, a + A_HALF, 64, A_STEP, b, STEP_OF<F>, deep, c, 128, overlap);
          overlap.ahead.from += lines * LINE * deep;
        }
      }
    }
    if (panel0 < panel1)
      for (long m = m0; m < m1; m += 32)
        Finish<KIND, F>(job, panel1 - 1).rows(m, count(m), both + (panel1 - 1) % 2 * block * 32 + (m - m0) * 32);
  }
}

// Panels [panel0, panel1) by the calling thread alone.
template <Kind KIND, class F>
void panels_alone(const Job<F>& job, long panel0, long panel1) {
  static thread_local Scratch<typename F::Value> keep;
  const long padded = (job.rows + 31) / 32 * 32;
  if (straight(job)) {
    const long parts = (job.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (long i = 0; i < parts; i++) {
      const long m = job.rows * i / parts;
      few_rows<KIND>(job, m, job.rows * (i + 1) / parts - m, panel0, panel1);
    }
  } else if (job.rows >= AMX_MIN_ROWS) {
    many_rows<KIND>(job, {0, job.rows, panel0, panel1});
  } else {
    auto* x = keep.at_least(padded * job.ins);
    for (long m = 0; m < padded; m += 32) gather_rows(job, m, x + m * job.ins);
    some_rows<KIND>(job, panel0, panel1, x);
  }
  end_products();
}

template <Kind KIND, class F>
void linear(const Job<F>& job) {
  static thread_local Scratch<typename F::Value> shared;  // of the calling thread: two engines may run at once
  const long panels = job.outs / 32, padded = (job.rows + 31) / 32 * 32;
  const bool some = !straight(job) && job.rows < AMX_MIN_ROWS;
  auto* x = some ? shared.at_least(padded * job.ins) : nullptr;
  if (some) each_of(padded / 32, true, [&](long m) { gather_rows(job, m * 32, x + m * 32 * job.ins); });
  in_shares(true, [&](long t, long team) {
    const long panel0 = panels * t / team, panel1 = panels * (t + 1) / team;
    if (some) {
      some_rows<KIND>(job, panel0, panel1, x);
      end_products();
    } else if (job.rows >= AMX_MIN_ROWS && !straight(job)) {
      many_rows<KIND>(job, share(job, t, team));
      end_products();
    } else {
      panels_alone<KIND>(job, panel0, panel1);
    }
  });
}

#else

constexpr long PREFETCH_STEPS = 16;  // steps ahead that a panel is fetched when it is used once
constexpr long AMX_MIN_ROWS = 1L << 40;

// Rows that need a few passes use the same 8 steps of a panel, 16 KB, while these stay in the L1 cache: refilling it from L2 would
// compete for fill buffers with the weights that come from memory. VNNI, 16 rows, 3072 inputs to 1024 outputs: 169 -> 148 us.
// With more passes, loading and storing the sums costs as much as this saves.
constexpr long DEEP = 8, TURNS = 5;

// Rows [first, first + rows), which need this many passes, against a panel.
template <Kind KIND, class F>
void multiply_panel(const Job<F>& job, long first, long rows, long panel, typename F::Sum* sums) {
  const long steps = job.steps(), turns = (rows + PASS_ROWS<F> - 1) / PASS_ROWS<F>, deep = turns > 1 && turns <= TURNS ? DEEP : steps;
  const auto* w = job.w + panel * steps * STEP_OF<F>;
  // A panel that is used once is prefetched a little ahead; else the next one is prefetched while this is used.
  const long lines = (32 + turns - 1) / turns, ahead_by = turns == 1 ? PREFETCH_STEPS : deep;
  for (long k = 0, some; k < steps; k += some, w += some * STEP_OF<F>) {
    some = std::min(deep, steps - k);
    Ahead ahead{(const char*)w + ahead_by * STEP_BYTES, (int)lines};
    for (long turn = 0; turn < turns; turn++) {
      const long a = rows * turn / turns, count = rows * (turn + 1) / turns - a;
      const auto* x = job.x + (first + a) * job.x_row + k * F::K;
      auto* c = sums + (deep < steps ? a : 0) * 32;
      if (k)
        product_of_rows<F, true>((int)count, x, job.x_row, w, STEP_OF<F>, some, c, 32, ahead);
      else
        product_of_rows<F, false>((int)count, x, job.x_row, w, STEP_OF<F>, some, c, 32, ahead);
      ahead.from += lines * LINE * some;
      if (k + some == steps) Finish<KIND, F>(job, panel).rows(first + a, count, c);
    }
  }
}

// Panels [panel0, panel1) by the calling thread alone.
template <Kind KIND, class F>
void panels_alone(const Job<F>& job, long panel0, long panel1) {
#ifndef __AVX512F__
  if constexpr (std::is_same_v<F, Bf16>)
    if (job.rows >= FLOATS_MIN_ROWS) return panels_of_floats<KIND>(job, panel0, panel1);
#endif
  alignas(64) typename F::Sum sums[ROWS * TURNS * 32];
#ifndef __AVX512F__
  static_assert(PANELS <= ROWS * TURNS);
  if (job.rows == 1)
    for (const long size = job.steps() * STEP_OF<F>; panel0 + PANELS <= panel1; panel0 += PANELS) {
      product_of_panels<F>(job.x, job.w + panel0 * size, size, job.steps(), sums);
      for (int p = 0; p < PANELS; p++) Finish<KIND, F>(job, panel0 + p).rows(0, 1, sums + p * 32);
    }
#endif
  long block = std::max<long>(48, (640 << 10) / (job.steps() * 64) / PASS_ROWS<F> * PASS_ROWS<F>);
  if (job.rows <= block * 5 / 4) block = job.rows;
  for (long m = 0; m < job.rows; m += block)
    for (long panel = panel0; panel < panel1; panel++) multiply_panel<KIND>(job, m, std::min(block, job.rows - m), panel, sums);
}

template <Kind KIND, class F>
void linear(const Job<F>& job) {
  const long panels = job.outs / 32;
  in_shares(true, [&](long t, long team) {
    panels_alone<KIND>(job, panels * t / team, panels * (t + 1) / team);
  });
}

#endif

void Weight::panels_bf16(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act, long panel0, long panel1) const {
  Job<Bf16> job{x, x_row, (const bf16*)data, bias, y, y_row, rows, outs, ins, nullptr, nullptr, nullptr};
  job.act = act;
  is_gated(act) ? panels_alone<GATED>(job, panel0, panel1) : panels_alone<PLAIN>(job, panel0, panel1);
}

void Weight::panels_int8(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act, long panel0, long panel1) const {
  static thread_local Scratch<uint8_t> keep;
  static thread_local Scratch<float> keep_scales;
  Job<Int8> job{nullptr, ins, (const int8_t*)data, bias, y, y_row, rows, outs, ins, nullptr, scale, sum, x, x_row, act};
  if (rows < AMX_MIN_ROWS) {
    uint8_t* bytes = keep.at_least(rows * ins + 64);
    float* scales = keep_scales.at_least(rows);
    rows_to_bytes(x, x_row, rows, bytes, ins, 64, ins, scales);
    job.x = bytes, job.x_scale = scales, job.raw = nullptr;
  }
  is_gated(act) ? panels_alone<GATED>(job, panel0, panel1) : panels_alone<PLAIN>(job, panel0, panel1);
}

}  // namespace quire

using namespace quire;

// x: [rows, ins] with x_row elements from row to row; outs and ins are multiples of 32.
EXPORT void quire_linear(const bf16* x, long x_row, const bf16* w, const bf16* bias, bf16* y, long y_row, long rows,
                         long outs, long ins, int act) {
  Job<Bf16> job{x, x_row, w, bias, y, y_row, rows, outs, ins, nullptr, nullptr, nullptr};
  job.act = act;
  is_gated(act) ? linear<GATED>(job) : linear<PLAIN>(job);
}

// The same with int8 weights; ins is a multiple of 64.
EXPORT void quire_linear_int8(const bf16* x, long x_row, const int8_t* w, const float* w_scale, const int32_t* w_sum,
                              const bf16* bias, bf16* y, long y_row, long rows, long outs, long ins, int act) {
  Job<Int8> job{nullptr, ins, w, bias, y, y_row, rows, outs, ins, nullptr, w_scale, w_sum, x, x_row, act};
  if (rows < AMX_MIN_ROWS) {  // else each thread quantizes the rows that it needs
    static thread_local Scratch<uint8_t> keep;
    static thread_local Scratch<float> keep_scales;  // of the calling thread
    uint8_t* bytes = keep.at_least(rows * ins + 64);
    float* scales = keep_scales.at_least(rows);
    each_of((rows + 3) / 4, rows >= 16, [&](long at) {
      const long r = at * 4;
      rows_to_bytes(x + r * x_row, x_row, std::min(4L, rows - r), bytes + r * ins, ins, 64, ins, scales + r);
    });
    job.x = bytes, job.x_scale = scales, job.raw = nullptr;
  }
  is_gated(act) ? linear<GATED>(job) : linear<PLAIN>(job);
}

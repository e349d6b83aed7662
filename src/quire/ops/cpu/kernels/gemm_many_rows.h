// A linear layer of many rows with AMX: how rows, panels and steps are shared among threads (gemm_amx.h multiplies).
//
// Reused data stays in the L2 cache: a block's rows for some steps of k, and, if those are not all steps, the sums of some panels.
// Weights stream through.
#pragma once
#include "gemm_amx.h"
#include "quantize_activations.h"
#include "gemm_epilogue.h"

#ifdef QUIRE_AMX

namespace quire {

constexpr long AMX_MIN_ROWS = 272;  // rows, from which on gemm_amx.h is faster: in bf16 at 256 by 1.0, at 320 by 1.1, at 500 by 1.2

// Rows [first, first + rows) of x, in groups, `deep` steps from `k` on; or all steps, for rows that are to be quantized.
template <class F>
void gather(Job<F>& job, long first, long rows, const Groups& groups, long k, long deep, char* to) {
  static thread_local Scratch<float> keep_scales;
  float* scales = job.raw ? keep_scales.at_least(job.rows) : nullptr;
  for (long g = 0; g < groups.count; g++) {
    const int tiles = groups.size(g);
    const long row = groups.first(g) * 16, at = first + row, count = std::min(tiles * 16L, rows - row);
    char* group = to + row * deep * 64;
    if (job.raw)
      rows_to_bytes(job.raw + at * job.raw_row, job.raw_row, count, (uint8_t*)group, 64, tiles * HALF_BYTES, job.ins, scales + at);
    else
      gather(job.x + at * job.x_row + k * F::K, job.x_row, count, deep, tiles, group);
  }
  if (job.raw) job.x_scale = scales;
}

// Work that overlaps with each step of a block's product: weights are prefetched, and rows of the previous block are finished, a
// few at a time and not in the first step: their sums are still being stored then, and reading them would stall.
template <Kind KIND, class F>
struct BesideBlock {
  using Sum = typename F::Sum;
  const Job<F>& job;
  long lines, each;             // of weights for a step, and rows for a part of one
  bool streams;                 // y is written with non-temporal stores
  bf16* halves;                 // buffer for a gated panel, half a line of y, until its neighbour is done; its row 0 is `first`
  long first;
  const char* ahead = nullptr;  // the next weights
  // A block is multiplied, and finished except for its rows from `next` on.
  const Sum* sums = nullptr;
  long row = 0, rows = 0, late = 0, panel = 0, next = 0, wait = 0;

  void begin(const Sum* of_block, long first, long count, int tiles, long at_panel) {
    sums = of_block, row = first, rows = count, late = tiles * TILE_SUMS, panel = at_panel, next = 0, wait = 1;
  }
  void step() {
    for (long i = 0; i < lines; i++) fetch(ahead + i * LINE);
    ahead += lines * LINE;
    wait--;
  }
  void part() {
    if (wait < 0) finish_to(std::min(rows, next + each));
  }
  void finish_to(long end) {
    const long count = end - next;
    if (count <= 0) return;
    const Finish<KIND, F> finish(job, panel);
    const Sum* from = sums + next * 16;
    if (streams)
      finish_streamed(finish, row + next, count, from);
    else
      finish.rows(row + next, count, from, from + late, 16);
    next = end;
  }
  void finish_streamed(const Finish<KIND, F>& finish, long r, long count, const Sum* from) {
    const long second = KIND == GATED ? panel % 2 : 0, beyond = late;
    bf16 *half = halves + (r - first) * 16, *y = finish.y + r * finish.y_row - second * 16;
    for (const long end = r + count; r < end; r++, from += 16, half += 16, y += finish.y_row) {
      Floats left, right;
      finish.values(r, from, from + beyond, left, right);
      if (KIND == PLAIN)
        stream(y, left, right);
      else if (second)
        stream(y, half, left);
      else
        store(half, left);
    }
  }
};

// Rows [row0, row1) and panels [panel0, panel1): a thread's share.
struct Share {
  long row0, row1, panel0, panel1;
};

inline long parts_of(long count, long each) { return (count + each - 1) / each; }

// The block sizes: rows, panels whose sums are kept meanwhile, and steps.
struct Cut {
  long rows, panels, steps;
};

// All steps, if enough rows of x fit the L2 cache beside two panels; else as many rows as fit for some steps, with the sums of some
// panels. 1024 x 8192 to 2048 outputs, two cores: 96 rows in bf16 1.0 TFLOP/s, cut 2.0; 160 in int8 2.9, cut 3.1.
template <class F>
Cut cut(const Job<F>& job, long panels) {
  constexpr long KEPT = 1280 << 10, ENOUGH = 256, MAX_STEPS = 64, MAX_PANELS = 32;
  const long steps = job.steps(), rows = KEPT / (steps * HALF_BYTES) * 16;
  if (rows >= ENOUGH) return {rows, panels, steps};
  const auto even = [](long count, long most) { return parts_of(count, parts_of(count, most)); };
  const long deep = even(steps, MAX_STEPS), wide = even(std::max(1L, panels), MAX_PANELS);
  return {KEPT / (deep * 64 + wide * 128) / 16 * 16, wide, deep};
}

// Each thread copies its rows, and reads its panels, once for each cut of the other dimension: this minimizes both.
template <class F>
Share share(const Job<F>& job, long thread, long team) {
  const long tiles = (job.rows + 15) / 16, panels = job.outs / 64 * 2;
  long best = 0, parts = 1;
  for (long n = 1; n <= std::min(team, tiles / 6); n++) {  // not fewer rows than a block
    const long rows = parts_of(tiles, n) * 16, columns = parts_of(job.outs / 32 * n, team);
    const Cut one = cut(job, columns);
    const long cost = rows * parts_of(columns, one.panels) + parts_of(rows, one.rows) * job.outs * n / team;
    if (team % n == 0 && (n == 1 || cost <= best)) best = cost, parts = n;
  }
  const long others = team / parts, part = thread / others, other = thread % others;
  // In pairs, for the whole lines of gated panels; the last may be alone.
  const auto at = [&](long i) { return i == others ? job.outs / 32 : panels / 2 * i / others * 2; };
  return {tiles * part / parts * 16, std::min(job.rows, tiles * (part + 1) / parts * 16), at(other), at(other + 1)};
}

// Whether y is written with non-temporal stores: a normal store reads the line first, and more than half of the L2 cache would be
// evicted before use. qkv of 1024 rows: 1.9 -> 2.7 TFLOP/s; the reader of y loses a tenth of that.
template <Kind KIND, class F>
bool better_streamed(const Job<F>& job, const Share& mine) {
  const bool whole_lines = (uintptr_t)job.y % LINE == 0 && job.y_row * 2 % LINE == 0;
  const bool pairs = KIND == PLAIN || (mine.panel1 % 2 == 0 && job.act != HALVES);
  return whole_lines && pairs && (mine.row1 - mine.row0) * (mine.panel1 - mine.panel0) * (KIND == GATED ? 32 : 64) > 1 << 20;
}

template <Kind KIND, class F>
void many_rows(Job<F> job, const Share& mine, const Cut& cut, long first, long rows) {
  using Sum = typename F::Sum;
  static thread_local Scratch<char> keep_x;
  static thread_local Scratch<Sum> keep_sums;
  static thread_local Scratch<bf16> keep_halves;
  alignas(64) Sum sums[2][MAX_TILES * 2 * TILE_SUMS];
  const Groups groups(rows);
  const long steps = job.steps(), each = parts_of(MAX_TILES * 16, std::max(1L, cut.steps - 1) * PARTS);
  const bool whole = cut.steps == steps;
  char* x = keep_x.at_least(groups.tiles * 16 * cut.steps * 64);
  Sum* kept = whole ? nullptr : keep_sums.at_least(cut.panels * groups.tiles * 2 * TILE_SUMS);
  bf16* halves = KIND == GATED ? keep_halves.at_least(rows * 16) : nullptr;
  BesideBlock<KIND, F> overlap{job, parts_of(32, groups.count), each, better_streamed<KIND>(job, mine), halves, first};
  const auto weights = [&](long panel, long k) { return (const char*)job.w + (panel * steps + k) * STEP_BYTES; };
  int turn = 0;
  const auto meet = [&](long panel, long place, long k, long deep) {
    const char* w = weights(panel, k);
    const bool last = k + deep == steps;
    for (long g = 0; g < groups.count; g++) {
      const long tile = groups.first(g);
      Sum* of_block = whole ? nullptr : kept + (place * groups.tiles + tile) * 2 * TILE_SUMS;
      const Sum* from = k ? of_block : nullptr;
      Sum* to = last ? sums[turn] : of_block;
      const auto multiply = groups.size(g) == 3 ? multiply_three<F, decltype(overlap)> : multiply_two<F, decltype(overlap)>;
      multiply(x + tile * 16 * deep * 64, w, deep, from, to, overlap);
      overlap.finish_to(overlap.rows);
      if (!last) continue;
      overlap.begin(to, first + tile * 16, std::min(groups.size(g) * 16L, rows - tile * 16), groups.size(g), panel);
      turn ^= 1;
    }
  };
  for (long p0 = mine.panel0, p1; p0 < mine.panel1; p0 = p1) {
    p1 = std::min(p0 + cut.panels, mine.panel1);
    for (long k = 0; k < steps; k += cut.steps) {
      const long deep = std::min(cut.steps, steps - k);
      if (!whole || p0 == mine.panel0) gather(job, first, rows, groups, k, deep, x);
      for (long panel = p0; panel < p1; panel++) {
        overlap.ahead = panel + 1 < p1 ? weights(panel + 1, k) : k + deep < steps ? weights(p0, k + deep) : weights(p1, 0);
        meet(panel, panel - p0, k, deep);
      }
    }
  }
  overlap.finish_to(overlap.rows);
  end_streams();
}

// Quantizes the rows of a share, row by row: for rows that are multiplied some steps at a time, the scale covers all steps.
inline void raw_to_bytes(Job<Bf16>&, const Share&) {}
inline void raw_to_bytes(Job<Int8>& job, const Share& mine) {
  static thread_local Scratch<uint8_t> keep;
  static thread_local Scratch<float> keep_scales;
  const long rows = mine.row1 - mine.row0;
  uint8_t* bytes = keep.at_least(rows * job.ins);
  float* scales = keep_scales.at_least(rows);
  rows_to_bytes(job.raw + mine.row0 * job.raw_row, job.raw_row, rows, bytes, job.ins, 64, job.ins, scales);
  job.x = bytes - mine.row0 * job.ins, job.x_scale = scales - mine.row0, job.raw = nullptr;
}

template <Kind KIND, class F>
void many_rows(Job<F> job, const Share& mine) {
  const Cut one = cut(job, mine.panel1 - mine.panel0);
  if (one.steps < job.steps()) raw_to_bytes(job, mine);
  const long rows = mine.row1 - mine.row0, tiles = parts_of(rows, 16), blocks = parts_of(rows, one.rows);
  begin_products();
  for (long i = 0; i < blocks; i++) {
    const long row0 = tiles * i / blocks * 16, row1 = std::min(rows, tiles * (i + 1) / blocks * 16);
    many_rows<KIND>(job, mine, one, mine.row0 + row0, row1 - row0);
  }
}

}  // namespace quire

#endif

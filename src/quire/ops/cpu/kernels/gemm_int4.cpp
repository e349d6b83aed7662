// y[M, N] = x[M, K] * w[N, K]^T with int4 weights in groups of inputs, each with a scale and a zero point. Codes of 4 bits may stand
// for other bytes: a table has them.
//
// Packed layout: [N / 32] panels of K / 4 lines (int4_dot.h); scales and zero points [N / 32][K / group][32]. A panel of a gated
// weight has 16 outputs of either half.
//
// Each group of a row of x is quantized to signed bytes with a scale of its own. Sums of a group are exact integers; groups are
// added in order, with the same float instructions in every path, so a row's bits do not depend on the other rows.
#include "quantize_activations.h"
#include "layer.h"
#include "int4_dot.h"
#include "norm_rope_act.h"
#include "team.h"

namespace quire {

namespace {

constexpr long PREFETCH_BYTES = 16384;  // bytes ahead that weights are fetched: all of them, else 32 rows with AMX take 30 ms instead of 24

struct Job4 {
  const int8_t* x;      // [M, K]
  const void* words;    // the same as words, [M, K / 4]
  const float *x_scale, *x_sum;  // [groups, M]
  const uint8_t* w;
  const float* w_scale;
  const uint8_t* w_zero;
  const bf16* bias;  // [N], or null
  bf16* y;
  long y_row, rows, outs, ins, group, groups;
  int act;
  const uint8_t* codes;  // 16 bytes, or null: a nibble is its own value

  const uint8_t* panel(long p) const { return w + p * ins * 16; }
  Ints table() const {
    int32_t words[16];
    for (int i = 0; i < 16; i++) memcpy(words + i, codes + i % 4 * 4, 4);
    return load(words);
  }
  // Prefetches the scales of 32 outputs, as far ahead as weights are prefetched.
  void fetch_scales(long at) const {
    at = (at + PREFETCH_BYTES / (group * 16)) * 32;
    fetch(w_scale + at), fetch(w_scale + at + 16), fetch(w_zero + at);
  }
};

// Constants of 16 outputs of a panel for a group.
struct Outputs {
  Floats scale, zero;
  Outputs(const Job4& job, long panel, long g, int part) {
    const long at = (panel * job.groups + g) * 32 + part * 16;
    scale = load(job.w_scale + at), zero = to_floats(widen(job.w_zero + at));
  }
  // total += scale * scale of x * (sums - zero * sum of x)
  void add(Ints sums, float x_scale, float x_sum, float* total) const {
    const Floats exact = fnma(zero, floats(x_sum), to_floats(sums));
    store(total, fma(exact, scale * floats(x_scale), load(total)));
  }
};

template <bool GATED>
inline void finish(const Job4& job, long row, long panel, const float* total) {
  const long out = panel * (GATED ? 16 : 32), other = out + (GATED ? job.outs / 2 : 16);
  const auto bias = [&](long at) { return job.bias ? widen(job.bias + at) : floats(0.f); };
  const Floats left = load(total) + bias(out), right = load(total + 16) + bias(other);
  bf16* y = job.y + row * job.y_row + out;
  if (GATED && job.act == HALVES)
    store(y, left), store(y + job.outs / 2, right);
  else if (GATED)
    store(y, gated(rounded(left), rounded(right), job.act));
  else
    store(y, ungated(left, job.act), ungated(right, job.act));
}

// N rows by TILES x 16 outputs of a panel; total: [N][32].
template <int N, int FIRST, int TILES, bool CODED>
__attribute__((noinline)) void panel_of_rows(const Job4& job, long row, long panel, float* total) {
  const uint8_t* w = job.panel(panel);
  const Ints table = CODED ? job.table() : Ints{};
  using Dots = NibbleDots<CODED>;
  const long step = job.ins / 4, lines = job.group / 4, at_once = std::min(lines, Dots::LINES);
  const auto* x = (const typename Dots::Word*)job.words + row * step;
  for (long g = 0; g < job.groups; g++) {
    Ints sums[N][TILES];
#pragma GCC unroll 16
    for (int m = 0; m < N; m++)
#pragma GCC unroll 2
      for (int t = 0; t < TILES; t++) sums[m][t] = ints(0);
    for (long i = 0; i < lines; i += at_once) {
      Ints partial[N][TILES];
#pragma GCC unroll 16
      for (int m = 0; m < N; m++)
#pragma GCC unroll 2
        for (int t = 0; t < TILES; t++) partial[m][t] = ints(0);
#pragma GCC unroll 2
      for (long j = 0; j < at_once; j++, w += 64, x++) {
        fetch(w + PREFETCH_BYTES);
        const Ints line = load((const int32_t*)w);
        typename Dots::Part parts[TILES];
#pragma GCC unroll 2
        for (int t = 0; t < TILES; t++) parts[t] = Dots::part_of(line, FIRST + t, table);
#pragma GCC unroll 16
        for (int m = 0; m < N; m++)
#pragma GCC unroll 2
          for (int t = 0; t < TILES; t++) partial[m][t] = Dots::add(partial[m][t], parts[t], x[m * step]);
      }
#pragma GCC unroll 16
      for (int m = 0; m < N; m++)
#pragma GCC unroll 2
        for (int t = 0; t < TILES; t++) sums[m][t] = sums[m][t] + Dots::total_of(partial[m][t]);
    }
    const float *x_scale = job.x_scale + g * job.rows + row, *x_sum = job.x_sum + g * job.rows + row;
    if (FIRST == 0) job.fetch_scales(panel * job.groups + g);
#pragma GCC unroll 2
    for (int t = 0; t < TILES; t++) {
      const Outputs outputs(job, panel, g, FIRST + t);
#pragma GCC unroll 16
      for (int m = 0; m < N; m++) outputs.add(sums[m][t], x_scale[m], x_sum[m], total + m * 32 + (FIRST + t) * 16);
    }
  }
}

template <int N, bool CODED>
inline void panel_of_rows(const Job4& job, long row, long panel, float* total) {
  memset(total, 0, N * 32 * sizeof(float));
  if constexpr (N * 2 * (16 / LEAF) <= NIBBLE_SUMS) {
    panel_of_rows<N, 0, 2, CODED>(job, row, panel, total);
  } else {
    panel_of_rows<N, 0, 1, CODED>(job, row, panel, total);
    panel_of_rows<N, 1, 1, CODED>(job, row, panel, total);
  }
}

inline void panel_of_rows(int rows, const Job4& job, long row, long panel, float* total) {
  switch (rows) {
#define CASE(n) \
  case n: return job.codes ? panel_of_rows<n, true>(job, row, panel, total) : panel_of_rows<n, false>(job, row, panel, total);
    CASE(1) CASE(2)
#if !defined(__x86_64__) || defined(__AVX2__)
    CASE(3) CASE(4)
#endif
#if !defined(__x86_64__) || defined(__AVX512F__)
    CASE(5) CASE(6)
#endif
#if defined(__AVX512F__)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
  }
}

template <bool GATED>
void by_registers(const Job4& job, long panel0, long panel1) {
  alignas(64) float total[NIBBLE_ROWS * 32];
  const long block = std::max<long>(48, (640 << 10) / job.ins / NIBBLE_ROWS * NIBBLE_ROWS);
  for (long m0 = 0; m0 < job.rows; m0 += block) {
    const long rows = std::min(block, job.rows - m0), parts = (rows + NIBBLE_ROWS - 1) / NIBBLE_ROWS;
    for (long panel = panel0; panel < panel1; panel++)
      for (long part = 0; part < parts; part++) {
        const long a = m0 + rows * part / parts, e = m0 + rows * (part + 1) / parts;
        panel_of_rows((int)(e - a), job, a, panel, total);
        for (long r = a; r < e; r++) finish<GATED>(job, r, panel, total + (r - a) * 32);
      }
  }
}

#ifdef QUIRE_AMX

constexpr long TILE_MIN_ROWS = 4, TILE_MAX_ROWS = 33;  // rows, from which on tiles are faster, and which are more than they take at once

// Lines of a group as bytes of 16 and 16 outputs, with zero points subtracted.
struct Parting {
  Ints left, right, table;
  bool coded;
  Parting(const Job4& job, const uint8_t* zero)
      : left(four(zero)), right(four(zero + 16)), table(job.codes ? job.table() : ints(0)), coded(job.codes) {}
  Ints part(Ints line, int part) const { return coded ? NibbleDots<true>::part_of(line, part, table) : NibbleDots<false>::part_of(line, part); }
  static Ints four(const uint8_t* p) { return wrapping_times(widen(p), ints(0x01010101)); }
  void lines(const uint8_t* w, int count, int8_t* to, int8_t* other) const {
    for (int i = 0; i < count; i++, w += LINE) {
      const Ints line = load((const int32_t*)w);
      fetch(w + PREFETCH_BYTES);
      store((int32_t*)(to + i * LINE), bytes_minus(part(line, 0), left));
      store((int32_t*)(other + i * LINE), bytes_minus(part(line, 1), right));
    }
  }
};

// Zero points are already subtracted: the same integers as in registers, followed by the same float instructions.
inline void add_sums(const Job4& job, long row, long rows, long panel, long g, const int32_t* sums, float* total) {
  const float* w_scale = job.w_scale + (panel * job.groups + g) * 32;
  const Floats left = load(w_scale), right = load(w_scale + 16);
  const float* scale = job.x_scale + g * job.rows + row;
  for (const float* end = scale + rows; scale < end; scale++, sums += 32, total += 32) {
    const Floats x_scale = floats(*scale);
    store(total, fma(to_floats(load(sums)), left * x_scale, load(total)));
    store(total + 16, fma(to_floats(load(sums + 16)), right * x_scale, load(total + 16)));
  }
}

// Up to 16 rows, or up to 32 with LOWER. Half of the tiles' time overlaps with other work: bytes of the next inputs are unpacked
// while these are multiplied, and a group is added while the next is multiplied. Unpacking a whole panel first, and adding without
// a product in flight: 32 rows 22.5 ms instead of 16.5 (Qwen3-0.6B, two cores).
template <bool GATED, bool LOWER>
void by_few_tiles(const Job4& job, long panel0, long panel1, int deep) {
  constexpr long MAX_ROWS = LOWER ? 32 : 16;
  alignas(64) int8_t bytes[2][2][16 * 64];
  alignas(64) int32_t sums[2][MAX_ROWS * 32];
  alignas(64) float total[MAX_ROWS * 32];
  const long rows = job.rows, pieces = job.group / deep;
  const auto part = [&](const uint8_t* w, const uint8_t* zero, int8_t(*to)[16 * 64]) {
    Parting(job, zero).lines(w, deep / 4, to[0], to[1]);
  };
  configure_nibbles(deep, (int)std::min(16L, rows), LOWER ? (int)rows - 16 : 16);
  for (long panel = panel0; panel < panel1; panel++) {
    const uint8_t *w = job.panel(panel), *zero = job.w_zero + panel * job.groups * 32;
    const int8_t* x = job.x;
    memset(total, 0, rows * 32 * sizeof(float));
    part(w, zero, bytes[0]);
    long turn = 0;
    for (long g = 0; g < job.groups; g++, zero += 32) {
      job.fetch_scales(panel * job.groups + g);
      begin_sums<LOWER>();
      for (long i = 0; i < pieces; i++, x += deep, turn ^= 1) {
        w += deep * 16;
        if (x + deep < job.x + job.ins) part(w, i + 1 < pieces ? zero : zero + 32, bytes[turn ^ 1]);
        multiply_few<LOWER>(x, job.ins, bytes[turn][0], bytes[turn][1]);
      }
      end_sums<LOWER>(sums[g % 2]);
      if (g) add_sums(job, 0, rows, panel, g - 1, sums[(g - 1) % 2], total);
    }
    add_sums(job, 0, rows, panel, job.groups - 1, sums[(job.groups - 1) % 2], total);
    for (long r = 0; r < rows; r++) finish<GATED>(job, r, panel, total + r * 32);
  }
  end_tiles();
}

// x as [rows / 32][K / deep][2][16][deep]; missing rows are zeros.
inline void gather(const Job4& job, long first, int deep, int8_t* to) {
  for (long r = 0; r < 32; r++)
    for (long k = 0; k < job.ins; k += deep) {
      int8_t* at = to + k * 32 + r * deep;
      if (first + r < job.rows)
        memcpy(at, job.x + (first + r) * job.ins + k, deep);
      else
        memset(at, 0, deep);
    }
}

template <bool GATED>
void by_tiles(const Job4& job, long panel0, long panel1, const int8_t* x, int deep) {
  static thread_local Scratch<float> keep;
  static thread_local Scratch<int8_t> keep_bytes;
  alignas(64) int32_t sums[32 * 32];
  const long padded = (job.rows + 31) / 32 * 32;
  const long block = std::max<long>(64, std::min<long>(512, (1 << 20) / job.ins / 32 * 32));
  const long chunk = std::max<long>(1, 512 / job.group) * job.group;  // inputs whose bytes stay in the L1 cache
  float* total = keep.at_least(block * 32);
  int8_t* bytes = keep_bytes.at_least(chunk * 32);
  configure_nibbles(deep);
  for (long m0 = 0; m0 < padded; m0 += block) {
    const long m1 = std::min(padded, m0 + block);
    for (long panel = panel0; panel < panel1; panel++) {
      memset(total, 0, (m1 - m0) * 32 * sizeof(float));
      for (long k0 = 0; k0 < job.ins; k0 += chunk) {
        const long k1 = std::min(job.ins, k0 + chunk);
        for (long k = k0; k < k1; k += deep) {
          const uint8_t* zero = job.w_zero + (panel * job.groups + k / job.group) * 32;
          int8_t* to = bytes + (k - k0) * 32;
          Parting(job, zero).lines(job.panel(panel) + k * 16, deep / 4, to, to + 16 * deep);
        }
        for (long m = m0; m < m1; m += 32)
          for (long k = k0, g = k0 / job.group; k < k1; k += job.group, g++) {
            multiply_tiles(x + m * job.ins + k * 32, bytes + (k - k0) * 32, job.group / deep, deep, sums);
            add_sums(job, m, std::min(32L, job.rows - m), panel, g, sums, total + (m - m0) * 32);
          }
      }
      for (long r = m0; r < std::min(job.rows, m1); r++) finish<GATED>(job, r, panel, total + (r - m0) * 32);
    }
  }
  end_tiles();
}

#endif

#ifdef QUIRE_AMX

// How many inputs a tile takes at once.
inline int deep_of(const Job4& job) { return job.group % 64 ? 32 : 64; }
inline long tiles_of(const Job4& job) { return job.rows >= TILE_MAX_ROWS ? (job.rows + 31) / 32 : 0; }  // of gathered rows

#else

inline long tiles_of(const Job4&) { return 0; }

#endif

// Panels [panel0, panel1) by the calling thread alone; x: gathered rows, if there are tiles of them.
template <bool GATED>
void panels_alone(const Job4& job, long panel0, long panel1, [[maybe_unused]] const int8_t* x) {
#ifdef QUIRE_AMX
  if (tiles_of(job)) return by_tiles<GATED>(job, panel0, panel1, x, deep_of(job));
  if (job.rows > 16) return by_few_tiles<GATED, true>(job, panel0, panel1, deep_of(job));
  if (job.rows >= TILE_MIN_ROWS) return by_few_tiles<GATED, false>(job, panel0, panel1, deep_of(job));
#endif
  by_registers<GATED>(job, panel0, panel1);
}

inline void gather_tiles([[maybe_unused]] const Job4& job, [[maybe_unused]] long first, [[maybe_unused]] long end,
                         [[maybe_unused]] int8_t* x) {
#ifdef QUIRE_AMX
  for (long i = first; i < end; i++) gather(job, i * 32, deep_of(job), x + i * 32 * job.ins);
#endif
}

template <bool GATED>
void multiply(const Job4& job) {
  static thread_local Scratch<int8_t> keep;  // of the calling thread
  const long panels = job.outs / 32, tiles = tiles_of(job);
  int8_t* x = tiles ? keep.at_least(tiles * 32 * job.ins) : nullptr;
  each_of(tiles, true, [&](long tile) { gather_tiles(job, tile, tile + 1, x); });
  in_shares(true, [&](long t, long team) {
    panels_alone<GATED>(job, panels * t / team, panels * (t + 1) / team, x);
  });
}

// Quantizes N groups of a row of x to signed bytes, with the largest of each at 127. Several run interleaved: one alone waits for
// its maximum, a division and its sum.
template <int N>
inline void groups_to_bytes(const bf16* x, int8_t* to, long group, float* scale, float* sum, long next) {
  Floats factor[N];
  Ints added[N];
  factors<N>(x, group, group, factor, scale, next);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) added[i] = ints(0);
  for (long k = 0; k < group; k += 16)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const Ints bytes = to_ints(widen(x + i * group + k) * factor[i]);
      added[i] = added[i] + bytes;
      store_bytes((uint8_t*)to + i * group + k, bytes);
    }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) sum[i * next] = sum_of(to_floats(added[i]));
}

// The rows of x, quantized, in memory of the calling thread.
struct Bytes {
  Scratch<int8_t> bytes;
  Scratch<Shorts> words;
  Scratch<float> scales;
  Scratch<bf16> ordered;

  static bool has_shorts(const Weight& w) {
    return std::is_same_v<NibbleDots<true>::Word, Shorts> && (w.codes || std::is_same_v<NibbleDots<false>::Word, Shorts>);
  }
  void reserve(long rows, const Weight& w) {
    bytes.at_least(rows * w.ins);
    if (has_shorts(w)) words.at_least(rows * w.ins / 4);
    scales.at_least(2 * rows * (w.ins / w.group));
  }
  Job4 job(const Weight& w, bf16* y, long y_row, long rows, int act) const {
    const long groups = w.ins / w.group;
    const void* all = has_shorts(w) ? (const void*)words.data : bytes.data;
    return {bytes.data, all, scales.data, scales.data + rows * groups, (const uint8_t*)w.data, w.scale, w.zero, w.bias,
            y, y_row, rows, w.outs, w.ins, w.group, groups, act, w.codes};
  }
  // `keep`: of the thread that quantizes this row.
  void quantize(const Weight& w, const bf16* from, long r, long rows, Scratch<bf16>& keep) const {
    const long ins = w.ins, group = w.group;
    if (w.order) {
      bf16* ordered = keep.at_least(ins);
      for (long k = 0; k < ins; k++) ordered[k] = from[w.order[k]];
      from = ordered;
    }
    int8_t* to = bytes.data + r * ins;
    float *scale = scales.data + r, *sum = scale + rows * (ins / group);
    each_four(ins / group, [&](long g, auto n) {
      groups_to_bytes<n>(from + g * group, to + g * group, group, scale + g * rows, sum + g * rows, rows);
    });
    for (long k = 0; has_shorts(w) && k < ins / 4; k++) words.data[r * (ins / 4) + k] = shorts_of(to + k * 4);
  }
};

}  // namespace

void Weight::panels_int4(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act, long panel0, long panel1) const {
  static thread_local Bytes keep;
  static thread_local Scratch<int8_t> keep_tiles;
  keep.reserve(rows, *this);
  for (long r = 0; r < rows; r++) keep.quantize(*this, x + r * x_row, r, rows, keep.ordered);
  const Job4 job = keep.job(*this, y, y_row, rows, act);
  const long tiles = tiles_of(job);
  int8_t* gathered = tiles ? keep_tiles.at_least(tiles * 32 * ins) : nullptr;
  gather_tiles(job, 0, tiles, gathered);
  is_gated(act) ? panels_alone<true>(job, panel0, panel1, gathered) : panels_alone<false>(job, panel0, panel1, gathered);
}

}  // namespace quire

using namespace quire;

// ins and group are multiples of 32; `codes`: the byte of each nibble, or null; `order`: the input at each place, or null.
EXPORT void quire_linear_int4(const bf16* x, long x_row, const uint8_t* w, const float* w_scale, const uint8_t* w_zero,
                              const uint8_t* codes, const int32_t* order, const bf16* bias, bf16* y, long y_row, long rows,
                              long outs, long ins, long group, int act) {
  static thread_local Bytes shared;  // of the calling thread
  const Weight weight{w, w_scale, nullptr, w_zero, codes, order, nullptr, bias, outs, ins, group};
  shared.reserve(rows, weight);
  const Bytes& bytes = shared;  // in the team, `shared` is each thread's own
  each_of(rows, rows > 1 && rows * ins >= 8192, [&](long r) {
    static thread_local Scratch<bf16> keep;
    bytes.quantize(weight, x + r * x_row, r, rows, keep);
  });
  const Job4 job = bytes.job(weight, y, y_row, rows, act);
  is_gated(act) ? multiply<true>(job) : multiply<false>(job);
}

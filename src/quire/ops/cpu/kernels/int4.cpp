// y[M, N] = x[M, K] * w[N, K]^T with weights of four bits in groups of inputs, each with a scale and a zero point.
//
// Packed: [N / 32] panels of K / 4 lines (nibbles.h); scales and zero points [N / 32][K / group][32]. A panel of a gated weight
// has 16 outputs of either half.
//
// Each group of a row of x is made to signed bytes with a scale of its own. Sums of a group are exact integers; groups are
// added in their order, each by the same float instructions whatever path summed it, so that a row's bits do not depend on the
// rows beside it.
#include "exports.h"
#include "nibbles.h"

namespace quire {

namespace {

constexpr long FAR = 16384;  // bytes ahead that weights are fetched: all of them, else 32 rows with AMX take 30 ms instead of 24

struct Job4 {
  const int8_t* x;      // [M, K]
  const Word* words;    // the same as words, [M, K / 4]
  const float *x_scale, *x_sum;  // [groups, M]
  const uint8_t* w;
  const float* w_scale;
  const uint8_t* w_zero;
  const bf16* bias;  // [N], or null
  bf16* y;
  long y_row, rows, outs, ins, group, groups;

  const uint8_t* panel(long p) const { return w + p * ins * 16; }
};

// What 16 outputs of a panel have for a group.
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
  if (GATED)
    store(y, rounded(silu_of(rounded(left))) * rounded(right));
  else
    store(y, left, right);
}

// N rows by TILES x 16 outputs of a panel; total: [N][32].
template <int N, int FIRST, int TILES>
__attribute__((noinline)) void panel_of_rows(const Job4& job, long row, long panel, float* total) {
  const uint8_t* w = job.panel(panel);
  const long lines = job.group / 4, step = job.ins / 4;
  const Word* x = job.words + row * step;
  for (long g = 0; g < job.groups; g++) {
    Ints sums[N][TILES];
#pragma GCC unroll 16
    for (int m = 0; m < N; m++)
#pragma GCC unroll 2
      for (int t = 0; t < TILES; t++) sums[m][t] = ints(0);
    for (long i = 0; i < lines; i++, w += 64, x++) {
      fetch(w + FAR);
      const Ints line = load((const int32_t*)w);
      Part parts[TILES];
#pragma GCC unroll 2
      for (int t = 0; t < TILES; t++) parts[t] = part_of(line, FIRST + t);
#pragma GCC unroll 16
      for (int m = 0; m < N; m++)
#pragma GCC unroll 2
        for (int t = 0; t < TILES; t++) sums[m][t] = meet(sums[m][t], parts[t], x[m * step]);
    }
    const float *x_scale = job.x_scale + g * job.rows + row, *x_sum = job.x_sum + g * job.rows + row;
#pragma GCC unroll 2
    for (int t = 0; t < TILES; t++) {
      const Outputs outputs(job, panel, g, FIRST + t);
#pragma GCC unroll 16
      for (int m = 0; m < N; m++) outputs.add(sums[m][t], x_scale[m], x_sum[m], total + m * 32 + (FIRST + t) * 16);
    }
  }
}

template <int N>
inline void panel_of_rows(const Job4& job, long row, long panel, float* total) {
  memset(total, 0, N * 32 * sizeof(float));
  if constexpr (N * 2 * (16 / LEAF) <= NIBBLE_SUMS) {
    panel_of_rows<N, 0, 2>(job, row, panel, total);
  } else {
    panel_of_rows<N, 0, 1>(job, row, panel, total);
    panel_of_rows<N, 1, 1>(job, row, panel, total);
  }
}

inline void panel_of_rows(int rows, const Job4& job, long row, long panel, float* total) {
  switch (rows) {
#define CASE(n) \
  case n: return panel_of_rows<n>(job, row, panel, total);
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

constexpr long SOME = 4, MANY = 17;  // rows, from which on tiles are faster, and from which on 32 rows of them

// Up to 16 rows. Half of the tiles' time is what goes on beside them, so no more is done for a line than to part it: zero points
// come off the sums, as by registers, and a group is finished while the next is multiplied.
template <bool GATED>
void by_few_tiles(const Job4& job, long panel0, long panel1, int deep) {
  alignas(64) int8_t bytes[2][2][16 * 64];
  alignas(64) int32_t sums[2][16 * 32];
  alignas(64) float total[16 * 32];
  const int rows = (int)job.rows;
  const long pieces = job.group / deep;
  const auto part = [&](const uint8_t* w, int8_t(*to)[16 * 64]) {
    for (int i = 0; i < deep / 4; i++, w += 64) {
      fetch(w + FAR);
      const Ints line = load((const int32_t*)w);
      store((int32_t*)(to[0] + i * 64), line & 0x0f0f0f0f);
      store((int32_t*)(to[1] + i * 64), logical_right(line, 4) & 0x0f0f0f0f);
    }
  };
  configure_nibbles(deep, rows);
  for (long panel = panel0; panel < panel1; panel++) {
    memset(total, 0, rows * 32 * sizeof(float));
    const auto add = [&](long g) {
      const Outputs left(job, panel, g, 0), right(job, panel, g, 1);
      for (int r = 0; r < rows; r++) {
        const long at = g * job.rows + r;
        const int32_t* found = sums[g % 2] + r * 32;
        left.add(load(found), job.x_scale[at], job.x_sum[at], total + r * 32);
        right.add(load(found + 16), job.x_scale[at], job.x_sum[at], total + r * 32 + 16);
      }
    };
    const uint8_t* w = job.panel(panel);
    const int8_t* x = job.x;
    part(w, bytes[0]);
    long turn = 0;
    for (long g = 0; g < job.groups; g++) {
      begin_sums();
      for (long i = 0; i < pieces; i++, x += deep, turn ^= 1) {
        w += deep * 16;
        if (x + deep < job.x + job.ins) part(w, bytes[turn ^ 1]);
        meet_few(x, job.ins, bytes[turn][0], bytes[turn][1]);
      }
      end_sums(sums[g % 2]);
      if (g) add(g - 1);
    }
    add(job.groups - 1);
    for (int r = 0; r < rows; r++) finish<GATED>(job, r, panel, total + r * 32);
  }
  end_tiles();
}

// Two tiles of signed bytes, zero points taken off, from the lines of `deep` inputs.
inline void unpack(const uint8_t* w, const uint8_t* zero, int deep, int8_t* to) {
  const Ints high = ints((int32_t)0x80808080);  // keeps a byte's borrow in it
  const auto four = [](const uint8_t* p) { return widen(p) * ints(0x01010101); };
  const Ints left = four(zero), right = four(zero + 16);
  for (int i = 0; i < deep / 4; i++) {
    const Ints line = load((const int32_t*)(w + i * 64));
    fetch(w + i * 64 + FAR);
    store((int32_t*)(to + i * 64), wrapping_minus(part_of(line, 0) | high, left) ^ high);
    store((int32_t*)(to + 16 * deep + i * 64), wrapping_minus(part_of(line, 1) | high, right) ^ high);
  }
}

// x as [rows / 32][K / deep][2][16][deep]; rows that are not there are zeros.
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

// Zero points are off already: the same integers as by registers, and the same float instructions after them.
inline void add_tiles(const Job4& job, long row, long panel, long g, const int32_t* sums, float* total) {
  const float* w_scale = job.w_scale + (panel * job.groups + g) * 32;
  const Floats left = load(w_scale), right = load(w_scale + 16);
  const long rows = std::min<long>(32, job.rows - row);
  const float* scale = job.x_scale + g * job.rows + row;
  for (long r = 0; r < rows; r++, sums += 32, total += 32, scale++) {
    const Floats x_scale = floats(*scale);
    store(total, fma(to_floats(load(sums)), left * x_scale, load(total)));
    store(total + 16, fma(to_floats(load(sums + 16)), right * x_scale, load(total + 16)));
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
          unpack(job.panel(panel) + k * 16, zero, deep, bytes + (k - k0) * 32);
        }
        for (long m = m0; m < m1; m += 32)
          for (long k = k0, g = k0 / job.group; k < k1; k += job.group, g++) {
            meet_tiles(x + m * job.ins + k * 32, bytes + (k - k0) * 32, job.group / deep, deep, sums);
            add_tiles(job, m, panel, g, sums, total + (m - m0) * 32);
          }
      }
      for (long r = m0; r < std::min(job.rows, m1); r++) finish<GATED>(job, r, panel, total + (r - m0) * 32);
    }
  }
  end_tiles();
}

#endif

template <bool GATED>
void multiply(const Job4& job) {
  const long panels = job.outs / 32;
#ifdef QUIRE_AMX
  static thread_local Scratch<int8_t> keep;  // of who calls
  const long tiles = (job.rows + 31) / 32;
  const int deep = job.group % 64 ? 32 : 64;
  int8_t* x = job.rows >= MANY ? keep.at_least(tiles * 32 * job.ins) : nullptr;
#endif
#pragma omp parallel
  {
    const long t = omp_get_thread_num(), team = omp_get_num_threads();
    const long panel0 = panels * t / team, panel1 = panels * (t + 1) / team;
#ifdef QUIRE_AMX
    if (x) {
      for (long i = tiles * t / team; i < tiles * (t + 1) / team; i++) gather(job, i * 32, deep, x + i * 32 * job.ins);
#pragma omp barrier
      by_tiles<GATED>(job, panel0, panel1, x, deep);
    } else if (job.rows >= SOME) {
      by_few_tiles<GATED>(job, panel0, panel1, deep);
    } else
#endif
      by_registers<GATED>(job, panel0, panel1);
  }
}

// A group of a row of x as signed bytes, the largest 127 away from 0.
inline void group_to_bytes(const bf16* x, int8_t* to, long group, float* scale, float* sum) {
  Floats most = floats(0.f);
  for (long k = 0; k < group; k += 16) most = max(most, magnitude(widen(x + k)));
  const float top = max_of(most);
  const Floats factor = floats(top > 0 ? 127.f / top : 0.f);
  Ints added = ints(0);
  for (long k = 0; k < group; k += 16) {
    const Ints bytes = to_ints(widen(x + k) * factor);
    added = added + bytes;
    store_bytes((uint8_t*)to + k, bytes);
  }
  *scale = top / 127.f;
  *sum = sum_of(to_floats(added));
}

}  // namespace

}  // namespace quire

using namespace quire;

// ins and group are multiples of 32; `order`: the input that stands at each place, or null.
EXPORT void quire_linear_int4(const bf16* x, long x_row, const uint8_t* w, const float* w_scale, const uint8_t* w_zero,
                              const int32_t* order, const bf16* bias, bf16* y, long y_row, long rows, long outs, long ins,
                              long group, int gated) {
  static thread_local Scratch<int8_t> keep_bytes;
  static thread_local Scratch<Word> keep_words;
  static thread_local Scratch<float> keep_scales;  // of who calls
  const long groups = ins / group;
  int8_t* bytes = keep_bytes.at_least(rows * ins);
  Word* words = WORDS_ARE_BYTES ? (Word*)bytes : keep_words.at_least(rows * ins / 4);
  float *scales = keep_scales.at_least(2 * rows * groups), *sums = scales + rows * groups;
#pragma omp parallel for if (rows > 1 && rows * ins >= 8192) schedule(static)
  for (long r = 0; r < rows; r++) {
    static thread_local Scratch<bf16> keep_row;
    const bf16* from = x + r * x_row;
    if (order) {
      bf16* ordered = keep_row.at_least(ins);
      for (long k = 0; k < ins; k++) ordered[k] = from[order[k]];
      from = ordered;
    }
    for (long g = 0; g < groups; g++)
      group_to_bytes(from + g * group, bytes + r * ins + g * group, group, scales + g * rows + r, sums + g * rows + r);
    if (WORDS_ARE_BYTES) continue;
    for (long k = 0; k < ins / 4; k++) words[r * (ins / 4) + k] = word_of(bytes + r * ins + k * 4);
  }
  const Job4 job{bytes, words, scales, sums, w, w_scale, w_zero, bias, y, y_row, rows, outs, ins, group, groups};
  gated ? multiply<true>(job) : multiply<false>(job);
}

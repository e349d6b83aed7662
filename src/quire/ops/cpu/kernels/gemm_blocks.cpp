// y[M, N] = x[M, K] * w[N, K]^T with the blocks of GGUF files: integers of 4, 5, 6 or 8 bits, in groups that share a scale.
//
// A weight consists of parts, each of one form, in panels of 32 outputs. A panel is a sequence of records, one for each block of
// inputs (32 or 256):
//
//   scales of the block, of 32 outputs, float16; likewise the minima of a form that has them
//   of each group, if a block has several: 32 factors of the scale; then 32 factors of the minimum
//   of each 32 inputs: 8 lines of low halves (int4_dot.h), then the other bits of all; or 16 lines of bytes, of 16 outputs each
//
// The 4 bits of some forms are the number of a byte in a table (block_forms.h).
//
// w = scale * (q - ZERO) - minimum. Each 32 inputs of a row of x are quantized to signed bytes with a scale of their own. Sums of a
// group are exact integers; groups are added in order, with the same float instructions in every path, so a row's bits do not depend
// on the other rows. A record is unpacked into the L1 cache, once for a block of rows.
#include "block_dot.h"
#include "block_forms.h"
#include "exports.h"
#include "int4_dot.h"
#include "layer.h"
#include "norm_rope_act.h"
#include "quantize_activations.h"

namespace quire {

namespace {

constexpr long FETCH_AHEAD = 8192;  // bytes

// A record, unpacked: of each 32 inputs 8 lines of 16 outputs, then those of 16 further outputs.
template <class F>
struct Record {
  alignas(64) uint8_t bytes[F::CHUNKS * 1024];
  alignas(64) float scale[F::GROUPS * 32], minimum[F::GROUPS * 32];
  const Codes* codes;
  Ints table;  // its bytes, in every 16
  explicit Record(long form) : codes(F::LOOKUP ? CODES + form - FIRST_CODES : nullptr) {
    int32_t words[16] = {};
    for (int i = 0; F::LOOKUP && i < 16; i++) memcpy(words + i, codes->bytes + i % 4 * 4, 4);
    table = load(words);
  }
};

inline Floats from_half(const uint16_t* p) {  // without subnormal numbers of float32, which are slow
  const Ints bits = widen_bits(p), fraction = bits & 1023, exponent = (bits >> 10) & 31;
  const Mask normal = less(ints(0), exponent);
  const Floats whole = to_floats(select(normal, fraction | 1024, fraction));
  const Floats power = as_floats((select(normal, exponent, ints(1)) + ints(127 - 25)) << 23);
  return as_floats(as_ints(whole * power) | ((bits & 0x8000) << 16));
}

template <class F>
inline void unpack_scales(const uint8_t* w, Record<F>& to) {
  const uint8_t* factors = w + (F::MINIMA ? 128 : 64);
#pragma GCC unroll 2
  for (int t = 0; t < 32; t += 16) {
    const uint16_t* first = (const uint16_t*)w + t;
    Floats scale = F::LOOKUP && to.codes->wide ? widen((const bf16*)first) : from_half(first);
    if (F::LOOKUP) scale = scale * floats(to.codes->unit);
    const Floats minimum = F::MINIMA ? from_half((const uint16_t*)(w + 64) + t) : scale;
    for (int g = 0; g < F::GROUPS; g++) {
      const uint8_t* at = factors + g * 32 + t;
      Floats factor = floats(1.f), least = factor;
      if (F::GROUPS > 1) factor = to_floats(F::MINIMA ? widen(at) : widen((const int8_t*)at));
      if (F::GROUPS > 1 && F::MINIMA) least = to_floats(widen(at + F::FACTORS));
      store(to.scale + g * 32 + t, scale * factor);
      if (F::MINIMA) store(to.minimum + g * 32 + t, minimum * least);
    }
  }
}

// Line i of a chunk of 32 inputs: four inputs of 16 outputs, or of the 16 further ones.
template <class F>
inline Ints line_of(const uint8_t* chunk, int i, int part, bool moved, Ints table) {
  if constexpr (F::LOOKUP) {
    const Ints line = bytes_at(table, logical_right(load((const int32_t*)(chunk + i * 64)), part * 4) & 0x0f0f0f0f);
    return moved ? line ^ ints((int32_t)0x80808080) : line;
  } else if constexpr (F::BITS == 8) {
    const Ints line = load((const int32_t*)(chunk + part * 512 + i * 64));
    return moved ? line ^ ints((int32_t)0x80808080) : line;
  } else {
    constexpr int MORE = F::BITS - 4, EACH = MORE ? 4 / MORE : 1, MASK = ((1 << MORE) - 1) * 0x01010101;  // EACH: lines whose bits a line holds
    const Ints low = logical_right(load((const int32_t*)(chunk + i * 64)), part * 4) & 0x0f0f0f0f;
    if constexpr (MORE == 0) return low;
    const Ints high = load((const int32_t*)(chunk + 512 + i / EACH * 64));
    return low | ((logical_right(high, (i % EACH * 2 + part) * MORE) & MASK) << 4);
  }
}

template <class F>
inline void unpack(const uint8_t* w, Record<F>& to, bool moved) {
  uint8_t* bytes = to.bytes;
  for (int c = 0; c < F::CHUNKS; c++, w += F::CHUNK, bytes += 1024) {
    for (long at = 0; at < F::CHUNK; at += LINE) fetch(w + FETCH_AHEAD + at);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) store((int32_t*)(bytes + part * 512 + i * 64), line_of<F>(w, i, part, moved, to.table));
  }
}

// The quantized rows of x.
struct Activations {
  const int8_t* bytes;  // [M, K]
  const float *scale, *sum, *half_sum;  // [K / 32, M]; the last: of 16 inputs, [K / 16, M]
  long rows, ins;
};

// total += scale * scale of x * (sums - zero * sum of x) - minimum * scale of x * sum of x
template <class F>
inline void add_group(Ints sums, float zero, Floats scale, Floats minimum, float x_scale, float x_sum, float* total) {
  const Floats exact = fnma(floats(zero), floats(x_sum), to_floats(sums));
  const Floats more = fma(exact, scale * floats(x_scale), load(total));
  store(total, F::MINIMA ? fnma(minimum, floats(x_scale * x_sum), more) : more);
}

// Where the numbers of x are for a group of the 32 inputs from `input` on; `row`: of the first row.
template <class F>
struct Group {
  const float *x_scale, *x_sum;
  Group(const Activations& x, long input, int half, long row) {
    x_scale = x.scale + input / 32 * x.rows + row;
    x_sum = F::GROUP == 16 ? x.half_sum + (input / 16 + half) * x.rows + row : x.sum + input / 32 * x.rows + row;
  }
};

// N rows by 32 outputs and a record, whose first input is `first`; total: [N][32]. With PACKED, lines are unpacked as they are used:
// for few rows. `packed`: behind the header.
template <class F, int N, bool PACKED>
__attribute__((noinline)) void record_of_rows(const Activations& x, const Record<F>& w, const uint8_t* packed, long first, long row,
                                              float* total) {
  constexpr int LINES = F::GROUP / 4, AT_ONCE = std::min(LINES, LINES_AT_ONCE<F::BITS>), PARTS = PACKED && N == 1 ? 2 : BLOCK_PARTS;
  for (int c = 0; c < F::CHUNKS; c++) {
    const uint8_t* chunk = packed + c * F::CHUNK;
    for (long at = 0; PACKED && at < F::CHUNK; at += LINE) fetch(chunk + FETCH_AHEAD + at);
    for (int half = 0; half < 32 / F::GROUP; half++) {
      const long input = first + c * 32;
      const int8_t* from = x.bytes + row * x.ins + input + half * 16;
      const Group<F> group(x, input, half, row);
      const long at_group = (c * (32 / F::GROUP) + half) * 32;
      const float *scale = w.scale + at_group, *minimum = w.minimum + (F::MINIMA ? at_group : 0);
#pragma GCC unroll 2
      for (int t0 = 0; t0 < 2; t0 += PARTS) {
        const uint8_t* lines = w.bytes + c * 1024 + t0 * 512 + half * 256;
        Ints sums[N][PARTS];
#pragma GCC unroll 4
        for (int i = 0; i < LINES; i += AT_ONCE) {
          Ints partial[N][PARTS];
#pragma GCC unroll 16
          for (int m = 0; m < N; m++)
#pragma GCC unroll 2
            for (int t = 0; t < PARTS; t++) partial[m][t] = ints(0);
#pragma GCC unroll LINES_UNROLLED
          for (int j = i; j < i + AT_ONCE; j++) {
            Ints line[PARTS];
#pragma GCC unroll 2
            for (int t = 0; t < PARTS; t++)
              line[t] = PACKED ? line_of<F>(chunk, half * 4 + j, t0 + t, BYTES_ARE_MOVED, w.table) : load((const int32_t*)(lines + t * 512 + j * 64));
#pragma GCC unroll 16
            for (int m = 0; m < N; m++) {
              int32_t word;
              memcpy(&word, from + m * x.ins + j * 4, sizeof(word));
#pragma GCC unroll 2
              for (int t = 0; t < PARTS; t++) partial[m][t] = add_dots<F::BITS>(partial[m][t], line[t], ints(word));
            }
          }
#pragma GCC unroll 16
          for (int m = 0; m < N; m++)
#pragma GCC unroll 2
            for (int t = 0; t < PARTS; t++) sums[m][t] = (i ? sums[m][t] : ints(0)) + total_of<F::BITS>(partial[m][t]);
        }
#pragma GCC unroll 2
        for (int t = 0; t < PARTS; t++) {
          const long at = (t0 + t) * 16;
          const Floats scales = load(scale + at), minima = load((F::MINIMA ? minimum : scale) + at);
#pragma GCC unroll 16
          for (int m = 0; m < N; m++)
            add_group<F>(sums[m][t], F::zero(BYTES_ARE_MOVED), scales, minima, group.x_scale[m], group.x_sum[m], total + m * 32 + at);
        }
      }
    }
  }
}

template <class F>
inline void record_of_rows(int rows, const Activations& x, const Record<F>& w, long first, long row, float* total) {
  switch (rows) {
#define CASE(n) \
  case n: return record_of_rows<F, n, false>(x, w, nullptr, first, row, total);
    CASE(1) CASE(2)
#if defined(__AVX2__)
    CASE(3) CASE(4)
#endif
#if defined(__AVX512F__)
    CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
#endif
#if defined(__AVX512VNNI__)
    CASE(11) CASE(12)
#endif
#undef CASE
  }
}

constexpr long PACKED_ROWS = BLOCK_ROWS < 4 ? BLOCK_ROWS : 4;  // the most rows for which lines are unpacked as they are used

template <class F>
inline void packed_of_rows(int rows, const Activations& x, const Record<F>& w, const uint8_t* packed, long first, long row, float* total) {
  switch (rows) {
    case 1: return record_of_rows<F, 1, true>(x, w, packed, first, row, total);
    case 2: return record_of_rows<F, 2, true>(x, w, packed, first, row, total);
#if defined(__AVX2__)
    case 3: return record_of_rows<F, 3, true>(x, w, packed, first, row, total);
    case 4: return record_of_rows<F, 4, true>(x, w, packed, first, row, total);
#endif
  }
}

#ifdef QUIRE_AMX

constexpr long BLOCK_TILE_ROWS = 5;  // rows, from which on tiles are faster

// Up to 16 rows, or up to 32 with LOWER, by tiles: the same integers as in registers, followed by the same float instructions.
template <class F, bool LOWER>
inline void record_by_tiles(const Activations& x, const Record<F>& w, long first, long row, long rows, float* total) {
  alignas(64) int32_t sums[32 * 32];
  for (int c = 0; c < F::CHUNKS; c++)
    for (int half = 0; half < 32 / F::GROUP; half++) {
      const uint8_t* lines = w.bytes + c * 1024 + half * 256;
      const long input = first + c * 32;
      begin_sums<LOWER>();
      multiply_few<LOWER>(x.bytes + row * x.ins + input + half * 16, x.ins, (const int8_t*)lines, (const int8_t*)lines + 512);
      end_sums<LOWER>(sums);
      const Group<F> group(x, input, half, row);
      for (int t = 0; t < 32; t += 16) {
        const long at_group = (c * (32 / F::GROUP) + half) * 32 + t;
        const Floats scale = load(w.scale + at_group), minimum = F::MINIMA ? load(w.minimum + at_group) : scale;
        for (long m = 0; m < rows; m++)
          add_group<F>(load(sums + m * 32 + t), F::zero(false), scale, minimum, group.x_scale[m], group.x_sum[m], total + m * 32 + t);
      }
    }
}

#endif

// total[rows][32] of rows from `first` on and a panel.
template <class F>
void panel_of_rows(long form, const Activations& x, const uint8_t* w, long first, long rows, float* total) {
  Record<F> record(form);
  memset(total, 0, rows * 32 * sizeof(float));
#ifdef QUIRE_AMX
  const bool tiles = rows >= BLOCK_TILE_ROWS;
  if (tiles) configure_nibbles(F::GROUP);
#else
  constexpr bool tiles = false;
#endif
  const long parts = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (long k = 0; k < x.ins; k += F::BLOCK, w += F::RECORD) {
    for (long at = 0; at < F::HEADER; at += LINE) fetch(w + FETCH_AHEAD + at);
    unpack_scales(w, record);
    if (!tiles && rows <= PACKED_ROWS) {
      packed_of_rows<F>((int)rows, x, record, w + F::HEADER, k, first, total);
      continue;
    }
    unpack<F>(w + F::HEADER, record, BYTES_ARE_MOVED && !tiles);
#ifdef QUIRE_AMX
    for (long m = 0; tiles && m < rows; m += 32) {
      const long count = std::min(32L, rows - m);
      count > 16 ? record_by_tiles<F, true>(x, record, k, first + m, count, total + m * 32)
                 : record_by_tiles<F, false>(x, record, k, first + m, count, total + m * 32);
    }
    if (tiles) continue;
#endif
    for (long i = 0; i < parts; i++) {
      const long a = rows * i / parts, e = rows * (i + 1) / parts;
      record_of_rows<F>((int)(e - a), x, record, k, first + a, total + a * 32);
    }
  }
#ifdef QUIRE_AMX
  if (tiles) end_tiles();
#endif
}

struct BlockPart {  // as quantization/gguf_blocks.py writes it, behind the number of parts
  int64_t offset, stride, form, panels;
};

struct BlockJob {
  Activations x;
  const uint8_t* data;
  const BlockPart* parts;
  const bf16* bias;
  bf16* y;
  long y_row, outs;
  int act;

  Floats biased(const float* total, long out) const { return bias ? load(total) + widen(bias + out) : load(total); }
  void panel(const BlockPart& part, long panel, long first, long rows, float* total) const {
    const uint8_t* w = data + part.offset + panel * part.stride;
    with_form(part.form, [&](auto form) { panel_of_rows<decltype(form)>(part.form, x, w, first, rows, total); });
  }
  void finish(long r, long out, const float* total) const {
    store(y + r * y_row + out, ungated(biased(total, out), act), ungated(biased(total + 16, out + 16), act));
  }
  void finish_gated(long r, long out, const float* gate, const float* other) const {
    for (int t = 0; t < 32; t += 16) {
      const Floats left = rounded(biased(gate + t, out + t)), right = rounded(biased(other + t, outs / 2 + out + t));
      store(y + r * y_row + out + t, gated(left, right, act));
    }
  }
};

// Panels [panel0, panel1) by the calling thread alone; of a gated weight a panel is one of each half.
void panels_alone(const BlockJob& job, long panel0, long panel1) {
  static thread_local Scratch<float> keep;
  const bool pairs = is_gated(job.act);
  const long block = std::max<long>(48, (512 << 10) / (job.x.ins + 256) / BLOCK_ROWS * BLOCK_ROWS);
  float *total = keep.at_least(2 * block * 32), *other = total + block * 32;
  for (long m = 0; m < job.x.rows; m += block) {
    const long rows = std::min(block, job.x.rows - m);
    const BlockPart* part = job.parts;
    long before = 0;  // panels of the parts before
    for (long p = panel0; p < panel1; p++) {
      while (!pairs && p - before >= part->panels) before += part->panels, part++;
      job.panel(*part, p - before, m, rows, total);
      if (pairs) job.panel(part[1], p, m, rows, other);
      for (long r = 0; r < rows; r++)
        pairs ? job.finish_gated(m + r, p * 32, total + r * 32, other + r * 32) : job.finish(m + r, p * 32, total + r * 32);
    }
  }
}

// Quantizes N times 32 values of a row; `next`: from group to group of scales and sums.
template <int N>
inline void chunks_to_bytes(const bf16* x, int8_t* to, float* scale, float* sum, float* half_sum, long next) {
  Floats factor[N];
  factors<N>(x, 32, 32, factor, scale, next);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    float halves[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const Ints bytes = to_ints(widen(x + i * 32 + h * 16) * factor[i]);
      store_bytes((uint8_t*)to + i * 32 + h * 16, bytes);
      half_sum[(2 * i + h) * next] = halves[h] = sum_of(to_floats(bytes));
    }
    sum[i * next] = halves[0] + halves[1];
  }
}

// Memory for the rows of x; tiles read up to 31 rows more.
struct ActivationMemory {
  Scratch<int8_t> bytes;
  Scratch<float> scales;

  Activations reserve(long rows, long ins) {
    bytes.at_least((rows + 32) * ins);
    const float* scale = scales.at_least(4 * rows * (ins / 32));
    return {bytes.data, scale, scale + rows * (ins / 32), scale + 2 * rows * (ins / 32), rows, ins};
  }
};

void quantize_row(const Activations& a, const bf16* x, long r) {
  each_four(a.ins / 32, [&](long g, auto n) {
    float *scale = (float*)a.scale + g * a.rows + r, *sum = (float*)a.sum + g * a.rows + r;
    chunks_to_bytes<n>(x + g * 32, (int8_t*)a.bytes + r * a.ins + g * 32, scale, sum, (float*)a.half_sum + 2 * g * a.rows + r, a.rows);
  });
}

}  // namespace

void Weight::panels_blocks(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act, long panel0, long panel1) const {
  static thread_local ActivationMemory keep;
  const Activations a = keep.reserve(rows, ins);
  for (long r = 0; r < rows; r++) quantize_row(a, x + r * x_row, r);
  const long each = is_gated(act) ? 2 : 1;
  panels_alone({a, (const uint8_t*)data, (const BlockPart*)(blocks + 1), bias, y, y_row, outs, act}, panel0 / each, panel1 / each);
}

}  // namespace quire

using namespace quire;

// ins is a multiple of the blocks' inputs, outs of 32, or of 64 if gated. `blocks`: the number of parts, and the parts.
EXPORT void quire_linear_blocks(const bf16* x, long x_row, const uint8_t* w, const int64_t* blocks, const bf16* bias, bf16* y,
                                long y_row, long rows, long outs, long ins, int act) {
  static thread_local ActivationMemory keep;  // of the calling thread
  const Activations a = keep.reserve(rows, ins);
#pragma omp parallel for if (rows > 1 && rows * ins >= 8192) schedule(static)
  for (long r = 0; r < rows; r++) quantize_row(a, x + r * x_row, r);
  if (act == HALVES) act = NO_ACTIVATION;  // the order of its outputs
  const BlockJob job{a, w, (const BlockPart*)(blocks + 1), bias, y, y_row, outs, act};
  const long panels = outs / (is_gated(act) ? 64 : 32);
#pragma omp parallel
  {
    const long t = omp_get_thread_num(), team = omp_get_num_threads();
    panels_alone(job, panels * t / team, panels * (t + 1) / team);
  }
}

// Rows of a weight of one part: the lookup in an embedding table.
EXPORT void quire_block_rows(const uint8_t* w, const int64_t* blocks, const int64_t* ids, bf16* y, long rows, long ins) {
  const BlockPart& part = *(const BlockPart*)(blocks + 1);
#pragma omp parallel for if (rows > 1) schedule(static)
  for (long r = 0; r < rows; r++)
    with_form(part.form, [&](auto form) {
      using F = decltype(form);
      Record<F> record(part.form);
      float values[F::BLOCK];
      const long out = ids[r] % 32;
      const uint8_t* from = w + part.offset + ids[r] / 32 * part.stride;
      for (long k = 0; k < ins; k += F::BLOCK, from += F::RECORD) {
        unpack_scales(from, record);
        unpack<F>(from + F::HEADER, record, false);
        for (int i = 0; i < F::BLOCK; i++) {
          const uint8_t byte = record.bytes[i / 32 * 1024 + out / 16 * 512 + i % 32 / 4 * 64 + out % 16 * 4 + i % 4];
          const float q = (F::BITS == 8 ? (float)(int8_t)byte : (float)byte) - F::zero(false);
          const long at = i / F::GROUP * 32 + out;
          values[i] = record.scale[at] * q - (F::MINIMA ? record.minimum[at] : 0.f);
        }
        for (int i = 0; i < F::BLOCK; i += 16) store(y + r * ins + k + i, load(values + i));
      }
    });
}

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
#include "block_tiles.h"
#include "exports.h"
#include "layer.h"
#include "norm_rope_act.h"
#include "quantize_activations.h"
#include "team.h"

namespace quire {

namespace {

// N rows by 32 outputs and a record, whose first input is `first`; total: [N][32]. With PACKED, lines are unpacked as they are used:
// for few rows; F is the weight's form then, otherwise its Products. `packed`: the bytes after the header.
template <class F, int N, bool PACKED>
__attribute__((noinline)) void record_of_rows(const Activations& x, const Lines& w, const uint8_t* packed, long first, long row,
                                              float* total) {
  constexpr int LINES = F::GROUP / 4, AT_ONCE = std::min(LINES, LINES_AT_ONCE<F::BITS>), PARTS = PACKED && N == 1 ? 2 : BLOCK_PARTS;
  const int chunks = PACKED ? F::CHUNKS : w.chunks;
  for (int c = 0; c < chunks; c++) {
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
            add_group<F>(sums[m][t], w.zero, scales, minima, group.x_scale[m], group.x_sum[m], total + m * 32 + at);
        }
      }
    }
  }
}

template <class F>
inline void record_of_rows(int rows, const Activations& x, const Lines& w, long first, long row, float* total) {
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
inline void packed_of_rows(int rows, const Activations& x, const Lines& w, const uint8_t* packed, long first, long row, float* total) {
  switch (rows) {
    case 1: return record_of_rows<F, 1, true>(x, w, packed, first, row, total);
    case 2: return record_of_rows<F, 2, true>(x, w, packed, first, row, total);
#if defined(__AVX2__)
    case 3: return record_of_rows<F, 3, true>(x, w, packed, first, row, total);
    case 4: return record_of_rows<F, 4, true>(x, w, packed, first, row, total);
#endif
  }
}

// total[rows][32] of rows from `first` on and a panel.
template <class F>
void panel_of_rows(long form, const Activations& x, const uint8_t* w, long first, long rows, float* total) {
#ifdef QUIRE_AMX
  if (by_tiles(x.rows)) return panel_by_tiles<F>(form, x, w, first, rows, total);
#endif
  Record<F> record(form);
  const Lines lines = lines_of(record, BYTES_ARE_MOVED);
  memset(total, 0, rows * 32 * sizeof(float));
  const long parts = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (long k = 0; k < x.ins; k += F::BLOCK, w += F::RECORD) {
    for (long at = 0; at < F::HEADER; at += LINE) fetch(w + FETCH_AHEAD + at);
    unpack_scales(w, record);
    if (rows <= PACKED_ROWS) {
      packed_of_rows<F>((int)rows, x, lines, w + F::HEADER, k, first, total);
      continue;
    }
    unpack<0>(w + F::HEADER, record, BYTES_ARE_MOVED);
    for (long i = 0; i < parts; i++) {
      const long a = rows * i / parts, e = rows * (i + 1) / parts;
      record_of_rows<Products<F>>((int)(e - a), x, lines, k, first + a, total + a * 32);
    }
  }
}

struct BlockPart {  // as quantization/gguf_blocks.py writes it, after the number of parts
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
  const long block = std::max<long>(48, (512 << 10) / (job.x.ins + 256) / 48 * 48);  // of tiles and of BLOCK_ROWS
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

// Quantizes N times 32 values of a row; `to_next`: from 32 bytes to the next; `next`: from group to group of scales and sums.
template <int N>
inline void chunks_to_bytes(const bf16* x, int8_t* to, long to_next, float* scale, float* sum, float* half_sum, long next) {
  Floats factor[N];
  factors<N>(x, 32, 32, factor, scale, next);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    float halves[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const Ints bytes = to_ints(widen(x + i * 32 + h * 16) * factor[i]);
      store_bytes((uint8_t*)to + i * to_next + h * 16, bytes);
      half_sum[(2 * i + h) * next] = halves[h] = sum_of(to_floats(bytes));
    }
    sum[i * next] = halves[0] + halves[1];
  }
}

// Memory for the rows of x.
struct ActivationMemory {
  Scratch<int8_t> bytes;
  Scratch<float> scales;

  Activations reserve(long rows, long ins) {
    const long stride = by_tiles(rows) ? padded(rows) : rows, each = stride * (ins / 32);
    bytes.at_least((rows + 15) / 16 * 16 * ins);
    float* scale = scales.at_least(4 * each + 16);  // a tile reads 16 of them
    for (long i = 0; rows < stride && i < 4 * (ins / 32); i++)
      for (long r = rows; r < stride; r++) scale[i * stride + r] = 0;
    return {bytes.data, scale, scale + each, scale + 2 * each, rows, stride, ins};
  }
};

void quantize_row(const Activations& a, const bf16* x, long r) {
  const bool tiles = by_tiles(a.rows);
  const long next = tiles ? TILE_BYTES : 32;
  int8_t* to = (int8_t*)a.bytes + (tiles ? r / 16 * 16 * a.ins + r % 16 * 32 : r * a.ins);
  each_four(a.ins / 32, [&](long g, auto n) {
    float *scale = (float*)a.scale + g * a.stride + r, *sum = (float*)a.sum + g * a.stride + r;
    chunks_to_bytes<n>(x + g * 32, to + g * next, next, scale, sum, (float*)a.half_sum + 2 * g * a.stride + r, a.stride);
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
  each_of(rows, rows > 1 && rows * ins >= 8192, [&](long r) { quantize_row(a, x + r * x_row, r); });
  if (act == HALVES) act = NO_ACTIVATION;  // the order of its outputs
  const BlockJob job{a, w, (const BlockPart*)(blocks + 1), bias, y, y_row, outs, act};
  const long panels = outs / (is_gated(act) ? 64 : 32);
  in_shares(true, [&](long t, long team) {
    panels_alone(job, panels * t / team, panels * (t + 1) / team);
  });
}

// Rows of a weight of one part: the lookup in an embedding table.
EXPORT void quire_block_rows(const uint8_t* w, const int64_t* blocks, const int64_t* ids, bf16* y, long rows, long ins) {
  const BlockPart& part = *(const BlockPart*)(blocks + 1);
  each_of(rows, rows > 1, [&](long r) {
    with_form(part.form, [&](auto form) {
      using F = decltype(form);
      Record<F> record(part.form);
      float values[F::BLOCK];
      const long out = ids[r] % 32;
      const uint8_t* from = w + part.offset + ids[r] / 32 * part.stride;
      for (long k = 0; k < ins; k += F::BLOCK, from += F::RECORD) {
        unpack_scales(from, record);
        unpack<0>(from + F::HEADER, record, false);
        for (int i = 0; i < F::BLOCK; i++) {
          const uint8_t byte = record.bytes[i / 32 * 1024 + out / 16 * 512 + i % 32 / 4 * 64 + out % 16 * 4 + i % 4];
          const float q = (F::BITS == 8 ? (float)(int8_t)byte : (float)byte) - F::zero(false);
          const long at = i / F::GROUP * 32 + out;
          values[i] = record.scale[at] * q - (F::MINIMA ? record.minimum[at] : 0.f);
        }
        for (int i = 0; i < F::BLOCK; i += 16) store(y + r * ins + k + i, load(values + i));
      }
    });
  });
}

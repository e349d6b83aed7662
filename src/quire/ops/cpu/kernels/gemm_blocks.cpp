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
// w = scale * (q - ZERO) - minimum; scale and minimum are those of the block, times the group's factors. Rows of x are quantized to
// signed bytes (block_activations.h). A block's sums are exact integers; blocks are added in order, with the same float instructions in
// every path, so a row's bits do not depend on the other rows. A record is unpacked into the L1 cache, once for a block of rows.
//
//   block_rows.h    few rows, and every machine without AMX: the sums of groups in registers
//   block_tiles.h   many rows by AMX, of forms with a scale for each 32 inputs
//   block_planes.h  many rows by AMX, of forms with integer factors for 256 inputs
#include "block_planes.h"
#include "block_rows.h"
#include "block_tiles.h"
#include "exports.h"
#include "layer.h"
#include "team.h"

namespace quire {

namespace {

template <class F>
void panel_of_rows(long form, const ActivationsOf<F>& x, const uint8_t* w, long first, long rows, float* total) {
#ifdef QUIRE_AMX
  if (by_tiles(x.rows)) return panel_by_tiles<F>(form, x, w, first, rows, total);
#endif
  panel_in_registers<F>(form, x, w, first, rows, total);
}

struct BlockPart {  // as quantization/gguf_blocks.py writes it, after the number of parts
  int64_t offset, stride, form, panels;
};

struct BlockJob {
  BothActivations x;
  long rows, ins;
  const uint8_t* data;
  const BlockPart* parts;
  const bf16* bias;
  bf16* y;
  long y_row, outs;
  int act;

  Floats biased(const float* total, long out) const { return bias ? load(total) + widen(bias + out) : load(total); }
  void panel(const BlockPart& part, long panel, long first, long rows, float* total) const {
    const uint8_t* w = data + part.offset + panel * part.stride;
    with_form(part.form, [&](auto form) { panel_of_rows<decltype(form)>(part.form, x.template of<decltype(form)>(), w, first, rows, total); });
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
  const long block = std::max<long>(48, (512 << 10) / (job.ins + 256) / 48 * 48);  // of tiles and of BLOCK_ROWS
  float *total = keep.at_least(2 * block * 32), *other = total + block * 32;
  for (long m = 0; m < job.rows; m += block) {
    const long rows = std::min(block, job.rows - m);
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

// Memory of the calling thread for rows of x, in the forms that the parts of a weight need.
BothActivations activations_for(const int64_t* blocks, long rows, long ins) {
  static thread_local ActivationMemory keep;
  BothActivations found;
  const BlockPart* parts = (const BlockPart*)(blocks + 1);
  for (long i = 0; i < *blocks; i++)
    with_form(parts[i].form, [&](auto form) {
      if constexpr (decltype(form)::FACTORS)
        found.coarse = keep.coarse(rows, ins);
      else
        found.fine = keep.fine(rows, ins);
    });
  return found;
}

}  // namespace

void Weight::panels_blocks(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act, long panel0, long panel1) const {
  const BothActivations a = activations_for(blocks, rows, ins);
  for (long r = 0; r < rows; r++) a.quantize(x + r * x_row, r);
  const long each = is_gated(act) ? 2 : 1;
  panels_alone({a, rows, ins, (const uint8_t*)data, (const BlockPart*)(blocks + 1), bias, y, y_row, outs, act}, panel0 / each, panel1 / each);
}

}  // namespace quire

using namespace quire;

// ins is a multiple of the blocks' inputs, outs of 32, or of 64 if gated. `blocks`: the number of parts, and the parts.
EXPORT void quire_linear_blocks(const bf16* x, long x_row, const uint8_t* w, const int64_t* blocks, const bf16* bias, bf16* y,
                                long y_row, long rows, long outs, long ins, int act) {
  const BothActivations a = activations_for(blocks, rows, ins);
  each_of(rows, rows > 1 && rows * ins >= 8192, [&](long r) { a.quantize(x + r * x_row, r); });
  if (act == HALVES) act = NO_ACTIVATION;  // the order of its outputs
  const BlockJob job{a, rows, ins, w, (const BlockPart*)(blocks + 1), bias, y, y_row, outs, act};
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
          const float q = (F::BITS == 8 ? (float)(int8_t)byte : (float)byte) - (float)F::zero(false);
          float scale = record.scale[out], minimum = F::MINIMA ? record.minimum[out] : 0.f;
          if constexpr (F::FACTORS) {
            const uint8_t* factor = from + (F::MINIMA ? 128 : 64) + i / F::GROUP * 32 + out;
            scale *= F::MINIMA ? (float)*factor : (float)(int8_t)*factor;
            if (F::MINIMA) minimum *= (float)factor[F::FACTOR_BYTES];
          }
          values[i] = scale * q - minimum;
        }
        for (int i = 0; i < F::BLOCK; i += 16) store(y + r * ins + k + i, load(values + i));
      }
    });
  });
}

// A Mamba-2 layer, in place of a layer's attention. native/fused_mamba2_mixer.py fills it in.
#pragma once
#include "layer.h"

namespace quire {

struct Mamba2Mixer {                         // fixed once the model is loaded
  Weight in, out;                       // in: gates, values, B and C, and step sizes of all ranks' heads
  const bf16 *conv, *conv_bias, *norm;  // [channels, taps], [channels] or null, [heads * V]
  const float *bias, *a_log, *skip;     // [heads]
  bf16* conv_state;                     // [rows, taps - 1, channels]
  float* state;
  int64_t conv_step, state_step;        // from row to row
  int64_t groups, K, heads, V, taps;    // groups: of heads with one B and one C, of K states
  int64_t first_head;                   // of this rank
  int64_t norm_group, gate_first;
  float low, high, eps;                 // low, high: limits of a step size
};

// x = the layer's output; x: [tokens, out.outs].
void compute(const Mamba2Mixer& m, const Step& s, bf16* x);

}  // namespace quire

// A gated delta net, in place of a layer's attention. native/fused_delta_net.py fills it in.
#pragma once
#include "layer.h"

namespace quire {

struct DeltaNet {                  // fixed once the model is loaded
  Weight in, gates, out;           // in: queries, keys, values and output gates; gates: of writing, and inputs of the decays, of all ranks' heads
  const bf16 *conv, *norm;         // [channels, taps], [V]
  const float *bias, *a_log;       // [heads]
  bf16* conv_state;                // [rows, taps - 1, channels]
  float* state;
  int64_t conv_step, state_step;   // from row to row
  int64_t key_heads, K, heads, V, taps;
  int64_t first_head, all_heads, all_key_heads;  // of this rank; all_*: of all ranks
  int64_t interleaved;             // outputs of `in` and `gates` are in the order of the key heads
  float eps;
};

// x = the net's output; x: [tokens, out.outs].
void compute(const DeltaNet& net, const Step& s, bf16* x);

}  // namespace quire

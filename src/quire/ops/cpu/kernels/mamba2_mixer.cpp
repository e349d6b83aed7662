// A Mamba-2 layer in one call: the functions that its modules call, in their order, so the same bits.
#include "mamba2_mixer.h"

namespace quire {

void compute(const Mamba2Mixer& m, const Step& s, bf16* x) {
  static thread_local Scratch<bf16> keep_in, keep_conv, keep_normed;
  static thread_local Scratch<float> keep_out;  // of the calling thread
  const long T = s.tokens, values = m.heads * m.V, keys = m.groups * m.K, channels = values + 2 * keys, row = m.in.outs;
  bf16 *in = keep_in.at_least(T * row), *v = keep_conv.at_least(T * channels), *normed = keep_normed.at_least(T * values);
  float* out = keep_out.at_least(T * values);
  m.in.multiply(x, m.in.ins, in, row, T);
  const bf16 *steps = in + values + channels + m.first_head, *b = v + values, *c = b + keys;
  quire_causal_conv(in + values, row, 1, m.conv, m.conv_bias, m.conv_state, m.conv_step, v, channels, m.taps, 1, s.state_rows, s.starts,
                    s.rows, s.kept);
  quire_linear_recurrence(c, channels, b, channels, v, channels, steps, row, nullptr, 0, 1, m.bias, m.a_log, m.skip, m.low, m.high,
                          m.state, m.state_step, out, m.groups, m.K, m.heads, m.V, s.state_rows, s.starts, s.rows, s.kept);
  quire_gated_rms_norm(out, in, row, 1, m.norm, values == m.norm_group ? 0 : m.norm_group, normed, T, values / m.norm_group,
                       m.norm_group, m.eps, (int)m.gate_first);
  m.out.multiply(normed, values, x, m.out.all_outs(), T);
}

}  // namespace quire

// A gated delta net in one call: the functions that its modules call, in their order, so the same bits.
#include "delta_net.h"

namespace quire {

// Moves equal parts of all heads next to each other: from [heads][parts] to [parts][heads].
static void by_part(long heads, const bf16* from, long from_step, bf16* to, long to_step, long tokens, std::initializer_list<long> sizes) {
  for (long t = 0; t < tokens; t++) {
    const bf16* head = from + t * from_step;
    for (long h = 0; h < heads; h++) {
      bf16* at = to + t * to_step;
      for (const long size : sizes) {
        memcpy(at + h * size, head, size * sizeof(bf16));
        head += size, at += heads * size;
      }
    }
  }
}

void compute(const DeltaNet& net, const Step& s, bf16* x) {
  static thread_local Scratch<bf16> keep_in, keep_gates, keep_ordered, keep_conv, keep_normed;
  static thread_local Scratch<float> keep_out;  // of the calling thread
  const long T = s.tokens, keys = net.key_heads * net.K, values = net.heads * net.V, channels = 2 * keys + values;
  const long row = net.in.outs, gates_row = net.gates.outs, hidden = net.in.ins, each = net.heads / net.key_heads;
  bf16 *in = keep_in.at_least(T * row), *gates = keep_gates.at_least(T * gates_row);
  net.in.multiply(x, hidden, in, row, T);
  net.gates.multiply(x, hidden, gates, gates_row, T);
  if (net.interleaved) {
    bf16* ordered = keep_ordered.at_least(T * (row + gates_row));
    by_part(net.key_heads, in, row, ordered, row, T, {net.K, net.K, each * net.V, each * net.V});
    by_part(net.all_key_heads, gates, gates_row, ordered + T * row, gates_row, T, {each, each});
    in = ordered, gates = ordered + T * row;
  }
  const bf16 *writes = gates + net.first_head, *decays = writes + net.all_heads;
  bf16 *q = keep_conv.at_least(T * channels), *normed = keep_normed.at_least(T * values);
  float* out = keep_out.at_least(T * values);
  quire_causal_conv(in, row, 1, net.conv, nullptr, net.conv_state, net.conv_step, q, channels, net.taps, 1, s.state_rows, s.starts, s.rows, s.kept);
  quire_linear_recurrence(q, channels, q + keys, channels, q + 2 * keys, channels, decays, gates_row, writes, gates_row, 1,
                          net.bias, net.a_log, nullptr, 0.f, INFINITY, net.state, net.state_step, out, net.key_heads, net.K,
                          net.heads, net.V, s.state_rows, s.starts, s.rows, s.kept);
  quire_gated_rms_norm(out, in + channels, row, 1, net.norm, 0, normed, T, net.heads, net.V, net.eps, 0);
  net.out.multiply(normed, values, x, net.out.all_outs(), T);
}

}  // namespace quire

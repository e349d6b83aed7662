// Weights made to few bits: each within its step.
#include "harness.h"

CHECK(quantize) {
  Random random(5);
  for (long outs : {1L, 7L, 33L})
    for (long group : {16L, 32L, 128L}) {
      const long ins = 3 * group;
      const auto w = random.bf16s(outs * ins);
      Guarded<int8_t> bytes(outs * ins);
      Guarded<uint8_t> nibbles(outs * ins), zero(outs * 3);
      Guarded<float> scale(outs), scales(outs * 3);
      quire_quantize_rows(w, outs, ins, bytes, scale);
      quire_quantize_groups(w, outs, ins, group, nibbles, scales, zero);
      for (long i = 0; i < outs * ins; i++) {
        const double byte = bytes[i] * scale[i / ins], nibble = (nibbles[i] - zero[i / group]) * scales[i / group];
        comparisons++;
        if (fabs(byte - value_of(w[i])) > scale[i / ins] * 0.501 || fabs(nibble - value_of(w[i])) > scales[i / group] * 1.001)
          failures++, fprintf(stderr, "quantize: [%ld] of %g is %g, %g\n", i, value_of(w[i]), byte, nibble);
      }
    }
}

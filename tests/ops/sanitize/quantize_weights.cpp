// Weights made to few bits: each within its step.
#include <memory>

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

// Two weights by one call: the panels of the codes that the functions above give.
CHECK(quantize_weights) {
  Random random(6);
  for (bool gated : {false, true})
    for (long group : {0L, 32L, 64L}) {
      const long outs = gated ? 64 : 45, ins = group == 32 ? 96 : 192, padded = 64, groups = group ? ins / group : 1, panels = padded / 32;
      const long count = gated ? outs / 2 : outs, apart = gated ? 16 : 32, second = gated ? outs / 2 : 16;
      std::vector<int64_t> table;
      struct Weight {
        Guarded<bf16> w;
        Guarded<uint8_t> packed, zero;
        Guarded<float> scale;
        Guarded<int32_t> sum;
      };
      std::vector<std::unique_ptr<Weight>> weights;
      for (int i = 0; i < 2; i++) {
        auto made = std::make_unique<Weight>(Weight{random.bf16s(outs * ins), Guarded<uint8_t>(padded * ins / (group ? 2 : 1)), Guarded<uint8_t>(padded * groups), Guarded<float>(padded * groups), Guarded<int32_t>(padded)});
        bf16* from = made->w;
        for (int64_t number : {(int64_t)from, (int64_t)(from + second * ins), count, gated ? count : count - 16, ins * 2, apart,
                               (int64_t)(uint8_t*)made->packed, panels, ins, group, (int64_t)(float*)made->scale,
                               group ? (int64_t)(uint8_t*)made->zero : (int64_t)(int32_t*)made->sum, second})
          table.push_back(number);
        weights.push_back(std::move(made));
      }
      quire_quantize_weights(table.data(), 2);
      for (auto& one : weights) {
        Guarded<int8_t> bytes(outs * ins), wanted(padded * ins);
        Guarded<uint8_t> nibbles(outs * ins), zero(outs * groups);
        Guarded<float> scale(outs * groups);
        if (group) {
          quire_quantize_groups(one->w, outs, ins, group, nibbles, scale, zero);
        } else {
          quire_quantize_rows(one->w, outs, ins, bytes, scale);
          quire_pack_int8(bytes, wanted, padded, outs, ins, gated);
        }
        for (long i = 0; i < padded * ins; i++) {
          const long panel = i / (32 * ins), r = i / ins % 32, k = i % ins, o = panel * apart + r / 16 * second + r % 16;
          int got, want;
          if (group) {
            got = one->packed[panel * 16 * ins + k / 4 * 64 + r % 16 * 4 + k % 4] >> r / 16 * 4 & 15;
            want = o < outs ? nibbles[o * ins + k] : 0;
            if (o < outs && one->scale[(panel * groups + k / group) * 32 + r] != scale[o * groups + k / group]) want = -1;
          } else {
            got = (int8_t)one->packed[i], want = wanted[i];
            if (o < outs && one->scale[o] != scale[o]) want = -1000;
          }
          comparisons++;
          if (got != want) failures++, fprintf(stderr, "quantize_weights: output %ld, input %ld is %d, not %d\n", o, k, got, want);
        }
      }
    }
}

// Weights of four bits: against loops over the same integers, and a row alone against the same row in company.
#include "harness.h"

namespace {

void check(long rows, long outs, long ins, long group, bool gated, bool ordered, bool with_bias, bool coded) {
  Random random((unsigned)(rows + outs + ins + group));
  const long groups = ins / group, width = gated ? outs / 2 : outs;
  const auto x = random.bf16s(rows * ins), bias = random.bf16s(outs);
  Guarded<int32_t> order(ins);
  for (long k = 0; k < ins; k++) order[k] = (int32_t)k;
  if (ordered) std::shuffle(order.data, order.data + ins, random.source);
  std::vector<int> w(outs * ins);
  for (int& value : w) value = (int)random.below(16);
  // In panels: output o stands at place_of(o) % 32 of panel place_of(o) / 32.
  const auto place_of = [&](long o) {
    if (!gated) return o;
    const long half = outs / 2, i = o % half;
    return i / 16 * 32 + o / half * 16 + i % 16;
  };
  Guarded<uint8_t> packed(outs * ins / 2), zeros(outs * groups);
  Guarded<float> scales(outs * groups);
  memset(packed.data, 0, packed.count);
  for (long o = 0; o < outs; o++) {
    const long place = place_of(o), panel = place / 32, lane = place % 32;
    for (long k = 0; k < ins; k++)
      packed[panel * ins * 16 + k / 4 * 64 + lane % 16 * 4 + k % 4] |= (uint8_t)(w[o * ins + k] << (lane / 16 * 4));
    for (long g = 0; g < groups; g++) {
      scales[(panel * groups + g) * 32 + lane] = 0.01f * (float)(1 + (o + g) % 5);
      zeros[(panel * groups + g) * 32 + lane] = (uint8_t)((o + 3 * g) % 16);
    }
  }
  const std::vector<int> table = {128, 1, 255, 9, 77, 200, 14, 129, 60, 3, 254, 100, 31, 90, 170, 5};
  Guarded<uint8_t> codes(16);
  for (int i = 0; i < 16; i++) codes[i] = (uint8_t)table[i];
  if (coded)
    for (long i = 0; i < outs * groups; i++) zeros[i] = 128;
  Guarded<bf16> y(rows * width), alone(width);
  const auto run = [&](const bf16* from, bf16* to, long count) {
    quire_linear_int4(from, ins, packed, scales, zeros, coded ? codes.data : nullptr, ordered ? order.data : nullptr, with_bias ? bias.data : nullptr, to,
                      width, count, outs, ins, group, gated);
  };
  run(x, y, rows);
  std::vector<double> want;
  for (long r = 0; r < rows; r++) {
    std::vector<double> sums(outs);
    for (long o = 0; o < outs; o++) {
      const long place = place_of(o), at = place / 32 * groups * 32 + place % 32;
      if (with_bias) sums[o] = value_of(bias[o]);
      for (long g = 0; g < groups; g++) {
        float top = 0;
        for (long k = g * group; k < (g + 1) * group; k++) top = std::max(top, fabsf(value_of(x[r * ins + order[k]])));
        long exact = 0;
        for (long k = g * group; k < (g + 1) * group; k++)
          exact += (long)nearbyintf(value_of(x[r * ins + order[k]]) * (127.f / top)) * ((coded ? table[w[o * ins + k]] : w[o * ins + k]) - zeros[at + g * 32]);
        sums[o] += (double)exact * (top / 127.f) * scales[at + g * 32];
      }
    }
    for (long i = 0; i < width; i++) {
      const double gate = rounded_of(sums[i]);
      want.push_back(gated ? (double)rounded_of(gate / (1 + exp(-gate))) * rounded_of(sums[width + i]) : sums[i]);
    }
  }
  const std::string name = named("int4", {rows, outs, ins, group, gated, ordered, with_bias, coded});
  near(name, y.data, want, 0.01);
  for (long r : {0L, rows / 2, rows - 1}) {
    run(x + r * ins, alone, 1);
    same(name + " alone", alone.data, y + r * width, width);
  }
}

}  // namespace

CHECK(linear_int4) {
  int turn = 0;
  for (long rows : {1L, 2L, 5L, 13L, 16L, 17L, 23L, 24L, 33L, 70L})
    for (long group : {32L, 64L, 96L}) {
      turn++;
      check(rows, 64, 3 * group, group, turn % 2, turn % 3 == 0, turn % 4 == 0, turn % 5 < 2);
    }
  check(3, 96, 640, 640, false, false, true, false);
}

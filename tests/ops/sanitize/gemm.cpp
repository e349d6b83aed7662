// Linears of every kind: against loops, and a row alone against the same row in company.
#include "harness.h"

namespace {

struct Shape {
  long rows, outs, filled, ins;
};

std::vector<Shape> shapes(long step) {
  std::vector<Shape> made = {{1, 32, 32, step},       {2, 64, 33, 3 * step},  {3, 64, 64, 9 * step}, {7, 96, 90, 2 * step},
                             {12, 64, 64, step},      {13, 64, 64, 2 * step}, {16, 64, 64, step},    {17, 32, 1, 2 * step},
                             {32, 128, 128, 4 * step}, {33, 64, 64, 10 * step}, {70, 64, 40, step},  {300, 64, 64, 17 * step},
                             {523, 64, 40, 3 * step}, {514, 32, 32, step},  {515, 32, 32, 82 * step}};
  Random random(1);
  for (int i = 0; i < 12; i++) {
    const long outs = 32 * (1 + random.below(4));
    made.push_back({1 + random.below(90), outs, outs - random.below(32), step * (1 + random.below(8))});
  }
  return made;
}

double silu(double x) { return x / (1 + exp(-x)); }

// One row's outputs; `sums` [outs] before rounding.
std::vector<double> finished(const std::vector<double>& sums, bool gated) {
  if (!gated) return sums;
  const size_t half = sums.size() / 2;
  std::vector<double> made(half);
  for (size_t i = 0; i < half; i++) made[i] = (double)rounded_of(silu(rounded_of(sums[i]))) * rounded_of(sums[half + i]);
  return made;
}

void check_bf16(const Shape& s, bool gated, bool with_bias) {
  Random random((unsigned)(s.rows * s.outs + s.ins));
  const long apart = s.ins + 8 * random.below(3), width = gated ? s.outs / 2 : s.outs;
  const auto x = random.bf16s((s.rows - 1) * apart + s.ins), w = random.bf16s(s.filled * s.ins, 1 / sqrtf((float)s.ins));
  const auto bias = random.bf16s(s.outs);
  Guarded<bf16> packed(s.outs * s.ins), y(s.rows * width), alone(width);
  quire_pack(w, packed, s.outs, s.filled, s.ins, gated);
  // In two parts, as one of several weights.
  Guarded<bf16> again(s.outs * s.ins);
  const int64_t cut = s.filled / 32 * 16, step = s.ins * (int64_t)sizeof(bf16), to = (int64_t)again.data;
  const int64_t parts[] = {(int64_t)w.data,  step, cut, to, 0, cut, s.outs, s.ins, gated, (int64_t)(w.data + cut * s.ins), step, s.filled - cut, to,
                           cut, s.outs - cut, s.outs, s.ins, gated};
  quire_pack_weights(parts, 2);
  same(named("pack_weights", {s.outs, s.filled, s.ins, gated}), again.data, packed.data, s.outs * s.ins);
  quire_linear(x, apart, packed, with_bias ? bias.data : nullptr, y, width, s.rows, s.outs, s.ins, gated);
  const std::string name = named("linear", {s.rows, s.outs, s.filled, s.ins, gated, with_bias});
  if (!gated) {
    Guarded<int64_t> ids(s.filled);
    Guarded<bf16> back(s.filled * s.ins);
    for (long o = 0; o < s.filled; o++) ids[o] = o;
    quire_unpack_rows(packed, ids, back, s.filled, s.ins);
    same(name + " unpacked", back.data, w.data, s.filled * s.ins);
  }
  std::vector<double> want;
  for (long r = 0; r < s.rows; r++) {
    std::vector<double> sums(s.outs);
    for (long o = 0; o < s.outs; o++) {
      if (with_bias) sums[o] = value_of(bias[o]);
      for (long k = 0; k < s.ins && o < s.filled; k++) sums[o] += (double)value_of(x[r * apart + k]) * value_of(w[o * s.ins + k]);
    }
    for (double v : finished(sums, gated)) want.push_back(v);
  }
  near(name, y.data, want, 0.01);
  for (long r : {0L, s.rows / 2, s.rows - 1}) {
    quire_linear(x + r * apart, apart, packed, with_bias ? bias.data : nullptr, alone, width, 1, s.outs, s.ins, gated);
    same(name + " alone", alone.data, y + r * width, width);
  }
}

void check_int8(const Shape& s, bool gated, bool with_bias) {
  Random random((unsigned)(s.rows * s.outs + s.ins + 1));
  const long width = gated ? s.outs / 2 : s.outs;
  const auto x = random.bf16s(s.rows * s.ins), bias = random.bf16s(s.outs);
  auto w = random.bytes(s.filled * s.ins);
  for (long k = 0; k < s.ins; k++) w[k] = k % 3 ? 127 : -127;  // sums of 16 bits would overflow
  Guarded<int8_t> packed(s.outs * s.ins);
  Guarded<float> scales(s.outs);
  Guarded<int32_t> sums_of_w(s.outs);
  for (long o = 0; o < s.outs; o++) {
    scales[o] = (float)(1 + o % 7) / 1000;
    sums_of_w[o] = 0;
    for (long k = 0; k < s.ins && o < s.filled; k++) sums_of_w[o] += 128 * w[o * s.ins + k];
  }
  Guarded<bf16> y(s.rows * width), alone(width);
  quire_pack_int8(w, packed, s.outs, s.filled, s.ins, gated);
  const bf16* b = with_bias ? bias.data : nullptr;
  quire_linear_int8(x, s.ins, packed, scales, sums_of_w, b, y, width, s.rows, s.outs, s.ins, gated);
  std::vector<double> want;
  for (long r = 0; r < s.rows; r++) {
    float top = 0;
    for (long k = 0; k < s.ins; k++) top = std::max(top, fabsf(value_of(x[r * s.ins + k])));
    std::vector<double> sums(s.outs);
    for (long o = 0; o < s.outs; o++) {
      long exact = 0;
      for (long k = 0; k < s.ins && o < s.filled; k++)
        exact += (long)nearbyintf(value_of(x[r * s.ins + k]) * (127.f / top)) * w[o * s.ins + k];
      sums[o] = (double)exact * (top / 127.f) * scales[o] + (with_bias ? value_of(bias[o]) : 0);
    }
    for (double v : finished(sums, gated)) want.push_back(v);
  }
  const std::string name = named("int8", {s.rows, s.outs, s.filled, s.ins, gated, with_bias});
  near(name, y.data, want, 0.01);
  for (long r : {0L, s.rows / 2, s.rows - 1}) {
    quire_linear_int8(x + r * s.ins, s.ins, packed, scales, sums_of_w, b, alone, width, 1, s.outs, s.ins, gated);
    same(name + " alone", alone.data, y + r * width, width);
  }
}

}  // namespace

CHECK(linear) {
  int turn = 0;
  for (const Shape& s : shapes(32)) {
    check_bf16(s, false, turn++ % 2);
    if (s.outs % 64 == 0) check_bf16(s, true, turn % 2);
  }
}

CHECK(linear_int8) {
  int turn = 0;
  for (const Shape& s : shapes(64)) {
    check_int8(s, false, turn++ % 2);
    if (s.outs % 64 == 0) check_int8(s, true, turn % 2);
  }
}

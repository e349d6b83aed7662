// Blocks of GGUF files: against loops over the records as gemm_blocks.cpp describes them, and a row alone against the same row in company.
#include "harness.h"

namespace {

struct Shape {
  long number, bits, group, block;
  bool minima;
  int zero;
  const signed char* codes = nullptr;  // what 4 bits stand for
  float unit = 1;
  bool wide = false;  // scales are bf16
  long groups() const { return block / group; }
  long factors() const { return groups() > 1 ? groups() * 32 : 0; }
  long header() const { return (minima ? 2 : 1) * (64 + factors()); }
  long record() const { return header() + block * bits * 4; }
};
constexpr signed char IQ4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr signed char MXFP4[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr signed char IQ3[] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
constexpr signed char IQ3S[] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
constexpr signed char IQ2[16] = {8, 25, 43, -8, -25, -43}, IQ1[16] = {1, 7, 9, -1, -7, -9};
constexpr Shape SHAPES[] = {{0, 4, 32, 32, false, 8}, {1, 8, 32, 32, false, 0}, {2, 4, 32, 256, true, 0}, {3, 5, 32, 256, true, 0},
                            {4, 6, 16, 256, false, 32}, {5, 4, 32, 32, true, 0}, {6, 5, 32, 32, false, 16}, {7, 5, 32, 32, true, 0},
                            {8, 4, 16, 256, true, 0}, {9, 4, 16, 256, false, 4}, {10, 4, 32, 32, false, 0, IQ4}, {11, 4, 32, 256, false, 0, IQ4},
                            {12, 4, 32, 32, false, 0, MXFP4, 1, true}, {13, 4, 32, 256, false, 0, IQ3, .25f}, {14, 4, 32, 256, false, 0, IQ3S},
                            {15, 4, 16, 256, false, 0, IQ2, .125f}, {16, 4, 16, 256, false, 0, IQ1, .125f}};

float half_of(const uint8_t* p) {
  const int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  return ldexpf((float)(fraction + (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
}

struct Weights {  // one part
  Shape shape;
  long outs, ins;
  Guarded<uint8_t> data;
  Weights(const Shape& shape, long outs, long ins, Random& random) : shape(shape), outs(outs), ins(ins), data(outs / 32 * (ins / shape.block) * shape.record()) {
    for (size_t i = 0; i < data.count; i++) data[i] = (uint8_t)random.below(256);
    for (long at = 0; at < (long)data.count; at += shape.record()) {
      for (long i = 0; i < (shape.minima ? 64 : 32); i++) data[at + 2 * i + 1] = (uint8_t)((shape.wide ? 56 : 2) + i % 3);  // small, some of them subnormal
      for (long i = 128; shape.minima && i < shape.header(); i++) data[at + i] &= 63;  // factors have six bits
    }
  }
  const uint8_t* record(long o, long k) const { return data.data + (o / 32 * (ins / shape.block) + k / shape.block) * shape.record(); }
  int q(long o, long k) const {
    const long lane = o % 32, i = k % 32, line = i / 4, byte = lane % 16 * 4 + i % 4, part = lane / 16;
    const uint8_t* chunk = record(o, k) + shape.header() + k % shape.block / 32 * 128 * shape.bits;
    if (shape.bits == 8) return (int8_t)chunk[part * 512 + line * 64 + byte];
    const long more = shape.bits - 4, unit = line * 2 + part, each = more ? 8 / more : 1;
    if (shape.codes) return shape.codes[chunk[line * 64 + byte] >> (4 * part) & 15];
    const int high = more ? chunk[512 + unit / each * 64 + byte] >> (unit % each * more) & ((1 << more) - 1) : 0;
    return (chunk[line * 64 + byte] >> (4 * part) & 15) | high << 4;
  }
  float scale(long o, long k) const {
    const uint8_t* at = record(o, k);
    const float d = shape.wide ? value_of((bf16)(at[o % 32 * 2] | at[o % 32 * 2 + 1] << 8)) : shape.unit * half_of(at + o % 32 * 2);
    if (shape.groups() == 1) return d;
    const uint8_t factor = at[(shape.minima ? 128 : 64) + k % shape.block / shape.group * 32 + o % 32];
    return d * (shape.minima ? (float)factor : (float)(int8_t)factor);
  }
  float minimum(long o, long k) const {
    if (!shape.minima) return 0;
    const uint8_t* at = record(o, k);
    if (shape.groups() == 1) return half_of(at + 64 + o % 32 * 2);
    return half_of(at + 64 + o % 32 * 2) * at[128 + shape.factors() + k % shape.block / shape.group * 32 + o % 32];
  }
};

void check(const Shape& shape, long rows, long outs, long ins, bool gated, bool with_bias) {
  Random random((unsigned)(rows + outs + ins + shape.bits));
  const long width = gated ? outs / 2 : outs, size = ins / shape.block * shape.record();
  const Weights w(shape, outs, ins, random);
  const auto x = random.bf16s(rows * ins), bias = random.bf16s(outs);
  const int64_t parts[] = {gated ? 2 : 1, 0, size, shape.number, gated ? outs / 64 : outs / 32, outs / 64 * size, size, shape.number, outs / 64};
  Guarded<bf16> y(rows * width), alone(width);
  const auto run = [&](const bf16* from, bf16* to, long count) {
    quire_linear_blocks(from, ins, w.data.data, parts, with_bias ? bias.data : nullptr, to, width, count, outs, ins, gated);
  };
  run(x, y, rows);
  std::vector<double> want;
  for (long r = 0; r < rows; r++) {
    std::vector<double> sums(outs);
    for (long o = 0; o < outs; o++) {
      if (with_bias) sums[o] = value_of(bias[o]);
      const long step = shape.groups() > 1 ? 256 : 32;
      for (long g = 0; g < ins; g += step) {
        float top = 0;
        for (long k = g; k < g + step; k++) top = std::max(top, fabsf(value_of(x[r * ins + k])));
        for (long k = g; k < g + step; k++) {
          const double bytes = nearbyintf(value_of(x[r * ins + k]) * (127.f / top)) * (double)(top / 127.f);
          sums[o] += bytes * ((double)w.scale(o, k) * (w.q(o, k) - shape.zero) - w.minimum(o, k));
        }
      }
    }
    for (long i = 0; i < width; i++) {
      const double gate = rounded_of(sums[i]);
      want.push_back(gated ? (double)rounded_of(gate / (1 + exp(-gate))) * rounded_of(sums[width + i]) : sums[i]);
    }
  }
  const std::string name = named("blocks", {shape.number, rows, outs, ins, gated, with_bias});
  near(name, y.data, want, 0.01);
  for (long r : {0L, rows / 2, rows - 1}) {
    run(x + r * ins, alone, 1);
    same(name + " alone", alone.data, y + r * width, width);
  }
}

}  // namespace

CHECK(linear_blocks) {
  int turn = 0;
  for (const Shape& shape : SHAPES)
    for (long rows : {1L, 2L, 5L, 13L, 17L, 33L, 70L}) {
      turn++;
      check(shape, rows, 64, shape.block == 32 ? 608 : 512, turn % 2, turn % 3);  // 19 groups: some are left over
    }
}

CHECK(block_rows) {
  for (const Shape& shape : SHAPES) {
    Random random((unsigned)shape.bits);
    const Weights w(shape, 96, 512, random);
    const int64_t parts[] = {1, 0, 512 / shape.block * shape.record(), shape.number, 3}, ids[] = {95, 0, 31, 32};
    Guarded<bf16> y(4 * 512);
    quire_block_rows(w.data, parts, ids, y, 4, 512);
    std::vector<double> want;
    for (long id : ids)
      for (long k = 0; k < 512; k++) want.push_back((double)w.scale(id, k) * (w.q(id, k) - shape.zero) - w.minimum(id, k));
    near("block rows", y.data, want, 0.01);
  }
}

// Rows by themselves and beside rows of another weight: the same bytes, and none beyond them. (Python tests what they mean.)
CHECK(pack_blocks) {
  for (const Shape& shape : SHAPES) {
    const int sizes[] = {18, 34, 144, 176, 210, 20, 22, 24, 84, 110, 18, 136, 17}, blocks = 2, rows = 40;
    const long size = shape.number < 13 ? sizes[shape.number] : 2 + shape.groups() + shape.block, panel = blocks * shape.record();
    Random random((unsigned)shape.number);
    Guarded<uint8_t> from(rows * blocks * size), one(2 * panel), two(2 * panel);
    for (size_t i = 0; i < from.count; i++) from[i] = (uint8_t)random.below(256);
    memset(one.data, 0, one.count), memset(two.data, 0, two.count);
    const auto part = [&](Guarded<uint8_t>& to, long first, long count) {
      return std::vector<int64_t>{(int64_t)(from.data + first * blocks * size), blocks * size, count, (int64_t)(to.data + first / 32 * panel), panel, shape.number, blocks};
    };
    quire_pack_blocks(part(one, 0, rows).data(), 1);
    std::vector<int64_t> both = part(two, 0, 32);
    for (int64_t number : part(two, 32, rows - 32)) both.push_back(number);
    quire_pack_blocks(both.data(), 2);
    same(named("pack_blocks", {shape.number}), one.data, two.data, 2 * panel);
  }
}

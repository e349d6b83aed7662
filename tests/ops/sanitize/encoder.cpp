// An encoder in one call has the bits of its parts, and a prompt alone those that it has in company.
#include "encoder.h"

#include "norm_rope_act.h"
#include "small_layer.h"

CHECK(encoder) {
  constexpr long hidden = SmallLayer::hidden, heads = 2, D = 32, inner = SmallLayer::inner, width = 3 * heads * D;
  Random random(3);
  SmallLayer small(random, 1);
  const auto weight = [&](long outs, long ins) { return small.weight(outs, outs, ins, false, random.bf16s(outs * ins, 0.1f)); };
  const auto norm_weight = random.bf16s(hidden), norm_bias = random.bf16s(hidden);
  quire::Norm norm{};
  norm.weight = norm_weight.data, norm.kind = quire::LAYER_NORM, norm.eps = 1e-6f, norm.bias = norm_bias.data;
  quire::EncoderLayer l{};
  l.qkv = weight(width, hidden), l.o = weight(hidden, heads * D), l.up = weight(inner, hidden), l.down = weight(hidden, inner);
  l.after_attention = l.after_mlp = norm;
  l.heads = l.kv_heads = heads, l.D = D, l.window = 5, l.act = quire::RELU, l.rotary = -1, l.scale = 0.25f;
  quire::EncoderLayer of_halves = l;  // its tokens attend in shorter runs
  of_halves.runs = 1;
  const quire::EncoderLayer* layers[] = {&l, &of_halves};
  const int starts[] = {0, 1, 9, 26}, halves[] = {0, 1, 4, 9, 20, 26};
  const long T = 26;
  const auto input = random.bf16s(T * hidden);
  for (const bool before : {false, true}) {
    const auto run = [&](long first, const int* from, long rows, const int* shorter, long num_shorter, bf16* to) {
      const long count = from[rows];
      Guarded<bf16> x(count * hidden), y(count * hidden);
      memcpy(x.data, input + first * hidden, count * hidden * sizeof(bf16));
      const int* both[] = {from, shorter};
      const int64_t counts[] = {rows, num_shorter};
      const quire::EncoderStep step{nullptr, nullptr, both, counts, 0};
      quire_encoder(layers, 2, before ? &norm : nullptr, &step, hidden, x, y);
      memcpy(to, before ? y.data : x.data, count * hidden * sizeof(bf16));
    };
    Guarded<bf16> whole(T * hidden), x(T * hidden), y(T * hidden), sum(T * hidden), qkv(T * width), o(T * heads * D), up(T * inner);
    run(0, starts, 3, halves, 5, whole);
    memcpy(x.data, input, T * hidden * sizeof(bf16)), memcpy(y.data, input, T * hidden * sizeof(bf16));
    if (before) norm.in_place(y, hidden, T, 1, hidden);
    for (int layer = 0; layer < 2; layer++) {  // y: what a half reads; x: what it adds to
      l.qkv.multiply(y, hidden, qkv, width, T);
      quire_packed_attention(qkv, width, qkv + heads * D, width, qkv + 2 * heads * D, width, o, layer ? halves : starts, layer ? 5 : 3, heads, heads, D, l.window,
                             l.scale, nullptr, 0);
      l.o.multiply(o, heads * D, sum, hidden, T);
      norm.add(sum, x, T, hidden);
      if (!before) memcpy(x.data, sum.data, T * hidden * sizeof(bf16));
      l.up.multiply(sum, hidden, up, inner, T, (int)l.act);
      l.down.multiply(up, inner, y, hidden, T);
      norm.add(y, x, T, hidden);
      if (!before) memcpy(x.data, y.data, T * hidden * sizeof(bf16));
    }
    same(before ? "encoder, norms before" : "encoder, norms after", whole.data, y.data, T * hidden);
    for (int row = 0; row < 3; row++) {
      const int alone[] = {0, starts[row + 1] - starts[row]};
      Guarded<bf16> one(alone[1] * hidden);
      const int first = row ? 2 * row - 1 : 0, last = 2 * row + 1;  // among the halves
      const int shorter[] = {0, halves[first + 1] - starts[row], halves[last] - starts[row]};
      run(starts[row], alone, 1, shorter, last - first, one);
      same("a prompt of an encoder alone", one.data, whole + starts[row] * hidden, alone[1] * hidden);
    }
  }
}

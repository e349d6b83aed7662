// Adapters: against plain loops, a token alone against all, and a gated product's halves.
#include "small_layer.h"

namespace {

// Factors of a weight with two parts, packed as ops/lora.py packs them.
template <class W>
struct Factors {
  static constexpr float SCALES[2] = {0.5f, 2};
  long ins, outs, ranks[2], split;
  Guarded<W> a, b;
  Guarded<float> gain, offset;
  quire::LoraPart parts[2];
  quire::Lora lora;

  static long panels(long outs) { return (outs + 15) / 16; }
  static W made(float x) { return std::is_same_v<W, bf16> ? (W)bf16_of(x) : (W)x; }

  Factors(Random& random, long rank, long ins, long outs, bool vectors)
      : ins(ins), outs(outs), ranks{rank, rank / 2}, split(outs / 3), a((ranks[0] + ranks[1]) * ((ins + 15) / 16 * 16)),
        b((panels(split) * ranks[0] + panels(outs - split) * ranks[1]) * 16), gain(outs + 16), offset(outs + 16) {
    for (size_t i = 0; i < a.count; i++) a[i] = made((long)i % ((ins + 15) / 16 * 16) < ins ? random.normal() : 0);
    for (size_t i = 0; i < b.count; i++) b[i] = made(random.normal());
    for (long i = 0; i < outs + 16; i++) gain[i] = random.normal(), offset[i] = random.normal();
    parts[0] = {0, split, 0, ranks[0], 0, SCALES[0]};
    parts[1] = {split, outs - split, ranks[0], ranks[1], panels(split) * ranks[0] * 16, SCALES[1]};
    lora = {a.data, b.data, vectors ? gain.data : nullptr, vectors ? offset.data : nullptr, parts, 2, ranks[0] + ranks[1], ins,
            std::is_same_v<W, bf16>};
  }
  template <class X>
  double value(const X* x, double y, long out) const {
    const quire::LoraPart& part = parts[out >= split];
    double sum = 0;
    for (long r = 0; r < part.rank; r++) {
      double h = 0;
      for (long i = 0; i < ins; i++) h += (double)value_of(x[i]) * value_of(a[(part.first + r) * ((ins + 15) / 16 * 16) + i]);
      const long o = out - part.start;
      sum += h * part.scale * value_of(b[part.at + (o / 16 * part.rank + r) * 16 + o % 16]);
    }
    return lora.gain ? (y + sum) * gain[out] + offset[out] : y + sum;
  }
};

template <class X, class W>
void check(long rank, long ins, long outs, long tokens) {
  Random random((unsigned)(rank * 7 + ins + outs + tokens));
  constexpr int is_bf16 = std::is_same_v<X, bf16>;
  const Factors<W> one(random, rank, ins, outs, false), other(random, rank + 1, ins, outs, true);
  const quire::Lora* table[] = {&one.lora, nullptr, &other.lora};
  const auto random_x = [&](long count) {
    Guarded<X> made(count);
    for (long i = 0; i < count; i++) made[i] = is_bf16 ? (X)bf16_of(random.normal()) : (X)random.normal();
    return made;
  };
  const auto x = random_x(tokens * ins), y = random_x(tokens * outs);
  Guarded<X> together(tokens * outs), alone(tokens * outs);
  memcpy(together.data, y.data, tokens * outs * sizeof(X)), memcpy(alone.data, y.data, tokens * outs * sizeof(X));
  Guarded<int64_t> numbers(tokens);
  for (long t = 0; t < tokens; t++) numbers[t] = t % 4 == 3 ? -1 : t % 4;
  quire_lora(x, ins, together, outs, is_bf16, numbers, tokens, table);
  std::vector<double> want;
  for (long t = 0; t < tokens; t++) {
    quire_lora(x + t * ins, ins, alone + t * outs, outs, is_bf16, numbers + t, 1, table);
    for (long o = 0; o < outs; o++) {
      const double before = value_of(y[t * outs + o]);
      const int64_t number = numbers[t];
      want.push_back(number == 0 ? one.value(x + t * ins, before, o) : number == 2 ? other.value(x + t * ins, before, o) : before);
    }
  }
  const auto name = named("lora", {is_bf16, std::is_same_v<W, bf16>, rank, ins, outs, tokens});
  near(name, together.data, want, is_bf16 ? 0.01 : 1e-5);
  same(name, together.data, alone.data, tokens * outs);
}

}  // namespace

CHECK(lora) {
  for (long rank : {1L, 4L, 17L})
    for (long ins : {3L, 32L, 77L})
      for (long outs : {5L, 48L, 131L})
        for (long tokens : {1L, 6L, 75L}) {
          check<bf16, bf16>(rank, ins, outs, tokens), check<bf16, float>(rank, ins, outs, tokens);
          check<float, float>(rank, ins, outs, tokens);
        }
}

// A layer gives the bits of its products with the adapters between them; without an adapter it gives the bits of a plain layer.
CHECK(lora_in_layers) {
  Random random(8);
  SmallLayer small(random, 2);
  constexpr long hidden = SmallLayer::hidden, inner = SmallLayer::inner, T = 20;
  quire::Layer l = small.layer;
  l.qkv.data = nullptr;
  const Factors<bf16> wide(random, 5, hidden, 2 * inner, false), narrow(random, 3, inner, hidden, true);
  const quire::Lora *of_gate_up[] = {&wide.lora}, *of_down[] = {&narrow.lora};
  l.gate_up.lora = of_gate_up, l.down.lora = of_down;
  Guarded<int64_t> numbers(T);
  for (long t = 0; t < T; t++) numbers[t] = t % 3 ? 0 : -1;
  const auto x = random.bf16s(T * hidden), residual = random.bf16s(T * hidden);
  Guarded<bf16> fused(T * hidden), plain(T * hidden), parts(T * hidden), left(T * hidden), gated(T * inner), halves(2 * T * inner);
  const quire::Layer* one[] = {&l};
  const int64_t none[] = {0};
  const auto run = [&](bf16* to, const int64_t* adapters) {
    memcpy(to, x.data, T * hidden * 2), memcpy(left.data, residual.data, T * hidden * 2);
    quire_layers(one, none, 1, nullptr, T, adapters, to, left, 0, nullptr);
  };
  run(plain, nullptr), run(fused, numbers);
  memcpy(parts.data, x.data, T * hidden * 2), memcpy(left.data, residual.data, T * hidden * 2);
  l.mlp_in.add(parts, left, T, hidden);
  l.gate_up.multiply(parts, hidden, halves, 2 * inner, T, quire::HALVES);
  quire_lora(parts, hidden, halves, 2 * inner, 1, numbers, T, of_gate_up);
  quire_act_and_mul(halves, gated, T, inner, quire::SILU);
  l.down.multiply(gated, inner, parts, hidden, T);
  quire_lora(gated, inner, parts, hidden, 1, numbers, T, of_down);
  same("a layer with adapters", fused.data, parts.data, T * hidden);
  for (long t = 0; t < T; t += 3) same("a token without", fused + t * hidden, plain + t * hidden, hidden);
  comparisons++;
  if (!memcmp(fused + hidden, plain + hidden, hidden * 2)) failures++, fprintf(stderr, "an adapter changes nothing\n");
}

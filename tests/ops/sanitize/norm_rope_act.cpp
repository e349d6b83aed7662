// Norms, positions, activations: against loops.
#include "harness.h"
#include "norm_rope_act.h"

namespace {

std::vector<double> normed(const double* x, const bf16* w, long D, float eps, int kind) {
  double squares = 0, mean = 0;
  if (kind == quire::LAYER_NORM)
    for (long d = 0; d < D; d++) mean += x[d] / (double)D;
  for (long d = 0; d < D; d++) squares += (x[d] - mean) * (x[d] - mean);
  std::vector<double> made(D);
  for (long d = 0; d < D; d++) {
    const double v = (x[d] - mean) / sqrt(squares / (double)D + eps);
    made[d] = kind == quire::RMS ? rounded_of(v) * value_of(w[d]) : v * (value_of(w[d]) + (kind == quire::RMS_PLUS_ONE));
  }
  return made;
}

}  // namespace

CHECK(norm) {
  for (long rows : {1L, 3L, 40L})
    for (long D : {16L, 48L, 128L, 1024L})
      for (int kind : {quire::RMS, quire::RMS_PLUS_ONE, quire::LAYER_NORM}) {
        Random random((unsigned)(rows + D));
        const long heads = 1 + rows % 3, step = heads * D + 16;
        const auto x = random.bf16s((rows - 1) * step + heads * D), w = random.bf16s(D);
        Guarded<bf16> y(rows * heads * D);
        quire_norm(x, step, w, y, heads * D, rows, heads, D, 1e-5f, kind);
        std::vector<double> want;
        for (long r = 0; r < rows; r++)
          for (long h = 0; h < heads; h++) {
            std::vector<double> line(D);
            for (long d = 0; d < D; d++) line[d] = value_of(x[r * step + h * D + d]);
            for (double v : normed(line.data(), w, D, 1e-5f, kind)) want.push_back(v);
          }
        near(named("norm", {rows, D, kind}), y.data, want, 0.01);
        if (kind != quire::LAYER_NORM) continue;
        const auto bias = random.bf16s(D);
        quire_norm(x, step, w, y, heads * D, rows, heads, D, 1e-5f, kind, bias);
        for (size_t i = 0; i < want.size(); i++) want[i] += value_of(bias[(long)i % D]);
        near(named("norm with bias", {rows, D}), y.data, want, 0.01);
      }
}

CHECK(add_norm) {
  for (long rows : {1L, 17L})
    for (long D : {16L, 336L}) {
      Random random((unsigned)(rows * D));
      auto x = random.bf16s(rows * D), residual = random.bf16s(rows * D);
      const auto w = random.bf16s(D);
      std::vector<double> sums, want;
      for (long i = 0; i < rows * D; i++) sums.push_back(rounded_of((double)value_of(x[i]) + value_of(residual[i])));
      for (long r = 0; r < rows; r++)
        for (double v : normed(sums.data() + r * D, w, D, 1e-6f, quire::RMS)) want.push_back(v);
      quire_add_norm(x, residual, w, rows, D, 1e-6f, quire::RMS);
      near(named("residual", {rows, D}), residual.data, sums, 0);
      near(named("add_norm", {rows, D}), x.data, want, 0.01);
      Guarded<bf16> none(rows * D);
      memset(none.data, 0, rows * D * sizeof(bf16));
      quire_add_norm(none, residual, nullptr, rows, D, 0, quire::NO_NORM);
      same("the sum itself", none.data, residual.data, rows * D);
    }
}

CHECK(multiply_sigmoid) {
  for (long rows : {1L, 18L}) {
    constexpr long heads = 3, D = 32, row = heads * 2 * D + 16;
    Random random((unsigned)rows);
    auto x = random.bf16s(rows * heads * D);
    const auto gate = random.bf16s((rows - 1) * row + heads * 2 * D - D);
    std::vector<double> want;
    for (long i = 0; i < rows * heads * D; i++) {
      const double g = value_of(gate[i / (heads * D) * row + i / D % heads * 2 * D + i % D]);
      want.push_back(value_of(x[i]) * rounded_of(1 / (1 + exp(-g))));
    }
    quire_multiply_sigmoid(x, gate, row, 2 * D, rows, heads, D);
    near(named("multiply_sigmoid", {rows}), x.data, want, 0.01);
  }
}

CHECK(rotate) {
  for (long rows : {1L, 20L})
    for (long P : {16L, 32L})
      for (bool interleaved : {false, true}) {
        Random random((unsigned)(rows * P));
        const long heads = 3, D = 2 * P + 16, step = heads * D;
        const auto x = random.bf16s(rows * step);
        const auto cos = random.floats(rows * P), sin = random.floats(rows * P);
        Guarded<bf16> y(rows * step);
        quire_rotate(x, step, cos, sin, y, step, rows, heads, D, P, interleaved);
        std::vector<double> want;
        for (long i = 0; i < rows * step; i++) {
          const long r = i / step, d = i % D, pair = interleaved ? d / 2 : d % P, apart = interleaved ? 1 : P;
          const bool early = interleaved ? d % 2 == 0 : d < P;
          const double c = cos[r * P + pair % P], s = sin[r * P + pair % P], here = value_of(x[i]);
          want.push_back(d >= 2 * P ? here : early ? here * c - value_of(x[i + apart]) * s : here * c + value_of(x[i - apart]) * s);
        }
        near(named("rotate", {rows, P, interleaved}), y.data, want, 0.01);
        Guarded<bf16> again(rows * step);
        memcpy(again.data, x.data, rows * step * sizeof(bf16));
        quire_rotate(again, step, cos, sin, again, step, rows, heads, D, P, interleaved);
        same("rotate in place", again.data, y.data, rows * step);
      }
}

CHECK(scale) {
  for (long rows : {1L, 3L, 20L})
    for (long width : {16L, 70L, 4200L})
      for (float softcap : {0.f, 5.f}) {
        Random random((unsigned)(rows * width));
        const long step = width + 10;
        auto x = random.bf16s((rows - 1) * step + width, 9);
        std::vector<double> want;
        for (size_t i = 0; i < x.count; i++) {
          const double v = value_of(x[i]) * 0.7;
          want.push_back((long)i % step >= width ? value_of(x[i]) : softcap != 0 ? softcap * tanh(v / softcap) : v);
        }
        quire_scale(x, step, rows, width, 0.7f, softcap);
        near(named("scale", {rows, width, (long)softcap}), x.data, want, 0.01);
      }
}

CHECK(act_and_mul) {
  for (long rows : {1L, 18L})
    for (long I : {16L, 160L})
      for (int act : {quire::SILU, quire::GELU, quire::GELU_TANH}) {
        Random random((unsigned)(rows * I));
        const auto x = random.bf16s(rows * 2 * I, 20);
        Guarded<bf16> y(rows * I);
        quire_act_and_mul(x, y, rows, I, act);
        std::vector<double> want;
        for (long i = 0; i < rows * I; i++) {
          const double gate = value_of(x[i / I * 2 * I + i % I]), other = value_of(x[i / I * 2 * I + I + i % I]);
          const double silu = gate / (1 + exp(-gate)), gelu = gate * erfc(-gate / sqrt(2)) / 2;
          const double tanh_gelu = gate / (1 + exp(-1.5957691216 * (gate + 0.044715 * gate * gate * gate)));
          want.push_back(rounded_of(act == quire::SILU ? silu : act == quire::GELU ? gelu : tanh_gelu) * other);
        }
        near(named("act_and_mul", {rows, I, act}), y.data, want, 0.01);
      }
}

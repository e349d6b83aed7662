// Norms, positions, activations: against loops.
#include "harness.h"

namespace {

std::vector<double> normed(const double* x, const bf16* w, long D, float eps, bool plus_one) {
  double squares = 0;
  for (long d = 0; d < D; d++) squares += x[d] * x[d];
  std::vector<double> made(D);
  for (long d = 0; d < D; d++) {
    const double v = x[d] / sqrt(squares / (double)D + eps);
    made[d] = plus_one ? v * (1 + value_of(w[d])) : rounded_of(v) * value_of(w[d]);
  }
  return made;
}

}  // namespace

CHECK(rms_norm) {
  for (long rows : {1L, 3L, 40L})
    for (long D : {16L, 48L, 128L, 1024L})
      for (bool plus_one : {false, true}) {
        Random random((unsigned)(rows + D));
        const long heads = 1 + rows % 3, step = heads * D + 16;
        const auto x = random.bf16s((rows - 1) * step + heads * D), w = random.bf16s(D);
        Guarded<bf16> y(rows * heads * D);
        quire_rms_norm(x, step, w, y, heads * D, rows, heads, D, 1e-5f, plus_one);
        std::vector<double> want;
        for (long r = 0; r < rows; r++)
          for (long h = 0; h < heads; h++) {
            std::vector<double> line(D);
            for (long d = 0; d < D; d++) line[d] = value_of(x[r * step + h * D + d]);
            for (double v : normed(line.data(), w, D, 1e-5f, plus_one)) want.push_back(v);
          }
        near(named("rms_norm", {rows, D, plus_one}), y.data, want, 0.01);
      }
}

CHECK(add_rms_norm) {
  for (long rows : {1L, 17L})
    for (long D : {16L, 336L}) {
      Random random((unsigned)(rows * D));
      auto x = random.bf16s(rows * D), residual = random.bf16s(rows * D);
      const auto w = random.bf16s(D);
      std::vector<double> sums, want;
      for (long i = 0; i < rows * D; i++) sums.push_back(rounded_of((double)value_of(x[i]) + value_of(residual[i])));
      for (long r = 0; r < rows; r++)
        for (double v : normed(sums.data() + r * D, w, D, 1e-6f, false)) want.push_back(v);
      quire_add_rms_norm(x, residual, w, rows, D, 1e-6f, 0);
      near(named("residual", {rows, D}), residual.data, sums, 0);
      near(named("add_rms_norm", {rows, D}), x.data, want, 0.01);
    }
}

CHECK(rotate) {
  for (long rows : {1L, 20L})
    for (long P : {16L, 32L}) {
      Random random((unsigned)(rows * P));
      const long heads = 3, D = 2 * P + 16, step = heads * D;
      const auto x = random.bf16s(rows * step);
      const auto cos = random.floats(rows * P), sin = random.floats(rows * P);
      Guarded<bf16> y(rows * step);
      quire_rotate(x, step, cos, sin, y, step, rows, heads, D, P);
      std::vector<double> want;
      for (long i = 0; i < rows * step; i++) {
        const long r = i / step, d = i % D, pair = d % P;
        const double c = cos[r * P + pair], s = sin[r * P + pair], here = value_of(x[i]);
        want.push_back(d >= 2 * P ? here : d < P ? here * c - value_of(x[i + P]) * s : here * c + value_of(x[i - P]) * s);
      }
      near(named("rotate", {rows, P}), y.data, want, 0.01);
      Guarded<bf16> again(rows * step);
      memcpy(again.data, x.data, rows * step * sizeof(bf16));
      quire_rotate(again, step, cos, sin, again, step, rows, heads, D, P);
      same("rotate in place", again.data, y.data, rows * step);
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

// Operations by row: norms, RoPE, activations, scales.
//
// Rounds as ops/reference.py does: to bf16 wherever the reference writes a tensor.
#include "common.h"
#include "exports.h"
#include "norm_rope_act.h"
#include "team.h"

namespace quire {

constexpr long SERIAL_MAX_ROWS = 16;  // up to this many rows one thread is faster than starting a team

}  // namespace quire

using namespace quire;

// A norm of `heads` vectors of D in each of `rows` lines of x, `step` elements apart. y may be x; w and bias may be null.
EXPORT void quire_norm(const bf16* x, long step, const bf16* w, bf16* y, long y_step, long rows, long heads, long D,
                       float eps, int kind, const bf16* bias) {
  each_of(rows, rows * heads >= SERIAL_MAX_ROWS, [&](long r) {
    each_four(heads, [&](long h, auto n) {
      norms<n>(x + r * step + h * D, D, w, y + r * y_step + h * D, D, D, eps, kind, bias);
    });
  });
}

// residual += x; x = norm(residual), the sum itself for NO_NORM.
EXPORT void quire_add_norm(bf16* x, bf16* residual, const bf16* w, long rows, long D, float eps, int kind, const bf16* bias) {
  each_of((rows + 3) / 4, rows >= SERIAL_MAX_ROWS, [&](long at) {
    const long first = at * 4;
    each_four(std::min(4L, rows - first), [&](long r, auto n) {
      bf16 *a = x + (first + r) * D, *b = residual + (first + r) * D;
      for (long d = 0; d < n * D; d += 16) store(b + d, widen(a + d) + widen(b + d));
      if (kind == NO_NORM)
        memcpy(a, b, n * D * sizeof(bf16));
      else
        norms<n>(b, D, w, a, D, D, eps, kind, bias);
    });
  });
}

// Rotates the first 2 * P features of each head. cos and sin: [rows, P]. y may be x.
EXPORT void quire_rotate(const bf16* x, long step, const float* cos, const float* sin, bf16* y, long y_step, long rows,
                         long heads, long D, long P, int interleaved) {
  each_of(rows, rows * heads >= SERIAL_MAX_ROWS, [&](long r) {
    for (long h = 0; h < heads; h++)
      rotate(x + r * step + h * D, cos + r * P, sin + r * P, y + r * y_step + h * D, D, P, interleaved);
  });
}

// x *= scale, then x = softcap * tanh(x / softcap) unless that is 0, rounded once; rows are `step` elements apart.
EXPORT void quire_scale(bf16* x, long step, long rows, long width, float scale, float softcap) {
  constexpr long PART = 4096;
  const Floats into = floats(softcap != 0 ? scale / softcap : scale);
  const auto scaled = [&](Floats v) { return softcap != 0 ? floats(softcap) * tanh_of(v * into) : v * into; };
  const long parts = (width + PART - 1) / PART;
  each_of(rows * parts, rows * width >= SERIAL_MAX_ROWS * 2048, [&](long part) {
    const long first = part % parts * PART;
    bf16 *at = x + part / parts * step + first, *end = at + std::min(width - first, PART);
    for (; end - at >= 16; at += 16) store(at, scaled(widen(at)));
    if (at == end) return;
    bf16 last[16] = {};
    memcpy(last, at, (char*)end - (char*)at);
    store(last, scaled(widen(last)));
    memcpy(at, last, (char*)end - (char*)at);
  });
}

// x[rows, heads, D] *= sigmoid(gate), rounded before; gate: of heads gate_step elements apart.
EXPORT void quire_multiply_sigmoid(bf16* x, const bf16* gate, long gate_row, long gate_step, long rows, long heads, long D) {
  each_of(rows, rows >= SERIAL_MAX_ROWS, [&](long r) {
    for (long h = 0; h < heads; h++)
      for (long d = 0; d < D; d += 16) {
        bf16* at = x + (r * heads + h) * D + d;
        store(at, widen(at) * rounded(times_sigmoid(floats(1.f), widen(gate + r * gate_row + h * gate_step + d))));
      }
  });
}

// y[rows, I] = activation(x[:, :I]) * x[:, I:].
EXPORT void quire_act_and_mul(const bf16* x, bf16* y, long rows, long I, int act) {
  each_of(rows, rows >= SERIAL_MAX_ROWS, [&](long r) {
    for (long i = 0; i < I; i += 16) store(y + r * I + i, gated(widen(x + r * 2 * I + i), widen(x + r * 2 * I + I + i), act));
  });
}

// What a linear is asked for, and what becomes of a row's sums: scales, bias, activation (linear.cpp, many.h).
#pragma once
#include "product.h"

namespace quire {

enum Kind { PLAIN = 0, GATED = 1 };

template <class F>
struct Job {
  const typename F::Value* x;
  long x_row;
  const typename F::Weight* w;
  const bf16* bias;  // [N], or null
  bf16* y;
  long y_row, rows, outs, ins;
  const float *x_scale, *w_scale;  // int8: [M], [N]
  const int32_t* w_sum;            // int8: 128 times the sum of each row of w, [N]
  const bf16* raw = nullptr;       // int8: x before it was bytes, where that is still to be done
  long raw_row = 0;

  long steps() const { return ins / F::K; }
};

inline Floats value(const Job<Bf16>&, long, long, const float* sums, Floats bias) { return load(sums) + bias; }
inline Floats value(const Job<Int8>& job, long row, long out, const int32_t* sums, Floats bias) {
  const Floats exact = to_floats(load(sums) - load(job.w_sum + out));
  return fma(exact, floats(job.x_scale[row]) * load(job.w_scale + out), bias);
}

// What a row's sums become, 16 and 16: 32 values of y, or in `left` 16 of a gated one.
template <Kind KIND, class F>
inline void values(const Job<F>& job, long row, long panel, const typename F::Sum* sums, const typename F::Sum* later,
                   Floats& left, Floats& right) {
  const long out = panel * (KIND == GATED ? 16 : 32), other = out + (KIND == GATED ? job.outs / 2 : 16);
  const auto bias = [&](long at) { return job.bias ? widen(job.bias + at) : floats(0.f); };
  left = value(job, row, out, sums, bias(out)), right = value(job, row, other, later, bias(other));
  if (KIND == GATED) left = rounded(silu_of(rounded(left))) * rounded(right);
}

template <Kind KIND, class F>
inline void finish(const Job<F>& job, long row, long panel, const typename F::Sum* sums, const typename F::Sum* later) {
  Floats left, right;
  values<KIND>(job, row, panel, sums, later, left, right);
  bf16* y = job.y + row * job.y_row + panel * (KIND == GATED ? 16 : 32);
  if (KIND == GATED)
    store(y, left);
  else
    store(y, left, right);
}

template <Kind KIND, class F>
inline void finish_rows(const Job<F>& job, long first, int rows, long panel, const typename F::Sum* sums) {
  for (int r = 0; r < rows; r++) finish<KIND>(job, first + r, panel, sums + r * 32, sums + r * 32 + 16);
}

}  // namespace quire

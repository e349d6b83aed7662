// The arguments of a linear layer, and its epilogue: scales, bias and activation of a row's sums (gemm.cpp, gemm_many_rows.h).
#pragma once
#include "gemm_kernel.h"

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
  const bf16* raw = nullptr;       // int8: x before quantization, if that is still to be done
  long raw_row = 0;
  int act = NO_ACTIVATION;

  long steps() const { return ins / F::K; }
};

// Constants of 16 outputs, kept in registers while rows are finished: loads would delay the tiles (decision 36).
template <class F>
struct Half;
template <>
struct Half<Bf16> {
  Floats bias;
  Half(const Job<Bf16>& job, long out) : bias(job.bias ? widen(job.bias + out) : floats(0.f)) {}
  Floats value(const float* sums, const float*, long) const { return load(sums) + bias; }
};
template <>
struct Half<Int8> {
  Floats bias, scale;
  Ints sum;
  Half(const Job<Int8>& job, long out)
      : bias(job.bias ? widen(job.bias + out) : floats(0.f)), scale(load(job.w_scale + out)), sum(load(job.w_sum + out)) {}
  Floats value(const int32_t* sums, const float* x_scale, long row) const {
    const Ints found = load(sums), exact = ZERO_BYTE ? found - sum : found;
    return fma(to_floats(exact), floats(x_scale[row]) * scale, bias);
  }
};

// Converts a panel's sums to y, row by row.
template <Kind KIND, class F>
struct Finish {
  using Sum = typename F::Sum;
  Half<F> early, late;
  const float* x_scale;
  bf16* y;
  long y_row, half;
  int act;

  Finish(const Job<F>& job, long panel)
      : early(job, panel * (KIND == GATED ? 16 : 32)),
        late(job, KIND == GATED ? job.outs / 2 + panel * 16 : panel * 32 + 16),
        x_scale(job.x_scale),
        y(job.y + panel * (KIND == GATED ? 16 : 32)),
        y_row(job.y_row),
        half(job.outs / 2),
        act(job.act) {}

  // A row's sums, 16 and 16, to outputs: 32 values of y, or in `left` 16 of a gated panel unless its halves are wanted.
  void values(long row, const Sum* sums, const Sum* later, Floats& left, Floats& right) const {
    left = early.value(sums, x_scale, row), right = late.value(later, x_scale, row);
    if (KIND == GATED) {
      if (act != HALVES) left = gated(rounded(left), rounded(right), act);
    } else
      left = ungated(left, act), right = ungated(right, act);
  }
  void rows(long first, long count, const Sum* sums, const Sum* later, long step) const {
    bf16* to = y + first * y_row;
    for (const long end = first + count; first < end; first++, sums += step, later += step, to += y_row) {
      Floats left, right;
      values(first, sums, later, left, right);
      if (KIND == GATED) {
        store(to, left);
        if (act == HALVES) store(to + half, right);
      } else
        store(to, left, right);
    }
  }
  void rows(long first, long count, const Sum* sums) const { rows(first, count, sums, sums + 16, 32); }
};

}  // namespace quire

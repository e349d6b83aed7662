// Shared by all kernels: vectors (simd.h), functions of them, scratch memory.
//
// A kernel's results for a row depend on that row alone: sums run along K in one order, whatever the number of rows, threads or
// chunks. Keep it so: the engine's equality tests compare bits.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "transpose.h"
#include "simd.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace quire {

constexpr long LINE = 64;           // bytes of a cache line
constexpr float LOG2E = 1.44269504f;

// 2^part, relative error about 2e-7; part is between -0.5 and 0.5.
inline Floats exp2_part(Floats part) {
  Floats p = floats(1.3333558e-3f);
  p = fma(p, part, floats(9.6181291e-3f));
  p = fma(p, part, floats(5.5504109e-2f));
  p = fma(p, part, floats(2.4022651e-1f));
  p = fma(p, part, floats(6.9314718e-1f));
  return fma(p, part, floats(1.f));
}

inline Floats exp2_of(Floats x) {  // 2^x; x is clamped to -126 .. 126
  x = min(max(x, floats(-126.f)), floats(126.f));
  const Floats whole = nearest(x);
  return times_power(exp2_part(x - whole), whole);
}

inline Floats exp2_below(Floats x) {  // the same for x <= 0 (up to rounding)
  x = max(x, floats(-126.f));
  const Floats whole = nearest(x);
  return times_power(exp2_part(x - whole), whole);
}

inline Floats tanh_of(Floats x) {  // 1 - 2 / (e^2x + 1)
  const Floats one = floats(1.f);
  return one - floats(2.f) / (exp2_of(x * floats(2 * LOG2E)) + one);
}

// The activations of gated layers, and the square of ReLU, which has no gate; others without a gate are UNGATED + activation.
// HALVES: of a gated layer, both halves without an activation. structs.py has their numbers, too.
enum Activation { NO_ACTIVATION, SILU, GELU, GELU_TANH, CLAMPED_SWIGLU, RELU_SQUARED, HALVES, RELU, QUICK_GELU, UNGATED = 16 };
inline bool is_gated(int act) { return act != NO_ACTIVATION && act != RELU_SQUARED && act < RELU; }

// x / (1 + e^-y): silu for y = x.
inline Floats times_sigmoid(Floats x, Floats y) { return x * inverse(exp2_of(y * floats(-LOG2E)) + floats(1.f)); }

// x * Phi(x), from the tail Phi(-|x|) = e^(-x^2 / 2) t R(t), t = 1 / (1 + 0.375 |x|); R is fitted for a relative error below 3e-5.
inline Floats gelu_of(Floats x) {
  const Floats z = magnitude(x), t = inverse(fma(z, floats(0.375f), floats(1.f)));
  Floats p = floats(-0.09099229f);
  p = fma(p, t, floats(0.20105902f));
  p = fma(p, t, floats(0.08296188f));
  p = fma(p, t, floats(0.1579239f));
  p = fma(p, t, floats(0.14904072f));
  return fnma(z * exp2_below(z * z * floats(-0.5f * LOG2E)), t * p, max(x, floats(0.f)));
}

inline Floats activated(Floats x, int act) {
  if (act == SILU) return times_sigmoid(x, x);
  if (act == GELU) return gelu_of(x);
  if (act == QUICK_GELU) return times_sigmoid(x, x * floats(1.702f));
  return times_sigmoid(x, x * fma(x * x, floats(0.0713548163f), floats(1.59576912f)));  // 0.5 (1 + tanh y) = sigmoid(2 y)
}

// activation(gate) * other, rounded where ops/reference.py would write a tensor.
inline Floats gated(Floats gate, Floats other, int act) {
  if (act == CLAMPED_SWIGLU) {  // gpt-oss; min and max give their second argument if one is NaN
    gate = min(floats(7.f), gate), other = rounded(min(floats(7.f), max(floats(-7.f), other)) + floats(1.f));
    return rounded(times_sigmoid(gate, rounded(gate * floats(1.702f)))) * other;
  }
  return rounded(activated(gate, act)) * other;
}

inline Floats ungated(Floats x, int act) {
  if (act == NO_ACTIVATION) return x;
  x = rounded(x);
  if (act > UNGATED && act != UNGATED + RELU) return activated(x, act - UNGATED);
  x = max(floats(0.f), x);
  return act == RELU_SQUARED ? x * x : x;
}

// Memory of one thread, which lives as long as the thread and only grows; new memory is zeroed.
template <class T>
struct Scratch {
  T* data = nullptr;
  size_t size = 0;
  T* at_least(size_t count) {
    if (count > size) {
      free(data);
      size_t bytes = (count * sizeof(T) + 4095) & ~(size_t)4095;
      data = (T*)aligned_alloc(4096, bytes);
      if (!data) abort();  // out of memory: a step cannot recover from it
      memset(data, 0, bytes);
      size = count;
    }
    return data;
  }
  ~Scratch() { free(data); }
};

}  // namespace quire

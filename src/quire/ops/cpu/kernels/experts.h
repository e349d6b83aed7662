// The routed experts of a mixture layer. ops/cpu/experts.py fills them in.
#pragma once
#include "layer.h"

namespace quire {

struct Experts {  // fixed once the model is loaded
  const Weight *gate_up, *down;  // of each expert
  int64_t count, chosen, hidden;  // chosen: experts of a token
  int64_t act;
};

}  // namespace quire

EXPORT void quire_experts(const quire::Experts* experts, const quire::bf16* x, long x_row, const int64_t* ids,
                          const float* weights, quire::bf16* y, long tokens);
EXPORT void quire_per_head(const quire::Weight* weights, long heads, const quire::bf16* x, long x_row, long x_head, quire::bf16* y,
                           long y_row, long y_head, long tokens);
EXPORT void quire_expert_products(const quire::Experts* experts, int down, const quire::bf16* x, long x_row, long rows, const int64_t* ids,
                                  long pairs, quire::bf16* y, long outs);
EXPORT void quire_weighted_sum(const quire::bf16* x, const int64_t* places, const float* weights, quire::bf16* y, long tokens, long chosen,
                               long D);

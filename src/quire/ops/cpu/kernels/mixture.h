// The MLP of a mixture layer: router, experts, and maybe a shared expert. native/mixture_half.py fills it in.
#pragma once
#include "experts.h"
#include "route.h"

namespace quire {

struct Mixture {  // fixed once the model is loaded
  Weight router, shared_gate_up, shared_down, shared_gate;  // the last three may have no data
  const float *router_weight, *router_bias;                 // of a router in float, in place of `router`; or null
  const float* correction;                                  // may be null
  RankLink* ranks;                                          // each has a part of every expert's outputs; null: the experts are whole
  Routing routing;
  Experts experts;
  int64_t shared_act;
  int64_t on_input;  // a router's weight multiplies the input of its expert, of which a token has one
};

// x = the mixture's output; x: [tokens, hidden].
void compute(const Mixture& m, bf16* x, long tokens);

}  // namespace quire

EXPORT void quire_add_shared(quire::bf16* y, const quire::bf16* shared, const quire::bf16* gate, long gate_row, long rows, long D);

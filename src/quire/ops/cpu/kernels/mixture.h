// The MLP of a mixture layer: router, experts, and maybe a shared expert. native/mixture_half.py fills it in.
#pragma once
#include "experts.h"
#include "route.h"

namespace quire {

struct Mixture {  // fixed once the model is loaded
  Weight router, shared_gate_up, shared_down, shared_gate;  // the last three may have no data
  const float *router_weight, *router_bias;                 // of a router in float, in place of `router`; or null
  const float* correction;                                  // may be null
  RankLink* ranks;                                          // that share the experts; null: this rank has all
  const int64_t *first_seat, *seats;                        // where whole experts are: see compute_placed; null: ranks have parts of all
  int64_t* loads;                                           // of whole experts: each one's pairs up to now
  Routing routing;
  Experts experts;
  int64_t count;  // of the experts that the router chooses among
  int64_t shared_act;
  int64_t on_input;  // a router's weight multiplies the input of its expert, of which a token has one
};

// x = the mixture's output; x: [tokens, hidden].
void compute(const Mixture& m, bf16* x, long tokens);

}  // namespace quire

EXPORT void quire_add_shared(quire::bf16* y, const quire::bf16* shared, const quire::bf16* gate, long gate_row, long rows, long D);

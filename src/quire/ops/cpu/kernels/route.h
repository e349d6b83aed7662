// How a router chooses experts: `Routing` of ops/experts.py, which says what the fields mean. ops/cpu/experts.py fills it in.
#pragma once
#include "common.h"

namespace quire {

enum Score { SOFTMAX, SIGMOID, LOGITS };

struct Routing {
  int64_t k, score, renormalize, rounds, groups, top_groups, top2;
  float eps, scale;
};

}  // namespace quire

EXPORT void quire_router_logits(const quire::bf16* x, long x_row, const float* w, const float* bias, float* y, long tokens, long experts,
                                long D);
EXPORT void quire_route(const float* logits, const float* bias, const quire::Routing* how, long tokens, long experts, int64_t* ids,
                        float* weights);

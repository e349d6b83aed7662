// Where the fields of each struct are that Python fills. ops/cpu/structs.py compares it with its own when the library loads.
#include "layout.h"

#include <stddef.h>

#include "experts.h"
#include "route.h"
#include "step.h"

using namespace quire;

#define FIELD(S, f) {#S, #f, (int64_t)offsetof(S, f), (int64_t)sizeof(S::f)}
#define WHOLE(S) {#S, "", 0, (int64_t)sizeof(S)}

static const FieldLayout LAYOUTS[] = {
    WHOLE(Weight), FIELD(Weight, data), FIELD(Weight, scale), FIELD(Weight, sum), FIELD(Weight, zero), FIELD(Weight, order),
    FIELD(Weight, blocks), FIELD(Weight, bias), FIELD(Weight, outs), FIELD(Weight, ins), FIELD(Weight, group),

    WHOLE(Routing), FIELD(Routing, k), FIELD(Routing, score), FIELD(Routing, renormalize), FIELD(Routing, rounds),
    FIELD(Routing, groups), FIELD(Routing, top_groups), FIELD(Routing, top2), FIELD(Routing, eps), FIELD(Routing, scale),

    WHOLE(Experts), FIELD(Experts, gate_up), FIELD(Experts, down), FIELD(Experts, count), FIELD(Experts, chosen),
    FIELD(Experts, hidden), FIELD(Experts, act),

    WHOLE(Layer), FIELD(Layer, qkv), FIELD(Layer, o), FIELD(Layer, gate_up), FIELD(Layer, down), FIELD(Layer, first_norm),
    FIELD(Layer, second_norm), FIELD(Layer, q_norm), FIELD(Layer, k_norm), FIELD(Layer, keys), FIELD(Layer, values),
    FIELD(Layer, key_scales), FIELD(Layer, value_scales), FIELD(Layer, sinks), FIELD(Layer, kind), FIELD(Layer, hidden),
    FIELD(Layer, heads), FIELD(Layer, kv_heads), FIELD(Layer, D), FIELD(Layer, turns), FIELD(Layer, block_size),
    FIELD(Layer, window), FIELD(Layer, act), FIELD(Layer, eps), FIELD(Layer, head_eps), FIELD(Layer, scale), FIELD(Layer, softcap),

    WHOLE(Step), FIELD(Step, cos), FIELD(Step, sin), FIELD(Step, positions), FIELD(Step, slots), FIELD(Step, table),
    FIELD(Step, starts), FIELD(Step, lengths), FIELD(Step, tokens), FIELD(Step, rows), FIELD(Step, table_step),
    FIELD(Step, pairs),

    WHOLE(Model), FIELD(Model, head), FIELD(Model, layers), FIELD(Model, groups), FIELD(Model, cos), FIELD(Model, sin),
    FIELD(Model, norm), FIELD(Model, table), FIELD(Model, count), FIELD(Model, num_groups), FIELD(Model, positions),
    FIELD(Model, pairs), FIELD(Model, packed), FIELD(Model, blocks), FIELD(Model, vocab), FIELD(Model, eps),

    WHOLE(Rows), FIELD(Rows, tokens), FIELD(Rows, num_computed_tokens), FIELD(Rows, length), FIELD(Rows, blocks), FIELD(Rows, params),
    FIELD(Rows, tokens_step), FIELD(Rows, blocks_step),

    WHOLE(RowParams), FIELD(RowParams, temperature), FIELD(RowParams, seed), FIELD(RowParams, top_k), FIELD(RowParams, top_p),
    FIELD(RowParams, log_min_p),
};

EXPORT int quire_layouts(const FieldLayout** first) {
  *first = LAYOUTS;
  return (int)(sizeof(LAYOUTS) / sizeof(*LAYOUTS));
}

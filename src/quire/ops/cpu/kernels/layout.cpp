// Where the fields of each struct are that Python fills. ops/cpu/structs.py compares it with its own when the library loads.
#include "layout.h"

#include <stddef.h>

#include "delta_net.h"
#include "encoder.h"
#include "mamba2_mixer.h"
#include "mixture.h"
#include "step.h"

using namespace quire;

#define FIELD(S, f) {#S, #f, (int64_t)offsetof(S, f), (int64_t)sizeof(S::f)}
#define WHOLE(S) {#S, "", 0, (int64_t)sizeof(S)}

static const FieldLayout LAYOUTS[] = {
    WHOLE(Weight), FIELD(Weight, data), FIELD(Weight, scale), FIELD(Weight, sum), FIELD(Weight, zero), FIELD(Weight, codes), FIELD(Weight, order),
    FIELD(Weight, blocks), FIELD(Weight, bias), FIELD(Weight, outs), FIELD(Weight, ins), FIELD(Weight, group), FIELD(Weight, lora),
    FIELD(Weight, x_ranks), FIELD(Weight, y_ranks),

    WHOLE(LoraPart), FIELD(LoraPart, start), FIELD(LoraPart, outs), FIELD(LoraPart, first), FIELD(LoraPart, rank), FIELD(LoraPart, at),
    FIELD(LoraPart, scale),

    WHOLE(Lora), FIELD(Lora, a), FIELD(Lora, b), FIELD(Lora, gain), FIELD(Lora, offset), FIELD(Lora, parts), FIELD(Lora, count),
    FIELD(Lora, rank), FIELD(Lora, ins), FIELD(Lora, is_bf16),

    WHOLE(RankLink), FIELD(RankLink, memory), FIELD(RankLink, rank), FIELD(RankLink, size), FIELD(RankLink, slot),
    FIELD(RankLink, timeout_ms), FIELD(RankLink, lost), FIELD(RankLink, fault),

    WHOLE(Routing), FIELD(Routing, k), FIELD(Routing, score), FIELD(Routing, renormalize), FIELD(Routing, rounds),
    FIELD(Routing, groups), FIELD(Routing, top_groups), FIELD(Routing, top2), FIELD(Routing, eps), FIELD(Routing, scale),

    WHOLE(Experts), FIELD(Experts, gate_up), FIELD(Experts, down), FIELD(Experts, count), FIELD(Experts, chosen),
    FIELD(Experts, hidden), FIELD(Experts, act),

    WHOLE(Norm), FIELD(Norm, weight), FIELD(Norm, bias), FIELD(Norm, kind), FIELD(Norm, eps),

    WHOLE(Mixture), FIELD(Mixture, router), FIELD(Mixture, shared_gate_up), FIELD(Mixture, shared_down), FIELD(Mixture, shared_gate),
    FIELD(Mixture, router_weight), FIELD(Mixture, router_bias),
    FIELD(Mixture, correction), FIELD(Mixture, ranks), FIELD(Mixture, first_seat), FIELD(Mixture, seats), FIELD(Mixture, loads),
    FIELD(Mixture, routing), FIELD(Mixture, experts), FIELD(Mixture, count), FIELD(Mixture, shared_act), FIELD(Mixture, on_input),

    WHOLE(DeltaNet), FIELD(DeltaNet, in), FIELD(DeltaNet, gates), FIELD(DeltaNet, out), FIELD(DeltaNet, conv), FIELD(DeltaNet, norm),
    FIELD(DeltaNet, bias), FIELD(DeltaNet, a_log), FIELD(DeltaNet, conv_state), FIELD(DeltaNet, state), FIELD(DeltaNet, conv_step),
    FIELD(DeltaNet, state_step), FIELD(DeltaNet, key_heads), FIELD(DeltaNet, K), FIELD(DeltaNet, heads), FIELD(DeltaNet, V),
    FIELD(DeltaNet, taps), FIELD(DeltaNet, first_head), FIELD(DeltaNet, all_heads), FIELD(DeltaNet, all_key_heads), FIELD(DeltaNet, interleaved), FIELD(DeltaNet, eps),

    WHOLE(Mamba2Mixer), FIELD(Mamba2Mixer, in), FIELD(Mamba2Mixer, out), FIELD(Mamba2Mixer, conv), FIELD(Mamba2Mixer, conv_bias), FIELD(Mamba2Mixer, norm),
    FIELD(Mamba2Mixer, bias), FIELD(Mamba2Mixer, a_log), FIELD(Mamba2Mixer, skip), FIELD(Mamba2Mixer, conv_state), FIELD(Mamba2Mixer, state), FIELD(Mamba2Mixer, conv_step),
    FIELD(Mamba2Mixer, state_step), FIELD(Mamba2Mixer, groups), FIELD(Mamba2Mixer, K), FIELD(Mamba2Mixer, heads), FIELD(Mamba2Mixer, V), FIELD(Mamba2Mixer, taps),
    FIELD(Mamba2Mixer, first_head), FIELD(Mamba2Mixer, norm_group), FIELD(Mamba2Mixer, gate_first), FIELD(Mamba2Mixer, low), FIELD(Mamba2Mixer, high), FIELD(Mamba2Mixer, eps),

    WHOLE(Layer), FIELD(Layer, qkv), FIELD(Layer, o), FIELD(Layer, gate_up), FIELD(Layer, down), FIELD(Layer, attention_in),
    FIELD(Layer, attention_out), FIELD(Layer, mlp_in), FIELD(Layer, mlp_out), FIELD(Layer, q_norm), FIELD(Layer, k_norm),
    FIELD(Layer, v_norm), FIELD(Layer, keys), FIELD(Layer, values), FIELD(Layer, key_scales), FIELD(Layer, value_scales),
    FIELD(Layer, sinks), FIELD(Layer, delta_net), FIELD(Layer, mamba2_mixer), FIELD(Layer, mixture), FIELD(Layer, kind), FIELD(Layer, hidden), FIELD(Layer, heads), FIELD(Layer, kv_heads), FIELD(Layer, D),
    FIELD(Layer, rope), FIELD(Layer, interleaved), FIELD(Layer, block_size), FIELD(Layer, window), FIELD(Layer, act),
    FIELD(Layer, kv_parts), FIELD(Layer, flat_norms), FIELD(Layer, gated), FIELD(Layer, parallel), FIELD(Layer, flat_ranks), FIELD(Layer, kv_copies), FIELD(Layer, joined), FIELD(Layer, scale), FIELD(Layer, softcap), FIELD(Layer, residual_scale),

    WHOLE(EncoderLayer), FIELD(EncoderLayer, qkv), FIELD(EncoderLayer, o), FIELD(EncoderLayer, up), FIELD(EncoderLayer, down),
    FIELD(EncoderLayer, after_attention), FIELD(EncoderLayer, after_mlp), FIELD(EncoderLayer, bias), FIELD(EncoderLayer, heads),
    FIELD(EncoderLayer, kv_heads), FIELD(EncoderLayer, D), FIELD(EncoderLayer, window), FIELD(EncoderLayer, act),
    FIELD(EncoderLayer, distances), FIELD(EncoderLayer, rotary), FIELD(EncoderLayer, runs), FIELD(EncoderLayer, scale),

    WHOLE(EncoderStep), FIELD(EncoderStep, cos), FIELD(EncoderStep, sin), FIELD(EncoderStep, starts), FIELD(EncoderStep, counts),
    FIELD(EncoderStep, pairs),

    WHOLE(Step), FIELD(Step, cos), FIELD(Step, sin), FIELD(Step, query_scale), FIELD(Step, positions), FIELD(Step, slots), FIELD(Step, state_rows), FIELD(Step, kept),
    FIELD(Step, table), FIELD(Step, starts), FIELD(Step, lengths), FIELD(Step, tokens), FIELD(Step, rows), FIELD(Step, table_step),
    FIELD(Step, pairs),

    WHOLE(Group), FIELD(Group, cos), FIELD(Group, sin), FIELD(Group, query_scale), FIELD(Group, pairs), FIELD(Group, blocks),

    WHOLE(Model), FIELD(Model, head), FIELD(Model, norm), FIELD(Model, layers), FIELD(Model, group_of_layer), FIELD(Model, groups),
    FIELD(Model, table), FIELD(Model, blocks), FIELD(Model, recorded), FIELD(Model, states), FIELD(Model, count), FIELD(Model, num_groups), FIELD(Model, positions), FIELD(Model, packed),
    FIELD(Model, vocab), FIELD(Model, num_recorded), FIELD(Model, state_rows), FIELD(Model, embedding_scale), FIELD(Model, logit_scale), FIELD(Model, softcap),
    FIELD(Model, table_ranks), FIELD(Model, words),

    WHOLE(Rows), FIELD(Rows, tokens), FIELD(Rows, num_computed_tokens), FIELD(Rows, length), FIELD(Rows, num_drafts), FIELD(Rows, blocks),
    FIELD(Rows, params), FIELD(Rows, adapters), FIELD(Rows, rope_offset), FIELD(Rows, tokens_step), FIELD(Rows, blocks_step), FIELD(Rows, shift),

    WHOLE(Speculator), FIELD(Speculator, model), FIELD(Speculator, states), FIELD(Speculator, embedding_norm), FIELD(Speculator, state_norm),
    FIELD(Speculator, join), FIELD(Speculator, target_ids), FIELD(Speculator, target_vocab), FIELD(Speculator, normed_residual),
    FIELD(Speculator, hands_on_sum),

    WHOLE(RowParams), FIELD(RowParams, temperature), FIELD(RowParams, seed), FIELD(RowParams, top_k), FIELD(RowParams, top_p),
    FIELD(RowParams, log_min_p),
};

EXPORT int quire_layouts(const FieldLayout** first) {
  *first = LAYOUTS;
  return (int)(sizeof(LAYOUTS) / sizeof(*LAYOUTS));
}

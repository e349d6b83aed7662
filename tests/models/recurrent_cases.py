"""Tiny checkpoints of every native architecture with recurrent layers, in every variation; see `cases.py`."""

from __future__ import annotations

from typing import Any

from tests.models.cases import Case

NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.25,
    },
}


def case(kind: str, name: str = "", base: dict[str, Any] | None = None, **config: Any) -> Case:
    return Case(name or kind, kind, {**(base or {}), **config})


CASES = [
    case("qwen3_5_text", "qwen3_5", NET),
    case("qwen3_5_text", "qwen3_5 one head", NET, linear_num_value_heads=2, attention_bias=True),
    case("qwen3_5_text", "qwen3_5 tiled", NET, hidden_size=64, intermediate_size=96, head_dim=128, linear_key_head_dim=32),
    case("qwen3_5_text", "qwen3_5 odd", NET, linear_num_value_heads=8, linear_key_head_dim=12, linear_value_head_dim=20),
]  # fmt: skip

MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "hidden_size": 64,
    "head_dim": None,
    "num_hidden_layers": 3,
}
EXPERTS = {
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GRANITE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "embedding_multiplier": 2.0,
    "logits_scaling": 0.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    **MAMBA2,
    **EXPERTS,
}
FALCON = {
    "mamba_d_ssm": 128,
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 1.5,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.6,
    "attention_out_multiplier": 0.9,
    "attention_in_multiplier": 1.2,
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.4, 1.1],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.8,
    **MAMBA2,
}
NEMOTRON = {
    "num_hidden_layers": None,
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "time_step_min": 1e-9,
    "routed_scaling_factor": 1.7,
}
LFM2 = {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
    "head_dim": None,
    "tie_word_embeddings": False,
}
JAMBA = {
    "head_dim": None,
    "num_hidden_layers": 4,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "expert_layer_period": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
ALONE = {"state_size": 16, "head_dim": None, "intermediate_size": None, "num_attention_heads": None}
MIXTURE = {**NET, **EXPERTS, "shared_expert_intermediate_size": 32}
CASES += [
    case("qwen3_next", "qwen3 next", MIXTURE, norm_topk_prob=False, mlp_only_layers=[1]),
    case("qwen3_next", "qwen3 next r=1", MIXTURE, linear_num_value_heads=2),
    case("qwen3_5_moe_text", "qwen3_5 moe", MIXTURE, linear_num_value_heads=8),
    case("mamba", "mamba", ALONE),
    case("falcon_mamba", "falcon_mamba", ALONE, use_bias=True, tie_word_embeddings=False, mixer_rms_eps=1e-3),
    case("mamba2", "mamba2", ALONE, num_heads=6, head_dim=16, n_groups=2, chunk_size=8),
    case("bamba", "bamba", MAMBA2, attn_layer_indices=[1], intermediate_size=96),
    case("granitemoehybrid", "granite 4 h", GRANITE),
    case("granitemoehybrid", "granite 4 h dense", GRANITE, num_local_experts=0, position_embedding_type="rope"),
    case("jamba", "jamba", JAMBA),
    case("nemotron_h", "nemotron h", NEMOTRON),
    case("nemotron_h", "nemotron h latent", NEMOTRON, moe_latent_size=24, n_group=2, mlp_bias=True),
    case("falcon_h1", "falcon h1", FALCON),
    case("falcon_h1", "falcon h1 norm", FALCON, mamba_rms_norm=True),
    case("falcon_h1", "falcon h1 gate first", FALCON, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True),
    case("lfm2", "lfm2", LFM2, block_multiple_of=16, block_ffn_dim_multiplier=1.3),
    case("lfm2", "lfm2 biases", LFM2, conv_bias=True, block_auto_adjust_ff_dim=False, conv_L_cache=4),
    case("lfm2_moe", "lfm2 moe", LFM2, **EXPERTS, num_dense_layers=1, routed_scaling_factor=1.4),
]  # fmt: skip
GEMMA = {
    "head_dim": None,
    "num_hidden_layers": 3,
    "attention_window_size": 8,
    "intermediate_size": 96,
}
CASES += [
    case("recurrent_gemma", "recurrent gemma", GEMMA),
    case("recurrent_gemma", "recurrent gemma wide", GEMMA, lru_width=80, num_key_value_heads=4, hidden_size=64, attention_bias=True, logits_soft_cap=3.0),
    case("rwkv", "rwkv", ALONE, rescale_every=2, num_hidden_layers=3),
]  # fmt: skip
ZAMBA = {
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
    "head_dim": None,
    "attention_head_dim": 24,
    "num_key_value_heads": None,
    "mamba_d_state": 16,
    "n_mamba_heads": 6,
    "mamba_ngroups": 2,
    "chunk_size": 8,
    "time_step_min": 1e-9,
    "adapter_rank": 8,
    "num_mem_blocks": 2,
    "tie_word_embeddings": False,
}
CASES += [
    case("zamba2", "zamba2", ZAMBA, use_mem_rope=True, use_shared_attention_adapter=True),
    case("zamba2", "zamba2 plain", ZAMBA, num_mem_blocks=1, add_bias_linear=True),
]

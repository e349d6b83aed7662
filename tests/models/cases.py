"""Tiny checkpoints of every native architecture, in every variation that its config.json can ask for.

One row is one test of `test_native.py`. Transformers writes the checkpoint (random everywhere: norms of one and
biases of zero hide mistakes) and says what the logits are.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.models.archs import randomise

VOCAB = 131
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
TRAINED = {"original_max_position_embeddings": 64}
FACTORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.5, 1.6, 2.0, 2.5, 3.0],
    "long_factor": [4.0] * 4 + [6.0] * 4,
}


@dataclass(frozen=True)
class Case:
    """`kind` is Transformers' model_type; `config` goes over BASE, and None takes a key out.

    `file`: what the test writes over config.json afterwards (older spellings of the same).
    """

    name: str
    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    file: dict[str, Any] = field(default_factory=dict)


def rope(name: str, rope_type: str, config: dict[str, Any] | None = None, **more: Any) -> Case:
    parameters = {"rope_type": rope_type, "rope_theta": 5000.0, **more}
    return Case(f"llama {name}", "llama", {"rope_parameters": parameters, **(config or {})})


THREE = {
    "num_hidden_layers": 3,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, **TRAINED}
GEMMA2 = {
    **THREE,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.5,
}
BOTH_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "num_hidden_layers": 3,
}
YARN_MLA = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "mscale": 0.8, **TRAINED}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}
MOE = {
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
ERNIE_MOE = {
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 2,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
SHARED = {
    "n_routed_experts": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
}
LLAMA4 = {
    "num_experts_per_tok": 1,
    "num_hidden_layers": 3,
    "no_rope_layers": [1, 0, 1],
    "intermediate_size": 48,
    "intermediate_size_mlp": 40,
    "interleave_moe_layer_step": 2,
    "floor_scale": 8,
    "attn_scale": 0.7,
}
OSS = {
    "sliding_window": 6,
    "intermediate_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
OSS_ROPE = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "truncate": False, **TRAINED}
GEMMA4 = {
    "num_hidden_layers": 3,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 1.5,
}
CASES = [
    Case("llama", "llama"),
    Case("llama tied", "llama", {"tie_word_embeddings": True}),
    Case("llama biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama gelu", "llama", {"hidden_act": "gelu"}),
    Case("llama gelu tanh", "llama", {"hidden_act": "gelu_pytorch_tanh"}),
    Case("llama of few keys", "llama", {"head_dim": None}, {"head_dim": None, "mlp_bias": None}),
    Case("llama one kv head", "llama", {"num_key_value_heads": 1}),
    Case("llama all heads", "llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    rope("linear", "linear", factor=4.0),
    rope("dynamic", "dynamic", factor=2.0),  # within the trained length; beyond it: test_rope.py
    rope("yarn", "yarn", factor=4.0, **TRAINED),
    rope(
        "yarn tuned", "yarn", factor=4.0, beta_fast=16, beta_slow=2, attention_factor=1.3, **TRAINED
    ),
    rope(
        "yarn mscale", "yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.2, truncate=False, **TRAINED
    ),
    rope("longrope", "longrope", **FACTORS, **TRAINED),
    rope("llama3", "llama3", **LLAMA3),
    Case(
        "llama3 old spelling",
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3}},
        {
            "rope_parameters": None,
            "rope_theta": 5000.0,
            "rope_scaling": {"type": "llama3", **LLAMA3},
        },
    ),
    Case("mistral", "mistral", {"sliding_window": None}, {"sliding_window": None}),
    Case("mistral window", "mistral", {"sliding_window": 7}),
    Case("mistral wide heads", "mistral", {"sliding_window": None, "head_dim": 32}),
    Case("qwen2", "qwen2"),
    Case("qwen2 tied", "qwen2", {"tie_word_embeddings": True, "head_dim": None}),
    Case(
        "qwen2 windows above",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    Case(
        "qwen2 windows, old spelling",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {"layer_types": None},
    ),
    Case("qwen3", "qwen3"),
    Case("qwen3 tied", "qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    Case("qwen3 biases", "qwen3", {"attention_bias": True}),
    Case(
        "qwen3 by layer types",
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Case("mixtral", "mixtral", MOE),
    Case("mixtral window", "mixtral", {**MOE, "sliding_window": 7, "num_experts_per_tok": 1}),
    Case(
        "qwen2 moe", "qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40, "head_dim": None}
    ),
    Case(
        "qwen2 moe renormalized",
        "qwen2_moe",
        {**MOE, "shared_expert_intermediate_size": 24, "norm_topk_prob": True, "head_dim": None},
    ),
    Case("qwen3 moe", "qwen3_moe", {**MOE, "norm_topk_prob": True}),
    Case(
        "qwen3 moe, some dense",
        "qwen3_moe",
        {**MOE, "num_hidden_layers": 3, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    Case("qwen3 moe, one dense", "qwen3_moe", {**MOE, "mlp_only_layers": [0]}),
    Case("olmoe", "olmoe", {**MOE, "head_dim": None}),
    Case(
        "olmoe clipped",
        "olmoe",
        {**MOE, "head_dim": None, "clip_qkv": 0.5, "norm_topk_prob": True},
    ),
    Case("minimax m2", "minimax_m2", MOE),
    Case("minimax m2 partial rope", "minimax_m2", {**MOE, "rotary_dim": 8}),
    Case("llama4", "llama4_text", {**MOE, **LLAMA4}),
    Case(
        "llama4 top two",
        "llama4_text",
        {
            **MOE,
            **LLAMA4,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "moe_layers": [1],
            "attn_temperature_tuning": False,
        },
    ),
    Case("phimoe", "phimoe", {**MOE, "num_experts_per_tok": 2, "head_dim": None}),
    Case(
        "phimoe with longrope",
        "phimoe",
        {
            **MOE,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "sliding_window": 7,
            "attention_bias": True,
            "lm_head_bias": True,
            "head_dim": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                **TRAINED,
                "short_mscale": 1.3,
                "long_mscale": 1.1,
                "factor": 4.0,
                **{key: factors[:6] for key, factors in FACTORS.items()},
            },
        },
    ),
    Case(
        "granite moe",
        "granitemoe",
        {
            **MOE,
            "head_dim": None,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
            "logits_scaling": 0.6,
        },
    ),
    Case("gpt-oss", "gpt_oss", {**MOE, **OSS, "rope_parameters": OSS_ROPE}),
    Case(
        "gpt-oss without yarn",
        "gpt_oss",
        {**MOE, **OSS, "num_local_experts": 5},
        {"layer_types": None},
    ),
    Case("glm4 moe", "glm4_moe", {**MOE, **SHARED}),
    Case("dots1", "dots1", {**MOE, **SHARED, "sliding_window": 8, "max_window_layers": 1}),
    Case(
        "granite moe shared",
        "granitemoeshared",
        {
            **MOE,
            "head_dim": None,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.6,
        },
    ),
    Case(
        "granite moe without shared",
        "granitemoeshared",
        {**MOE, "head_dim": None, "shared_intermediate_size": 0, "logits_scaling": 0.6},
    ),
    Case("ernie4_5 moe", "ernie4_5_moe", ERNIE_MOE),
    Case(
        "ernie4_5 moe biases",
        "ernie4_5_moe",
        {
            **ERNIE_MOE,
            "use_bias": True,
            "moe_layer_interval": 2,
            "num_hidden_layers": 5,
            "moe_layer_end_index": 2,
        },
    ),
    Case(
        "glm4 moe in groups",
        "glm4_moe",
        {
            **MOE,
            **SHARED,
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    Case("ernie4_5", "ernie4_5", {"tie_word_embeddings": False}),
    Case("ernie4_5 biases", "ernie4_5", {"use_bias": True}),
    Case("smollm3", "smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    Case("seed_oss", "seed_oss", {"attention_bias": True, "attention_out_bias": True}),
    Case(
        "granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
    ),
    Case(
        "ministral3",
        "ministral3",
        {
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.6,
            }
        },
    ),
    Case("phi3", "phi3", {"sliding_window": 7, "head_dim": None}),
    Case(
        "phi3 longrope",
        "phi3",
        {
            "head_dim": None,
            "hidden_size": 64,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": FACTORS["short_factor"][:6],
                "long_factor": FACTORS["long_factor"][:6],
                **TRAINED,
            },
            **TRAINED,
        },
    ),
    Case("gemma", "gemma", {"hidden_act": "gelu"}),
    Case("gemma2", "gemma2", GEMMA2),
    Case(
        "gemma2 old spelling", "gemma2", {"sliding_window": 5}, {"layer_types": None, "dtype": None}
    ),
    Case(
        "gemma3",
        "gemma3_text",
        {**GEMMA2, "attn_logit_softcapping": None, "rope_parameters": BOTH_ROPES},
    ),
    Case(
        "gemma3 old spelling",
        "gemma3_text",
        {
            **THREE,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": BOTH_ROPES,
        },
        {
            "layer_types": None,
            "rope_parameters": None,
            "sliding_window_pattern": 3,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    Case(
        "gemma4",
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
        },
    ),
    Case(
        "gemma4 values from keys",
        "gemma4_text",
        {**GEMMA4, "attention_k_eq_v": True},
        {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1},
    ),
    Case("gemma4 unified", "gemma4_unified_text", {**GEMMA4, "attention_k_eq_v": True}),
    Case(
        "gemma4 moe",
        "gemma4_text",
        {**GEMMA4, **MOE, "enable_moe_block": True, "top_k_experts": 2},
    ),
    Case("glm", "glm"),
    Case("glm4", "glm4"),
    Case("olmo2", "olmo2", {"attention_bias": True, "head_dim": None}),
    Case("olmo3", "olmo3", {**THREE, "rope_parameters": {"full_attention": YARN}}),
    Case(
        "olmo3 old spelling",
        "olmo3",
        {
            **THREE,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
        {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": YARN},
    ),
    Case("exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    Case("exaone4 windows", "exaone4", THREE),
    Case("cohere", "cohere", {"logit_scale": 1.5, "head_dim": None, "use_qk_norm": True}),
    Case("cohere2", "cohere2", {**THREE, "logit_scale": 1.5, "head_dim": None}),
    Case("deepseek v2", "deepseek_v2", {**MLA, "topk_method": "group_limited_greedy"}),
    Case("deepseek v2 lite", "deepseek_v2", {**MLA, "q_lora_rank": None, "topk_method": "greedy"}),
    Case("deepseek v3", "deepseek_v3", {**MLA, "attention_bias": True}),
    Case(
        "deepseek v3 yarn",
        "deepseek_v3",
        {**MLA, "rope_interleave": False, "rope_parameters": {**YARN_MLA, "mscale_all_dim": 1.3}},
    ),
    Case("glm4 moe lite", "glm4_moe_lite", MLA),
]
"""`keys left out` are covered by `file`: None there takes the key out of config.json."""


def write(case: Case, folder: Path, seed: int = 0) -> nn.Module:
    """Save the case's checkpoint into `folder`; returns Transformers' model of it, float32, in eval mode."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {**BASE, **case.config}
    explicit_none = {"sliding_window"}
    values = {k: v for k, v in values.items() if v is not None or k in explicit_none}
    config = CONFIG_MAPPING[case.kind](**copy.deepcopy(values))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomise(model)
    save(model, folder)
    if case.file:
        edit_config(folder, **case.file)
    return model


def save(model: nn.Module, folder: Path, **how: Any) -> None:
    """save_pretrained without its progress bar."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder, **how)


def edit_config(folder: Path, **values: Any) -> None:
    """Put values over config.json; None takes the key out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

"""The architectures that the generic backend is tested with: tiny configs, made at test time, nothing downloaded.

One row is one test of `test_generic.py` and one line of docs/models.md. The recipe: hidden 64, a few layers,
a window of 5 tokens (so that it matters in a prompt of 23), random norms and biases (zeros hide bugs), weights
large enough that logits have a range.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from packaging.version import Version

VOCAB = 199
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 16}
PAGED, PER_REQUEST = "paged", "per request"


@dataclass(frozen=True)
class Arch:
    """One model type of Transformers.

    Attributes:
        kind: `model_type`, the key of Transformers' tables.
        mode: the way in which the backend must run it.
        config: values over BASE; None takes the key out.
        name: of the row, where one kind has several.
        slow: only in the long run.
    """

    kind: str
    mode: str
    config: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    slow: bool = False

    @property
    def label(self) -> str:
        return self.name or self.kind


def paged(kind: str, name: str = "", slow: bool = False, **config: Any) -> Arch:
    return Arch(kind, PAGED, config, name, slow)


def per_request(kind: str, name: str = "", slow: bool = False, **config: Any) -> Arch:
    return Arch(kind, PER_REQUEST, config, name, slow)


def since_5_24(kind: str, **config: Any) -> Arch:
    """From that release on, its attention goes through the attention interface of Transformers."""
    old = Version(transformers.__version__) < Version("5.24")
    return Arch(kind, PER_REQUEST if old else PAGED, config)


_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96}
_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LAYERS3 = ["sliding_attention", "full_attention", "sliding_attention"]
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GDN = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}

_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}

ARCHS: list[Arch] = [
    # dense, attention only
    paged("llama"),
    paged(
        "llama",
        "llama (llama3 rope)",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    paged("llama", "llama (yarn)", rope_parameters=_YARN, tie_word_embeddings=True),
    paged("mistral", sliding_window=5, **HEAD),
    paged("ministral", sliding_window=5, layer_types=_LAYERS3, **HEAD),
    paged(
        "ministral3",
        rope_parameters={
            **_YARN,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.1,
        },
        **HEAD,
    ),
    paged("qwen2"),
    paged(
        "qwen2", "qwen2 (window)", use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    paged("qwen3", head_dim=32),
    paged("gemma", **HEAD),
    paged("gemma2", sliding_window=5, query_pre_attn_scalar=24, layer_types=_LAYERS3, **HEAD),
    paged("gemma3_text", sliding_window=5, layer_types=_LAYERS3, **HEAD),
    paged(
        "gemma3_text", "gemma3_text (wide window)", sliding_window=9, layer_types=_LAYERS3, **HEAD
    ),
    paged(
        "gemma4_text",
        sliding_window=5,
        layer_types=_LAYERS3,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        **HEAD,
    ),
    paged(
        "gemma3n_text",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=5,
        intermediate_size=[96] * 4,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        **HEAD,
    ),
    paged("vaultgemma", sliding_window=5, **HEAD),
    paged("phi"),
    paged("phi3", sliding_window=5),
    paged("glm", **HEAD),
    paged("glm4", **HEAD),
    paged("olmo", clip_qkv=1.5),
    paged("olmo2"),
    paged("olmo3", sliding_window=5, layer_types=_LAYERS3),
    paged(
        "granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    paged("granite_swa", sliding_window=5),
    paged("smollm3", no_rope_layers=[1, 0, 1]),
    paged("stablelm"),
    paged("starcoder2", sliding_window=5),
    paged("cohere", logit_scale=1.5),
    paged("cohere2", logit_scale=1.5, sliding_window=5, layer_types=_LAYERS3),
    paged("exaone4", sliding_window=5, layer_types=_LAYERS3),
    paged("gpt2", **_GPT2),
    paged("gpt_bigcode", **_GPT2),
    paged("gpt_neox"),
    paged("opt", ffn_dim=96, word_embed_proj_dim=64),
    paged("nemotron", **HEAD),
    paged("seed_oss", **HEAD),
    paged("ernie4_5", **HEAD),
    paged("hunyuan_v1_dense", **HEAD),
    paged("arcee", **HEAD),
    paged("helium", **HEAD),
    paged("apertus", **HEAD),
    paged("nanochat"),
    paged("persimmon"),
    paged("biogpt"),
    paged("internlm3", **HEAD),
    paged("cwm", sliding_window=5, layer_types=_LAYERS3, **HEAD),
    paged("jais2", **HEAD),
    paged("modernbert-decoder", local_attention=8),
    paged("bitnet"),
    paged("youtu", **_MLA),
    paged("minicpm3", **_MLA),
    paged("hyperclovax", **HEAD),
    since_5_24("gptj", **_GPT2, rotary_dim=8),
    since_5_24("codegen", **_GPT2, rotary_dim=8, n_ctx=256),
    # mixture of experts, attention only
    paged("mixtral", **_MOE),
    paged("qwen2_moe", shared_expert_intermediate_size=48, **_MOE),
    paged("qwen3_moe", **HEAD, **_MOE),
    paged("granitemoe", **_MOE),
    paged("granitemoeshared", shared_intermediate_size=32, **_MOE),
    paged("olmoe", **_MOE),
    paged("gpt_oss", sliding_window=5, layer_types=_LAYERS3, **HEAD, **_MOE),
    paged("phimoe", sliding_window=5, **_MOE),
    paged("deepseek_v2", **{**_MLA, **_SIGMOID, "topk_method": "group_limited_greedy"}),
    paged("deepseek_v3", **_MLA, **_SIGMOID),
    paged("glm4_moe", **HEAD, **_SIGMOID),
    paged("glm4_moe_lite", **_MLA, **_SIGMOID),
    paged("dots1", **HEAD, **_SIGMOID),
    paged(
        "llama4_text",
        no_rope_layers=[1, 0, 1],
        intermediate_size_mlp=96,
        attention_chunk_size=512,
        **HEAD,
        **_MOE,
    ),
    paged("minimax_m2", **HEAD, **_MOE),
    paged("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, **HEAD),
    paged("solar_open", **HEAD, **_SIGMOID),
    paged("hy_v3", **HEAD, **_MOE),
    paged("exaone_moe", sliding_window=5, **HEAD, **_MOE),
    paged("flex_olmo", **_MOE),
    paged("hunyuan_v1_moe", moe_topk=2, **HEAD, **_MOE),
    paged("jetmoe", kv_channels=16, **_MOE),
    paged("axk1", **_MLA, **_SIGMOID),
    paged("laguna", sliding_window=5, **HEAD, **_MOE),
    paged("mimo_v2_flash", sliding_window=5, **HEAD, **_SIGMOID),
    paged("cohere2_moe", logit_scale=1.5, sliding_window=5, **HEAD, **_MOE),
    paged(
        "longcat_flash",
        num_layers=2,
        num_hidden_layers=None,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        **_MLA,
    ),
    paged(
        "dbrx",
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=256,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={
            "hidden_size": 64,
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "ffn_act_fn": {"name": "silu"},
        },
        **dict.fromkeys(
            ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")
        ),
    ),
    # what is left to a cache of its own
    per_request("bloom", n_layer=2, n_head=4),
    per_request("falcon"),
    per_request("falcon", "falcon (alibi)", alibi=True, new_decoder_architecture=False),
    per_request("mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=256, expansion_ratio=2),
    per_request("xglm", d_model=64, attention_heads=4, num_layers=2, ffn_dim=96),
    per_request(
        "gpt_neo",
        num_hidden_layers=None,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=5,
    ),
    per_request("qwen3_5_text", **HEAD, **_GDN),
    per_request("qwen3_next", **HEAD, **_GDN, **_MOE, shared_expert_intermediate_size=32),
    per_request("olmo_hybrid", **_GDN),
    per_request("lfm2", layer_types=["conv", "full_attention", "conv"]),
    per_request(
        "lfm2_moe", layer_types=["conv", "full_attention", "conv"], **_MOE, num_dense_layers=1
    ),
    per_request("mamba", state_size=8),
    per_request("mamba2", num_heads=8, head_dim=16, state_size=8, n_groups=2, chunk_size=8),
    per_request("falcon_mamba", state_size=8),
    per_request(
        "nemotron_h",
        num_hidden_layers=None,
        layers_block_type=["mamba", "attention", "mlp", "moe"],
        **HEAD,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    per_request(
        "granitemoehybrid",
        layer_types=["mamba", "attention", "mamba"],
        shared_intermediate_size=48,
        **_MAMBA,
        **_MOE,
    ),
    per_request("falcon_h1", mamba_d_ssm=128, **_MAMBA),
    per_request("bamba", attn_layer_indices=[1], **_MAMBA),
    per_request(
        "jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    per_request(
        "zamba2",
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_ngroups=2,
        chunk_size=8,
        adapter_rank=8,
    ),
    per_request(
        "kimi_linear",
        linear_head_dim=16,
        linear_num_heads=4,
        num_local_experts=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **{**_MLA, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    per_request("minimax", block_size=4, **HEAD, **_MOE),
    per_request("deepseek_v32", **_MLA, **_SIGMOID),
    per_request("diffllama"),
    per_request("doge"),
]


def make_config(arch: Arch) -> Any:
    """The Transformers config of a row."""
    from transformers import CONFIG_MAPPING

    values = {k: v for k, v in {**BASE, **arch.config}.items() if v is not None}
    return CONFIG_MAPPING[arch.kind](**copy.deepcopy(values))  # some configs change their lists


def make_model(arch: Arch, seed: int = 0) -> Any:
    """The model of a row, random everywhere, float32, in eval mode."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(arch), dtype=torch.float32).eval()
        randomise(model)
    return model


@torch.no_grad()
def randomise(model: Any) -> None:
    """Give every weight a size that shows in the logits, and norms and biases something to be wrong about."""
    for name, tensor in model.named_parameters():
        if tensor.ndim >= 2 and not name.endswith(("A_log", "conv1d.weight")):
            tensor.normal_(0.0, 0.08)
        else:
            tensor.add_(torch.randn_like(tensor) * 0.1)
    for name, tensor in model.named_buffers():
        if name.endswith(("correction_bias", "layer_scalar")):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.tie_weights()

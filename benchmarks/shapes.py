"""Models and workloads of the benchmarks, and random checkpoints of the models.

Knows sizes. Does not know engines. The weights are random, so no download is needed: the work equals a real
model's of this shape, and the output is meaningless.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from benchmarks import shape_tensors
from benchmarks.made_up_words import write_tokenizer
from benchmarks.shape_tensors import ATTENTION, LAYERS, NAMES, RECURRENT, Size


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder. `ff` is the width of the MLP, or of an expert; `more`: further keys of config.json, for example of an untied head."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    family: str = "qwen3"
    experts: int = 0
    top_k: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layer_parameters(self) -> int:
        """Matrix elements of all layers."""
        return self.dense_parameters + self.expert_parameters

    @property
    def dense_parameters(self) -> int:
        """Matrix elements of the layers that each token uses."""
        found = {
            name: size for name, size in self.tensors() if ".layers." in name and len(size) > 1
        }
        return sum(prod(size) for size in found.values()) - self.expert_parameters

    @property
    def expert_parameters(self) -> int:
        """Matrix elements of all experts; a token uses `top_k` experts of a layer."""
        return self.layers * self.experts * 3 * self.hidden * self.ff

    @property
    def used_parameters(self) -> float:
        """Matrix elements of the layers that one token is multiplied by."""
        return self.dense_parameters + self.expert_parameters * self.top_k / max(self.experts, 1)

    def read_parameters(self, tokens: int) -> float:
        """Matrix elements of the layers that a step reads, if its tokens choose experts evenly."""
        unused = (1 - self.top_k / max(self.experts, 1)) ** tokens
        return self.dense_parameters + self.expert_parameters * (1 - unused)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def attention_layers(self) -> int:
        """The layers with keys and values."""
        return shape_tensors.layer_types(self).count(ATTENTION)

    @property
    def kv_elements(self) -> int:
        """Elements of a token's keys and values in all layers."""
        return 2 * self.attention_layers * self.kv_heads * self.head_dim

    @property
    def state_elements(self) -> int:
        """Elements of a request's recurrent state (float32) in all layers; a step reads and writes each once."""
        recurrent = shape_tensors.layer_types(self).count(RECURRENT)
        return recurrent * shape_tensors.layer_state(self)

    def tensors(self) -> Iterator[tuple[str, Size]]:
        """(checkpoint name, shape) of every weight; norms have one dimension."""
        at, embeddings, norm = NAMES.get(self.family, ("model", "embed_tokens", "norm"))
        yield f"{at}.{embeddings}.weight", (self.vocab, self.hidden)
        yield f"{at}.{norm}.weight", (self.hidden,)
        if not self.more.get("tie_word_embeddings", True):
            yield "lm_head.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            for name, size in LAYERS[self.family](self, layer):
                yield f"{at}.layers.{layer}.{name}", size


GEMMA3 = {
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6,
    "rope_local_base_freq": 10_000.0,
}  # fmt: skip
PHI4 = {
    "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096, "sliding_window": 262_144, "rope_theta": 10_000.0,
    "pad_token_id": 0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0 + 0.01 * i for i in range(48)],
                     "long_factor": [1.0 + 0.5 * i for i in range(48)]},
}  # fmt: skip
QWEN35 = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "partial_rotary_factor": 0.25, "attn_output_gate": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
GRANITE4H = {
    "layer_types": ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
    "mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False, "shared_intermediate_size": 2048,
    "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "nope", "embedding_multiplier": 12,
    "attention_multiplier": 0.015625, "residual_multiplier": 0.246, "logits_scaling": 3, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Granite-4.0-H-350M: 28 Mamba-2 layers and 4 of attention, each with an MLP."""
TINY_GRANITE4H = GRANITE4H | {
    "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
    "mamba_chunk_size": 16, "shared_intermediate_size": 128, "attention_multiplier": 0.0625,
}  # fmt: skip
NEMOTRON_H = {
    "hybrid_override_pattern": "M-M-M-M*-", "mamba_num_heads": 112, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "expand": 2, "chunk_size": 128, "use_conv_bias": True, "use_bias": False, "mlp_bias": False,
    "mamba_proj_bias": False, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "time_step_min": 1e-9,
    "tie_word_embeddings": False, "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
}  # fmt: skip
"""Nemotron-H-4B: the first 9 of its 52 layers. `time_step_min`: other engines have no lower limit of a step."""
TINY_NEMOTRON_H = NEMOTRON_H | {
    "hybrid_override_pattern": "M-M*-", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "chunk_size": 16,
}  # fmt: skip

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151_936),
        Shape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128_256, "llama"),
        Shape("moe-1.8b", 16, 1024, 16, 4, 128, 512, 32_768, "qwen3_moe", experts=64, top_k=4),
        Shape("qwen3.5-0.8b", 24, 1024, 8, 2, 256, 3584, 248_320, "qwen3_5_text", more=QWEN35),
        Shape("granite-4.0-h-350m", 32, 768, 12, 4, 64, 2048, 100_352, "granitemoehybrid", more=GRANITE4H),
        # With 32,768 of 131,072 tokens the head is the share of the work that it is in all 52 layers.
        Shape("nemotron-h-4b-9l", 9, 3072, 32, 8, 128, 12_288, 32_768, "nemotron_h", more=NEMOTRON_H),
        Shape("gemma-3-1b", 26, 1152, 4, 1, 256, 6912, 262_144, "gemma3_text", more=GEMMA3),
        Shape("phi-4-mini-8l", 8, 3072, 24, 8, 128, 8192, 200_064, "phi3", more=PHI4),
        Shape("tiny", 2, 64, 4, 2, 16, 128, 512),
        Shape("tiny-llama", 2, 128, 2, 1, 64, 256, 512, "llama"),
        Shape("tiny-moe", 2, 64, 4, 2, 16, 32, 512, "qwen3_moe", experts=8, top_k=2),
        Shape("tiny-gemma", 2, 64, 2, 1, 32, 128, 512, "gemma3_text", more=GEMMA3),
        Shape("tiny-granite", 3, 64, 4, 2, 16, 128, 512, "granitemoehybrid", more=TINY_GRANITE4H),
        Shape("tiny-nemotron", 5, 64, 4, 2, 16, 128, 512, "nemotron_h", more=TINY_NEMOTRON_H),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """`rows` requests of `prompt` tokens each, `output` tokens generated for each, greedily."""

    rows: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.prompt}/{self.output}"

    def prompts(self, vocab: int) -> list[list[int]]:
        """Random tokens, the same in every run; no two requests share a prefix."""
        import random

        rng = random.Random(f"{self.name}")
        return [[rng.randrange(vocab) for _ in range(self.prompt)] for _ in range(self.rows)]


WORKLOADS = [
    Workload(1, 32, 64),
    Workload(1, 1024, 1),
    Workload(8, 128, 64),
    Workload(32, 128, 64),
    Workload(32, 512, 64),
]


ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}


def config_of(shape: Shape, dtype: str) -> dict[str, Any]:
    experts = {
        "num_experts": shape.experts, "num_experts_per_tok": shape.top_k, "moe_intermediate_size": shape.ff, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    return {
        "architectures": [ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "dtype": dtype,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ff,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        **(experts if shape.experts else {}),
        **shape.more,
    }


def checkpoint(
    shape: Shape,
    dtype: str,
    folder: Path,
    change: Callable[[str, Any], None] = lambda name, weight: None,
) -> Path:
    """A directory with config.json, random weights and a tokenizer of made-up words; made once, then reused. `change` may
    alter a weight, by its name."""
    import torch
    from safetensors.torch import save_file

    path = folder / f"{shape.name}-{dtype}"
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path, shape.vocab)
    done = path / "config.json"  # written last
    if done.exists():
        return path
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, size in shape.tensors():
        weight = shape_tensors.random_weight(name, size, getattr(torch, dtype), generator)
        change(name, weight)
        weights[name] = weight
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    done.write_text(json.dumps(config_of(shape, dtype), indent=2), encoding="utf-8")
    return path


def compressed(path: Path) -> Path:
    """The checkpoint as compressed-tensors W8A8: int8 weights with a scale per output, dynamic int8 activations per
    token. Made once, beside the first one."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = path.with_name(f"{path.name}-w8a8")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, config["vocab_size"])
    done = folder / "config.json"  # written last
    if done.exists():
        return folder
    weights = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            weights[name] = weight
            continue
        scale_O1 = weight.float().abs().amax(1, keepdim=True) / 127
        weights[name] = (weight.float() / scale_O1).round_().to(torch.int8)
        weights[f"{name}_scale"] = scale_O1.to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    how = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    done.write_text(json.dumps(config | {"quantization_config": how}, indent=2), encoding="utf-8")
    return folder


def add_options(parser: argparse.ArgumentParser, default: str = "qwen3-0.6b") -> None:
    """Options of the benchmarks that run a random checkpoint: --shape, --cache, --out."""
    add, cache = parser.add_argument, Path(tempfile.gettempdir()) / "quire-bench"
    add("--shape", choices=SHAPES, default=default, help="model")
    add("--cache", type=Path, default=cache, help="folder of the random checkpoints")
    add("--out", type=Path, help="folder for the result; unset: print only")

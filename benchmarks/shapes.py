"""Models and workloads of the benchmarks, and random checkpoints of the models.

Knows sizes. Does not know engines. The weights are random, so no download is needed: the work is that of a real model
of this shape, and the output is meaningless.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with a tied head: Qwen3, or Llama, which has no QK-norm."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    family: str = "qwen3"

    @property
    def layer_parameters(self) -> int:
        """Matrix elements of all layers; each token uses each once."""
        qkv_o = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (qkv_o + 3 * self.hidden * self.ff)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_elements(self) -> int:
        """Elements of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(checkpoint name, shape) of every weight; norms have one dimension."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.self_attn.q_proj.weight", (q, self.hidden)
            yield f"{at}.self_attn.k_proj.weight", (kv, self.hidden)
            yield f"{at}.self_attn.v_proj.weight", (kv, self.hidden)
            yield f"{at}.self_attn.o_proj.weight", (self.hidden, q)
            if self.family == "qwen3":
                yield f"{at}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{at}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{at}.mlp.gate_proj.weight", (self.ff, self.hidden)
            yield f"{at}.mlp.up_proj.weight", (self.ff, self.hidden)
            yield f"{at}.mlp.down_proj.weight", (self.hidden, self.ff)
            yield f"{at}.input_layernorm.weight", (self.hidden,)
            yield f"{at}.post_attention_layernorm.weight", (self.hidden,)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151_936),
        Shape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128_256, "llama"),
        Shape("tiny", 2, 64, 4, 2, 16, 128, 512),
        Shape("tiny-llama", 2, 128, 2, 1, 64, 256, 512, "llama"),
    )
}


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


ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def config_of(shape: Shape, dtype: str) -> dict[str, Any]:
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
    }


def checkpoint(shape: Shape, dtype: str, folder: Path) -> Path:
    """A directory with config.json and random weights; made once, then reused."""
    import torch
    from safetensors.torch import save_file

    path = folder / f"{shape.name}-{dtype}"
    done = path / "config.json"  # written last
    if done.exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, size in shape.tensors():
        weight = torch.ones(size, dtype=getattr(torch, dtype))
        if len(size) > 1:
            weight.normal_(0.0, 0.02, generator=generator)
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
    done = folder / "config.json"  # written last
    if done.exists():
        return folder
    folder.mkdir(exist_ok=True)
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
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    done.write_text(json.dumps(config | {"quantization_config": how}, indent=2), encoding="utf-8")
    return folder


def add_options(parser: argparse.ArgumentParser, default: str = "qwen3-0.6b") -> None:
    """Options of the benchmarks that run a random checkpoint: --shape, --cache, --out."""
    add, cache = parser.add_argument, Path(tempfile.gettempdir()) / "quire-bench"
    add("--shape", choices=SHAPES, default=default, help="model")
    add("--cache", type=Path, default=cache, help="folder of the random checkpoints")
    add("--out", type=Path, help="folder for the result; unset: print only")

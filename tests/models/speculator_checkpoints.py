"""Checkpoints of speculators: random ones, and ones that are right about a target whose text is known.

The text of `successor_target`: after token t comes token SUCCESSOR[t], whatever was before. Its layers change nothing; the state
of token t is `SCALE` times unit vector t.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.cases import BASE

WORDS, SIZE, SCALE = 48, 64, 8.0  # SCALE: the norm of a unit vector of SIZE features
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPE = {
    **HEADS, "hidden_size": SIZE, "intermediate_size": SIZE, "vocab_size": WORDS, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "max_position_embeddings": 512, "num_hidden_layers": 1, "tie_word_embeddings": False, "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
SUCCESSOR = torch.roll(torch.randperm(WORDS, generator=torch.Generator().manual_seed(1)), 7)


class Drawn:
    """Random tensors, of a size that shows."""

    def __init__(
        self,
        seed: int = 5,
        size: int = BASE["hidden_size"],
        inner: int = BASE["intermediate_size"],
        head_dim: int = 16,
    ):
        self.draw = torch.Generator().manual_seed(seed)
        self.size, self.inner, self.head_dim = size, inner, head_dim

    def __call__(self, *shape: int) -> Tensor:
        if len(shape) == 1:
            return 1 + 0.3 * torch.randn(shape, generator=self.draw)
        return torch.randn(shape, generator=self.draw) / shape[-1] ** 0.5

    def layer(self, name: str, inputs: int | None = None, biases: str = "", qk_norm: bool = False) -> dict[str, Tensor]:  # fmt: skip
        """A decoder layer with 4 heads and 2 for keys and values, without its first norm."""
        heads, kv, inner, size = 4 * self.head_dim, 2 * self.head_dim, self.inner, self.size
        inputs = inputs or size
        shapes = {
            "self_attn.q_proj": (heads, inputs), "self_attn.k_proj": (kv, inputs), "self_attn.v_proj": (kv, inputs),
            "self_attn.o_proj": (size, heads), "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }  # fmt: skip
        found = {f"{name}.{key}.weight": self(*shape) for key, shape in shapes.items()}
        for key, shape in shapes.items():
            if key[-6] in biases:
                found[f"{name}.{key}.bias"] = self(shape[0]) - 1
        found[f"{name}.post_attention_layernorm.weight"] = self(size)
        if qk_norm:
            found |= {f"{name}.self_attn.{x}_norm.weight": self(self.head_dim) for x in "qk"}
        return found


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = "model.safetensors") -> Path:  # fmt: skip
    """Write a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    copies = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    if name.endswith(".pt"):
        torch.save(copies, folder / name)
    else:
        save_file(copies, folder / name, metadata={"format": "pt"})
    return folder


def eagle3_tensors(
    first: str = "midlayer",
    *,
    drawn: Drawn | None = None,
    width: int | None = None,
    words: int = 40,
    vocab: int = BASE["vocab_size"],
    **options: Any,
) -> dict[str, Tensor]:
    drawn = drawn or Drawn()
    size = drawn.size
    found = {
        **drawn.layer(first, 2 * size, **options),
        f"{first}.input_layernorm.weight": drawn(size), f"{first}.hidden_norm.weight": drawn(size),
        "fc.weight": drawn(size, width or 3 * size), "norm.weight": drawn(size), "lm_head.weight": drawn(words, size),
    }  # fmt: skip
    ids = torch.randperm(vocab, generator=drawn.draw)[:words]
    return found | {"d2t": ids - torch.arange(words), "t2d": torch.isin(torch.arange(vocab), ids)}


def mtp_tensors(drawn: Drawn) -> dict[str, Tensor]:
    """In the form of Qwen3-Next, with a layer of Qwen 3."""
    size, layer = drawn.size, drawn.layer("mtp.layers.0", qk_norm=True)
    around = {f"mtp.{name}.weight": drawn(size) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}  # fmt: skip
    first = {"mtp.layers.0.input_layernorm.weight": drawn(size)}
    return layer | around | first | {"mtp.fc.weight": drawn(size, 2 * size)}


def random_speculators(drawn: Drawn, vocab: int) -> dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]]:  # fmt: skip
    """Name -> method, config, tensors."""
    size, inner = drawn.size, drawn.inner
    config = {
        **SHAPE,
        "hidden_size": size,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "head_dim": drawn.head_dim,
    }
    mlp: dict[str, Tensor] = {}
    for i in range(3):
        mlp |= {
            f"emb.{i}.weight": drawn(vocab, 32), f"proj.{i}.weight": drawn(32, 32 if i else size),
            f"ln.{i}.weight": drawn(32), f"ln.{i}.bias": drawn(32), f"head.{i}.weight": drawn(vocab, 32),
        }  # fmt: skip
    medusa = {f"blocks.{i}.layers.0.weight": drawn(size, size) for i in range(3)}
    medusa |= {f"lm_heads.{i}.weight": drawn(vocab, size) for i in range(3)}
    eagle = drawn.layer("layers.0") | {"fc.weight": drawn(size, 2 * size)}
    masked = {"draft_vocab_size": 40, "ptd_token_id": 7, "parallel_drafting": True}
    mask = {"mask_hidden": drawn(1, 3 * size)}
    return {
        "eagle": ("eagle", config, eagle),
        "eagle3": ("eagle3", config | {"draft_vocab_size": 40}, eagle3_tensors(drawn=drawn, vocab=vocab)),
        "P-EAGLE": ("eagle3", config | masked, eagle3_tensors(drawn=drawn, vocab=vocab) | mask),
        "medusa": ("medusa", {"hidden_size": size, "num_heads": 3}, medusa),
        "mlp_speculator": ("mlp_speculator", {"model_type": "mlp_speculator", "n_predict": 3, "scale_input": True}, mlp),
        "mtp": ("mtp", config | {"model_type": "qwen3", "architectures": ["Qwen3MTP"]}, mtp_tensors(drawn)),
    }  # fmt: skip


# ------------------------------------------------------------------------------------ right ones


def _rows(after: Tensor, factor: float) -> Tensor:
    """A head that says token after[t] to the state of token t."""
    found = torch.zeros(WORDS, SIZE)
    found[after, torch.arange(WORDS)] = factor
    return found


def _still(layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer that changes nothing."""
    zeros = ("o_proj.weight", "down_proj.weight")
    return {key: t * 0 if key.endswith(zeros) else t for key, t in layer.items()}


def successor_target(folder: Path, kind: str = "llama") -> str:
    """The likeliest token has nine tenths at temperature 1."""
    drawn = Drawn(1, SIZE, SIZE)
    tensors = {"model.norm.weight": torch.ones(SIZE), "lm_head.weight": _rows(SUCCESSOR, 6 / SCALE)}
    tensors["model.embed_tokens.weight"] = SCALE * torch.eye(SIZE)[:WORDS]
    for i in range(2):
        tensors |= _still(drawn.layer(f"model.layers.{i}", qk_norm=kind == "qwen3"))
        tensors[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(SIZE)
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    config = {**SHAPE, "num_hidden_layers": 2, "model_type": kind, "architectures": [name]}
    return str(save(folder, config, tensors))


def right_speculators() -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Method -> config, tensors: right wherever the target says its likeliest token.

    Those of EAGLE-1, MTP and MLP speculators have the target's logits, too.
    """
    drawn, one = Drawn(2, SIZE, SIZE), torch.eye(SIZE)
    takes_embedding = torch.cat((one, one * 0), 1)  # of cat(embedding, state)
    medusa: dict[str, Tensor] = {}
    mlp: dict[str, Tensor] = {}
    further = SUCCESSOR
    for i in range(3):
        further = SUCCESSOR[further]
        medusa |= {f"blocks.{i}.layers.0.weight": one * 0, f"lm_heads.{i}.weight": _rows(further, 1.0)}  # fmt: skip
        mlp |= {
            f"emb.{i}.weight": one[:WORDS], f"proj.{i}.weight": one * 0, f"ln.{i}.weight": torch.ones(SIZE),
            f"ln.{i}.bias": torch.zeros(SIZE), f"head.{i}.weight": _rows(SUCCESSOR, 6 / SCALE),
        }  # fmt: skip
    eagle = _still(drawn.layer("layers.0")) | {"fc.weight": takes_embedding}
    ones = ("norm.weight", "norm_embedding.weight", "norm_hidden.weight", "layernorm.weight")
    mtp = {key: t / t if key.endswith(ones) else t for key, t in _still(mtp_tensors(drawn)).items()}
    mtp["mtp.fc.weight"] = takes_embedding
    return {
        "eagle": (SHAPE, eagle),
        "eagle3": (SHAPE | {"draft_vocab_size": WORDS, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, _right_eagle3(drawn)),
        "medusa": ({"hidden_size": SIZE, "num_heads": 3}, medusa),
        "mlp_speculator": ({"model_type": "mlp_speculator", "n_predict": 3}, mlp),
        "mtp": (SHAPE | {"model_type": "qwen3", "architectures": ["Qwen3MTP"]}, mtp),
    }  # fmt: skip


def _right_eagle3(drawn: Drawn) -> dict[str, Tensor]:
    """Its MLP turns the state of a token into the state of the next: silu(SCALE) * SCALE at the token, times `down`."""
    found = eagle3_tensors(drawn=drawn, width=SIZE, words=WORDS, vocab=WORDS)
    one = torch.eye(SIZE)
    inner = float(torch.nn.functional.silu(torch.tensor(SCALE))) * SCALE
    moved = torch.zeros(SIZE, SIZE)
    moved[SUCCESSOR, torch.arange(WORDS)] = 1
    ids = torch.arange(WORDS) + found["d2t"]
    found |= {
        "fc.weight": one, "norm.weight": torch.ones(SIZE), "lm_head.weight": _rows(SUCCESSOR, 6 / SCALE)[ids],
        "midlayer.post_attention_layernorm.weight": torch.ones(SIZE), "midlayer.mlp.gate_proj.weight": one,
        "midlayer.mlp.up_proj.weight": one, "midlayer.mlp.down_proj.weight": (moved - one) * SCALE / inner,
    }  # fmt: skip
    found["midlayer.self_attn.o_proj.weight"] *= 0
    return found

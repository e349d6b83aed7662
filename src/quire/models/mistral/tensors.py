"""The tensors of consolidated*.safetensors under the names of a Hugging Face checkpoint.

Knows Mistral's names, and that rows of queries and keys are in the order of rope over pairs of neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

NAMES = [
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^output\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^layers\.", "model.layers."),
    (r"\.attention\.w([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"(\.layers\.\d+)(?:\.feed_forward)?\.(gate|experts)\.", r"\1.block_sparse_moe.\2."),
    (r"\.qscale_weight$", ".weight_scale"),
    (r"\.qscale_act$", ".input_scale"),
]
"""Pattern -> its replacement; each that matches is applied."""

HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def usual_name(name: str) -> str:
    for pattern, own in NAMES:
        name = re.sub(pattern, own, name)
    return name


def usual_tensors(
    found: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as a Hugging Face checkpoint has them.

    Raises:
        ConfigError: the rows of a tensor do not fit the number of heads.
    """
    from quire.models.gguf.tensors import rope_halves

    for called, tensor in found:
        name = usual_name(called)
        layer, _, last = name.rpartition(".")
        heads = HEADS.get(layer.rpartition(".")[2])
        if heads is not None and last in ("weight", "bias"):
            count = config.get(heads) or config.get("num_attention_heads") or 1
            try:
                tensor = rope_halves(tensor, int(count))
            except ConfigError as why:
                raise ConfigError(f"weight {called}: {why}") from None
        yield name, tensor

"""What a GGUF file says about layers that are not all alike: which of them are recurrent, and the sizes of these.

Knows such families' rows of architectures.toml. Does not know torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import ConfigError
from quire.models.gguf.header import GgufHeader

KINDS = {
    "attn_q": "full_attention", "shortconv.in_proj": "conv", "ssm_in": "linear_attention",
    "ffn_gate_inp": "moe", "ffn_up": "mlp",
}  # fmt: skip
"""Tensor of a layer -> its entry of `layer_types`; the first that the layer has counts."""


def layer_sizes(
    header: GgufHeader, about: Mapping[str, Any], names: Collection[str], config: Mapping[str, Any]
) -> dict[str, Any]:
    """What config.json says about recurrent layers, and about layers that differ.

    Raises:
        ConfigError: a layer has no known tensor, or some layers have a tensor at no fixed interval.
    """
    layers = range(config["num_hidden_layers"])
    found: dict[str, Any] = {}
    if about.get("kinds"):
        found["layer_types"] = [_kind(header, names, i) for i in layers]
    if size := about.get("head_size"):
        found[size] = header.get("ssm.inner_size") // header.get("ssm.time_step_rank")
    for tensor, called in about.get("periods", {}).items():
        some = [i for i in layers if f"blk.{i}.{tensor}.weight" in names]
        offset = some[0] if some else len(layers)
        period = some[1] - offset if len(some) > 1 else len(layers) + 1
        if some != [i for i in layers if i % period == offset]:
            raise ConfigError(
                f"{header.files[0]}: layers {some} have {tensor}, at no fixed interval"
            )
        found |= {f"{called}_period": period, f"{called}_offset": offset}
        found["mamba_expand"] = header.get("ssm.inner_size") // config["hidden_size"]
    # Bamba, of the same architecture there, has positions.
    if header.architecture == "granitehybrid":
        heads = config["hidden_size"] // config["num_attention_heads"]
        found["attention_multiplier"] = header.get("attention.scale") or heads**-0.5
        rope = header.get("rope.scaling.finetuned")
        found["position_embedding_type"] = "rope" if rope else "nope"
    return found


def _kind(header: GgufHeader, names: Collection[str], layer: int) -> str:
    for tensor, kind in KINDS.items():
        if f"blk.{layer}.{tensor}.weight" in names:
            return kind
    raise ConfigError(f"{header.files[0]}: layer {layer} has no tensor {', '.join(KINDS)}")


def head_sizes(base: str, config: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """Of a tensor whose rows are in the order of the key heads: these heads, and the rows of each part in one of them."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, each = config["linear_key_head_dim"], values // keys
    rows = each * config["linear_value_head_dim"]
    return keys, (each, each) if base == "ssm_ba" else (size, size, rows, rows)

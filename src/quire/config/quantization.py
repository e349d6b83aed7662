"""Quantization: the values of `--quantization`, and whether one fits a checkpoint.

Knows names and numbers. Does not know torch, tensors or arithmetic: `quantization/` does.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from quire.config.checkpoint_quantization import CheckpointQuantization
from quire.config.nearest_name import nearest
from quire.config.quantization_config import METHODS, SAME_METHODS
from quire.errors import ConfigError, Unsupported


class OnlineMethod(NamedTuple):
    """A method that quantizes weights of 16 or 32 bits while they are loaded, or the weights of an fp8 checkpoint."""

    bytes_per_weight: float
    """Of a linear layer, with its part of the group's scale and zero point."""
    on_cpu: str
    on_accelerator: str


INT8 = "8 bits, one scale per output channel; activations 8 bits, one scale per token"
ONLINE = {
    "int8": OnlineMethod(1.0, INT8, f"{INT8}; the head is not quantized"),
    "int4": OnlineMethod(
        0.5 + 5 / 128,
        "4 bits, one scale and zero point per group of 128; activations 8 bits, one scale per group; the head is int8",
        "4 bits, one scale and zero point per group of 128; activations and the head are not quantized",
    ),
    "int4_g64": OnlineMethod(
        0.5 + 5 / 64,
        "as int4 with groups of 64: more exact, slower for many tokens",
        "as int4 with groups of 64",
    ),
    "int4_g32": OnlineMethod(
        0.5 + 5 / 32, "as int4 with groups of 32", "as int4 with groups of 32"
    ),
    "nf4": OnlineMethod(
        0.5 + 5 / 64,
        "4 bits, NF4 of bitsandbytes: one scale per block of 64; activations 8 bits, one scale per block; the head is int8",
        "as int4_g64",
    ),
    "fp8": OnlineMethod(
        1.0,
        "int8, because CPUs have no 8-bit float arithmetic",
        "8-bit floats, one scale per output channel; activations 8-bit floats, one scale per token; the head is not quantized",
    ),
}
"""Value of `--quantization` -> the method. `quantization/apply.py` has what makes the weights."""

HEAD_BYTES = 1.0
"""Bytes for each weight of the LM head on a CPU, with every method."""

SAME = {
    "fp8_per_tensor": "fp8",
    "fp8_per_channel": "fp8",
    "fp8_per_block": "fp8",
    "int8_per_channel_weight_only": "int8",
    **SAME_METHODS,
}
"""vLLM's names -> Quire's names."""

IN_FLIGHT = {"bitsandbytes": "nf4"}
"""Methods of checkpoints that also quantize while loading -> what Quire does."""

LATER = (
    *("quark", "nvfp4", "nvfp4_per_token", "quanto", "eetq", "aqlm", "spqr", "vptq", "bitnet", "higgs", "fp_quant"),
    *("experts_int8", "moe_wna16", "humming", "deepseek_v4_fp8", "online", "bitblas", "marlin", "gptq_marlin_24", "qqq"),
    *("rtn", "ptpc_fp8", "deepspeedfp", "tpu_int8", "ipex"),
)  # fmt: skip
"""Known methods that are not supported."""


def online_schemes() -> dict[str, str]:
    """The methods applied while loading: value of `--quantization` -> description."""
    return {name: method.on_cpu for name, method in ONLINE.items() if name != "fp8"}


def quantization_method(requested: str | None) -> str | None:
    """Quire's name of the requested method; None: as the checkpoint says.

    Raises:
        Unsupported: a known method that is not supported. ConfigError: an unknown method.
    """
    if requested in (None, "none", "auto"):
        return None
    name = SAME.get(str(requested), str(requested))
    if name in ONLINE or name in METHODS:
        return name
    served = f"{', '.join(ONLINE)} quantize while loading; checkpoints may be {', '.join(METHODS)}"
    if name in LATER:
        raise Unsupported(f"quantization={requested}", served)
    bits = re.search(r"[48]", name)
    near = f"int{bits[0]}" if bits and name not in ONLINE else nearest(name, (*ONLINE, *METHODS))
    hint = f"did you mean {near}? " if near else ""
    raise ConfigError(f"quantization={requested!r} is unknown: {hint}{served}")


def fitting(requested: str | None, stored: CheckpointQuantization | None) -> str | None:
    """The method to apply while loading, or None.

    Raises:
        ConfigError: the checkpoint uses another method, or is not quantized.
    """
    name = quantization_method(requested)
    if name is None or (stored is not None and name == stored.method):
        return None
    name = IN_FLIGHT.get(name, name)
    floats = stored is not None and all(scheme.is_float for scheme in stored.schemes())
    if name in ONLINE:
        if stored is None or floats:
            return name
        raise ConfigError(
            f"quantization={requested}: the checkpoint is already quantized ({stored.method}); leave the flag out"
        )
    if stored is None:
        raise ConfigError(
            f"quantization={requested}: the checkpoint is not quantized (its config.json has no quantization_config);"
            f" {', '.join(ONLINE)} quantize while loading"
        )
    raise ConfigError(
        f"quantization={requested}: the checkpoint's config.json says {stored.method}; leave the flag out"
    )

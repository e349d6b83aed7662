"""Quantization: the values of `--quantization`, and the quantization that a checkpoint's config.json describes.

Knows names, numbers and patterns. Does not know torch, tensors or arithmetic: `quantization/` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import ConfigError, Unsupported

ONLINE = {
    "int8": "8 bits, one scale per output channel; activations 8 bits, one scale per token",
    "int4": "4 bits, one scale and zero point per group of 128; activations 8 bits, one scale per group; the head is int8",
    "int4_g64": "as int4 with groups of 64: more exact, slower for many tokens",
    "int4_g32": "as int4 with groups of 32",
    "fp8": "int8, because CPUs have no 8-bit float arithmetic",
}
"""Methods applied while loading, to weights of 16 or 32 bits (or to an fp8 checkpoint). This table: on a CPU."""

ON_ACCELERATOR = {
    "int8": "8 bits, one scale per output channel; activations 8 bits, one scale per token; the head is not quantized",
    "int4": "4 bits, one scale and zero point per group of 128; activations and the head are not quantized",
    "int4_g64": "as int4 with groups of 64",
    "int4_g32": "as int4 with groups of 32",
    "fp8": "8-bit floats, one scale per output channel; activations 8-bit floats, one scale per token; the head is not quantized",
}
"""The same methods on an accelerator."""

BYTES = {
    "int8": 1.0,
    "int4": 0.5 + 5 / 128,
    "int4_g64": 0.5 + 5 / 64,
    "int4_g32": 0.5 + 5 / 32,
    "fp8": 1.0,
}
"""Bytes for each weight of a linear layer, including its part of the group's scale and zero point."""

HEAD_BYTES = 1.0
"""The same for the head, with every method."""

SAME = {
    "fp8_per_tensor": "fp8",
    "fp8_per_channel": "fp8",
    "fp8_per_block": "fp8",
    "int8_per_channel_weight_only": "int8",
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "gptq_bitblas": "gptq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "compressed_tensors": "compressed-tensors",
}
"""vLLM's names -> Quire's names."""

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8")
"""The supported values of `quant_method` in config.json."""

LATER = (
    *("bitsandbytes", "gguf", "torchao", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "quark", "auto-round", "inc"),
    *("mxfp4", "mxfp8", "gpt_oss_mxfp4", "nvfp4", "nvfp4_per_token", "hqq", "quanto", "eetq", "aqlm", "spqr", "vptq"),
    *("bitnet", "higgs", "fp_quant", "experts_int8", "moe_wna16", "modelopt_mixed", "humming", "deepseek_v4_fp8"),
    *("online", "bitblas", "marlin", "gptq_marlin_24", "qqq", "rtn", "ptpc_fp8", "deepspeedfp", "tpu_int8", "ipex"),
)  # fmt: skip
"""Known methods that are not supported."""

INSTEAD = (
    "serve its bfloat16 or float16 checkpoint, with --quantization int8 or int4 to save memory"
)


def online_schemes() -> dict[str, str]:
    """The methods applied while loading: value of `--quantization` -> description."""
    return {name: description for name, description in ONLINE.items() if name != "fp8"}


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """How a checkpoint stores the weight of one linear layer.

    `kind`: gptq, awq, ct-packed, ct-int or float. `group`: number of inputs that share a scale, -1: all of them.
    `strategy`: tensor, channel, block or group. `ordered`: a group's inputs are not adjacent; tensor g_idx gives each
    input's group.
    """

    kind: str
    bits: int
    strategy: str = "group"
    group: int = -1
    block: tuple[int, int] = (128, 128)
    symmetric: bool = True
    ordered: bool = False
    shifted: bool = False  # stored zero points are one too small (the first GPTQ format)
    inverse: bool = False  # the scale is called weight_scale_inv, but it is multiplied as well

    def describe(self, accelerator: bool = False, online: str | None = None) -> str:
        """Describe it. online: the `--quantization` method applied to 8-bit floats."""
        one = "output channel" if self.strategy in ("group", "channel") else self.strategy
        per = f"groups of {self.group}" if self.group > 0 else f"one scale per {one}"
        if self.kind == "float" and online not in (None, "fp8"):
            return f"8-bit floats with {per}, quantized to {online}"
        if self.kind == "float" and accelerator:
            return f"8-bit floats with {per}; activations 8-bit floats, one scale per token"
        if self.kind == "ct-int" and accelerator:
            return "int8 with one scale per output channel; activations int8, one scale per token"
        if accelerator:
            return f"{self.bits} bits with {per}; activations are not quantized"
        if self.kind == "float":
            return "8-bit floats, converted to int8 with one scale per output channel (CPUs have no 8-bit float arithmetic)"
        if self.kind == "ct-int":
            return "int8 with one scale per output channel"
        if self.bits == 8:
            return f"8 bits with {per}, converted to int8 with one scale per output channel"
        return f"{self.bits} bits with {per}; activations 8 bits, one scale per token"


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """The quantization that config.json describes.

    `groups`: (targets, layout). `ignored`: names or patterns of unquantized layers. `only`: if not empty, those of the
    quantized ones. `changed`: (pattern, layout or None), which takes precedence over `groups`.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], WeightLayout], ...]
    ignored: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    changed: tuple[tuple[str, WeightLayout | None], ...] = ()
    head: bool = False

    def layout_of(self, name: str) -> WeightLayout | None:
        """The layout of a linear layer, by its name in the checkpoint; None: its weight is not quantized."""
        if name == "lm_head" and not self.head:
            return None
        if any(_named(pattern, name) for pattern in self.ignored):
            return None
        if self.only and not any(_named(pattern, name) for pattern in self.only):
            return None
        for pattern, layout in self.changed:
            if any(re.match(pattern, each) for each in _spellings(name)):
                return layout
        for special in (
            True,
            False,
        ):  # a group that names the layer takes precedence over one for every linear
            for targets, layout in self.groups:
                for target in targets:
                    if (target != "Linear") == special and (not special or _named(target, name)):
                        return layout
        return None

    def describe(self, accelerator: bool = False, online: str | None = None) -> str:
        """For the log: the stored format and what loading makes of it."""
        kinds = [layout.describe(accelerator, online) for layout in dict.fromkeys(self.layouts())]
        return f"{self.method}, {'; '.join(kinds)}"

    def layouts(self) -> Iterator[WeightLayout]:
        yield from (layout for _, layout in self.groups)
        yield from (layout for _, layout in self.changed if layout is not None)


def _spellings(name: str) -> tuple[str, ...]:
    """The name itself, and its forms in checkpoints of wrapped models."""
    inner = name.removeprefix("model.")
    return name, f"language_model.{name}", f"model.language_model.{inner}"


def _named(pattern: str, name: str) -> bool:
    """Whether `pattern` matches: `re:` and a regular expression, or consecutive parts of the name."""
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], each) for each in _spellings(name))
    return any(f".{pattern}." in f".{each}." for each in _spellings(name))


# ------------------------------------------------------------------------------------ what is requested


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
    raise ConfigError(f"quantization={requested!r} is unknown: {served}")


def fitting(requested: str | None, stored: CheckpointQuantization | None) -> str | None:
    """The method to apply while loading, or None.

    Raises:
        ConfigError: the checkpoint uses another method, or is not quantized.
    """
    name = quantization_method(requested)
    if name is None or (stored is not None and name == stored.method):
        return None
    eight = stored is not None and all(layout.kind == "float" for layout in stored.layouts())
    if name in ONLINE:
        if stored is None or eight:
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


# ------------------------------------------------------------------------------------ what is stored


def stored_quantization(config: Mapping[str, Any]) -> CheckpointQuantization | None:
    """The quantization that config.json describes; None: the weights are not quantized.

    Raises:
        Unsupported: an unsupported method, or an unsupported variant of one; the message says which.
        ConfigError: the description is invalid.
    """
    description = config.get("quantization_config") or config.get("compression_config")
    if not description:
        return None
    if not isinstance(description, Mapping):
        raise ConfigError(
            f"config.json: quantization_config is a {type(description).__name__}; it must be an object"
        )
    method = str(description.get("quant_method", "unknown"))
    method = SAME.get(method, method)
    if method not in READERS:
        raise Unsupported(
            f"a checkpoint quantized with {method}",
            f"{', '.join(METHODS)} are supported; or {INSTEAD}",
        )
    try:
        return READERS[method](description)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError | Unsupported):
            raise
        raise ConfigError(f"config.json: quantization_config of {method}: {error!r}") from None


def _refuse(method: str, what: str) -> Unsupported:
    return Unsupported(f"a {method} checkpoint with {what}", INSTEAD)


def _gptq(description: Mapping[str, Any]) -> CheckpointQuantization:
    form = str(description.get("checkpoint_format") or description.get("format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _refuse("GPTQ", f"checkpoint_format={form}")
    layout = WeightLayout(
        kind="gptq",
        bits=int(description["bits"]),
        group=int(description.get("group_size", -1)),
        symmetric=bool(description.get("sym", True)),
        ordered=True,  # by g_idx, which every GPTQ checkpoint has
        shifted=form != "gptq_v2",
    )
    changed: list[tuple[str, WeightLayout | None]] = []
    for key, value in (description.get("dynamic") or {}).items():
        if key.startswith("-:"):
            changed.append((key[2:], None))
            continue
        own = replace(
            layout,
            bits=int(value.get("bits", layout.bits)),
            group=int(value.get("group_size", layout.group)),
        )
        changed.append((key.removeprefix("+:"), own))
    for each in (layout, *(own for _, own in changed if own is not None)):
        if each.bits not in (2, 4, 8):
            raise _refuse("GPTQ", f"bits={each.bits}")
    only = description.get("modules_in_block_to_quantize") or ()
    names = tuple(name for part in only for name in ([part] if isinstance(part, str) else part))
    head = bool(description.get("lm_head", False))
    return CheckpointQuantization(
        "gptq",
        ((("Linear",), layout),),
        ignored=_names(description, "modules_to_not_convert"),
        only=(*names, "lm_head") if names and head else names,
        changed=tuple(changed),
        head=head,
    )


def _awq(description: Mapping[str, Any]) -> CheckpointQuantization:
    version = str(description.get("version", "gemm")).lower()
    bits = int(description.get("bits") or description.get("w_bit") or 4)
    if version != "gemm":
        raise _refuse("AWQ", f"version={version} (only gemm is supported)")
    if bits != 4:
        raise _refuse("AWQ", f"bits={bits}")
    layout = WeightLayout(
        kind="awq",
        bits=bits,
        group=int(description.get("group_size") or description.get("q_group_size") or 128),
        symmetric=not description.get("zero_point", True),
    )
    ignored = _names(description, "modules_to_not_convert")
    return CheckpointQuantization("awq", ((("Linear",), layout),), ignored=ignored)


def _fp8(description: Mapping[str, Any]) -> CheckpointQuantization:
    block = description.get("weight_block_size")
    layout = WeightLayout(
        kind="float",
        bits=8,
        strategy="block" if block else "tensor",
        block=(int(block[0]), int(block[1])) if block else (128, 128),
        inverse=bool(block),
    )
    ignored = _names(description, "ignored_layers", "modules_to_not_convert")
    return CheckpointQuantization("fp8", ((("Linear",), layout),), ignored=ignored)


def _fbgemm(description: Mapping[str, Any]) -> CheckpointQuantization:
    layout = WeightLayout(kind="float", bits=8, strategy="channel")
    ignored = _names(description, "modules_to_not_convert")
    return CheckpointQuantization("fbgemm_fp8", ((("Linear",), layout),), ignored=ignored)


FORMATS = {
    "int-quantized": "ct-int",
    "naive-quantized": "",
    "pack-quantized": "ct-packed",
    "float-quantized": "float",
}


def _compressed(description: Mapping[str, Any]) -> CheckpointQuantization:
    if description.get("transform_config"):
        raise _refuse("compressed-tensors", "transform_config")
    sparsity = (description.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refuse("compressed-tensors", f"sparsity {sparsity}")
    groups = []
    for group in (description.get("config_groups") or {}).values():
        form = str(group.get("format") or description.get("format"))
        if form not in FORMATS:
            raise _refuse("compressed-tensors", f"format={form}")
        if (weights := group.get("weights")) is not None:
            targets = tuple(str(target) for target in group["targets"])
            groups.append((targets, _compressed_layout(form, weights)))
    if not groups:
        raise ConfigError(
            "config.json: quantization_config of compressed-tensors has no config_groups"
        )
    return CheckpointQuantization(
        "compressed-tensors", tuple(groups), ignored=_names(description, "ignore"), head=True
    )


def _compressed_layout(form: str, weights: Mapping[str, Any]) -> WeightLayout:
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    symmetric = bool(weights.get("symmetric", True))
    variant = f"{form}: num_bits={bits} type={kind} strategy={strategy} symmetric={symmetric}"
    how = FORMATS[form] or ("float" if kind == "float" else "ct-int")
    allowed = {
        "ct-int": kind == "int" and bits == 8 and symmetric and strategy in ("tensor", "channel"),
        "ct-packed": kind == "int"
        and bits in (4, 8)
        and strategy in ("tensor", "channel", "group"),
        "float": kind == "float" and bits == 8 and strategy in ("tensor", "channel", "block"),
    }
    if not allowed[how]:
        raise _refuse("compressed-tensors", variant)
    block = weights.get("block_structure") or (128, 128)
    return WeightLayout(
        kind=how,
        bits=int(bits or 0),
        strategy=str(strategy),
        group=int(weights.get("group_size") or -1),
        block=(int(block[0]), int(block[1])),
        symmetric=symmetric,
        ordered=str(weights.get("actorder")).lower() in ("group", "dynamic", "true"),
    )


READERS = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
}


def _names(description: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(str(name) for key in keys for name in description.get(key) or ())

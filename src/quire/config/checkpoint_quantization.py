"""The quantization that a checkpoint's config.json describes: which layers, and how their weights are stored.

Knows names, numbers and patterns of each method's description. Does not know torch, tensors or arithmetic: `quantization/`
does.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import ConfigError, Unsupported

SAME_METHODS = {
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "gptq_bitblas": "gptq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "compressed_tensors": "compressed-tensors",
    **dict.fromkeys(("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), "modelopt"),
    "gpt_oss_mxfp4": "mxfp4",
}
"""Other names of methods -> the value of `quant_method` in config.json."""

INSTEAD = (
    "serve its bfloat16 or float16 checkpoint, with --quantization int8 or int4 to save memory"
)

VALUES_PER_BYTE = {"nvfp4": 2, "modelopt-nvfp4": 2, "mxfp4": 2, "mxfp4-experts": 2, "mxfp8": 1}
"""Readers (`quantization/decoded.py`) that give floats -> the values in a byte of their tensors of bytes."""


BLOCKS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Types of GGUF tensors that the CPU kernels multiply (`quantization/gguf_blocks.py`)."""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """How a checkpoint stores the weight of one linear layer.

    `kind`: gptq, awq, ct-packed, ct-int, float, or decoded: `reader` decodes it to floats as it is read. `group`: number
    of inputs that share a scale, -1: all of them. `strategy`: tensor, channel, block or group. `ordered`: a group's
    inputs are not adjacent; tensor g_idx gives each input's group. `reader`: what reads its tensors from the files
    (`quantization/decoded.py`); "": they are stored as `kind` says.
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
    reader: str = ""

    @property
    def is_float(self) -> bool:
        """Whether it stores floats, which `--quantization` may quantize further."""
        return self.kind in ("float", "decoded")

    def describe(self, accelerator: bool = False, online: str | None = None) -> str:
        """Describe it. online: the `--quantization` method applied to 8-bit floats."""
        one = "output channel" if self.strategy in ("group", "channel") else self.strategy
        per = f"groups of {self.group}" if self.group > 0 else f"one scale per {one}"
        if self.kind == "decoded":
            return f"{self.reader}, decoded to floats" + (
                f", quantized to {online}" if online else ""
            )
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

    @property
    def is_decoded(self) -> bool:
        """Whether weights are decoded to floats as they are read."""
        return any(layout.kind == "decoded" for layout in self.layouts())

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


# ------------------------------------------------------------------------------------ config.json


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
    method = SAME_METHODS.get(method, method)
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
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "mxfp8-quantized": "mxfp8",
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
    if how in VALUES_PER_BYTE:
        return WeightLayout("decoded", 8 // VALUES_PER_BYTE[how], reader=how)
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


def _mxfp(description: Mapping[str, Any]) -> CheckpointQuantization:
    """gpt-oss's experts (mxfp4), or linear layers of 8 bits (mxfp8)."""
    method = str(description["quant_method"])
    reader = "mxfp4-experts" if "mxfp4" in method else "mxfp8"
    layout = WeightLayout("decoded", 8 // VALUES_PER_BYTE[reader], reader=reader)
    ignored = _names(description, "ignored_layers", "modules_to_not_convert")
    return CheckpointQuantization(method, ((("Linear",), layout),), ignored=ignored)


MODELOPT = {
    "FP8": WeightLayout("float", 8, "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightLayout("float", 8, "channel"),
    "FP8_PB_WO": WeightLayout("float", 8, "block"),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), WeightLayout("decoded", 4, reader="modelopt-nvfp4")),
    "MXFP8": WeightLayout("decoded", 8, reader="mxfp8"),
}
"""`quant_algo` -> layout."""


def _modelopt(description: Mapping[str, Any]) -> CheckpointQuantization:
    """Of config.json, or of hf_quant_config.json, which nests it and may name an algorithm for each layer."""
    inner = description.get("quantization") or description
    layers = {**(inner.get("quantized_layers") or {}), "*": inner}
    found = []
    for name, own in layers.items():
        algorithm = str(own["quant_algo"]).upper()
        if algorithm in ("MIXED_PRECISION", "NONE"):
            continue
        if algorithm not in MODELOPT:
            raise _refuse("ModelOpt", f"quant_algo={algorithm}")
        found.append((fnmatch.translate(name), MODELOPT[algorithm]))
    ignored = [
        f"re:{fnmatch.translate(name)}" if "*" in name else name
        for name in _names(inner, "ignore", "exclude_modules")
    ]
    return CheckpointQuantization("modelopt", (), tuple(ignored), changed=tuple(found), head=True)


READERS = {
    "gguf": lambda description: CheckpointQuantization("gguf", ()),
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp,
    "mxfp8": _mxfp,
    "modelopt": _modelopt,
}

METHODS = tuple(READERS)
"""The supported values of `quant_method` in config.json."""


def _names(description: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(str(name) for key in keys for name in description.get(key) or ())

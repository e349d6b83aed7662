"""Reads `quantization_config` of config.json: which layers a method has quantized, and how it stores their weights.

Knows the keys of each method's description. Does not know torch, tensors or arithmetic: `quantization/` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.checkpoint_quantization import CheckpointQuantization, QuantizationScheme
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
    "inc": "auto-round",
}
"""Other names of methods -> the value of `quant_method` in config.json."""

INSTEAD = (
    "serve its bfloat16 or float16 checkpoint, with --quantization int8 or int4 to save memory"
)


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
    scheme = QuantizationScheme(
        kind="gptq",
        bits=int(description["bits"]),
        group=int(description.get("group_size", -1)),
        symmetric=bool(description.get("sym", True)),
        ordered=True,  # by g_idx, which every GPTQ checkpoint has
        shifted=form != "gptq_v2",
    )
    changed: list[tuple[str, QuantizationScheme | None]] = []
    for key, value in (description.get("dynamic") or {}).items():
        if key.startswith("-:"):
            changed.append((key[2:], None))
            continue
        own = replace(
            scheme,
            bits=int(value.get("bits", scheme.bits)),
            group=int(value.get("group_size", scheme.group)),
        )
        changed.append((key.removeprefix("+:"), own))
    for each in (scheme, *(own for _, own in changed if own is not None)):
        if each.bits not in (2, 3, 4, 8):
            raise _refuse("GPTQ", f"bits={each.bits}")
    only = description.get("modules_in_block_to_quantize") or ()
    names = tuple(name for part in only for name in ([part] if isinstance(part, str) else part))
    head = bool(description.get("lm_head", False))
    return CheckpointQuantization(
        "gptq",
        ((("Linear",), scheme),),
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
    group = int(description.get("group_size") or description.get("q_group_size") or 128)
    zero_point = description.get("zero_point", True)
    return _linears(
        description, QuantizationScheme("awq", bits, group=group, symmetric=not zero_point)
    )


def _fp8(description: Mapping[str, Any]) -> CheckpointQuantization:
    block = description.get("weight_block_size")
    return _linears(
        description,
        QuantizationScheme(
            kind="float",
            bits=8,
            strategy="block" if block else "tensor",
            block=(int(block[0]), int(block[1])) if block else (128, 128),
            inverse=bool(block),
        ),
    )


def _fbgemm(description: Mapping[str, Any]) -> CheckpointQuantization:
    return _linears(description, QuantizationScheme("float", 8, "channel"))


def _mxfp(description: Mapping[str, Any]) -> CheckpointQuantization:
    """gpt-oss's experts (mxfp4), or linear layers of 8 bits (mxfp8)."""
    four = "mxfp4" in str(description["quant_method"])
    reader, bits = ("mxfp4-experts", 4) if four else ("mxfp8", 8)
    return _linears(description, QuantizationScheme("decoded", bits, reader=reader))


def _bitsandbytes(description: Mapping[str, Any]) -> CheckpointQuantization:
    if description.get("load_in_8bit") or description.get("_load_in_8bit"):
        return _linears(description, QuantizationScheme("ct-int", 8, "channel", reader="bnb-int8"))
    return _linears(description, QuantizationScheme("decoded", 4, reader="bnb-4bit"))


def _hqq(description: Mapping[str, Any]) -> CheckpointQuantization:
    return _linears(description, QuantizationScheme("decoded", 4, reader="hqq"))


def _auto_round(description: Mapping[str, Any]) -> CheckpointQuantization:
    """GPTQ's or AWQ's tensors; `extra_config` has the layers that differ. Without auto_gptq, zero points are not shifted."""
    packing = str(description.get("packing_format", "auto_round:auto_gptq"))
    kind, data = packing.removeprefix("auto_round").removeprefix(":"), description.get("data_type")
    if kind not in ("", "gptqmodel", "auto_gptq", "gptq", "auto_awq", "awq") or data not in (
        None,
        "int",
    ):
        raise _refuse("AutoRound", f"packing_format={packing} and data_type={data}")
    own = {
        ("-:" if int(each.get("bits", 4)) >= 16 else "+:") + f"{name}$": each
        for name, each in (description.get("extra_config") or {}).items()
    }
    version = "gptq" if kind.endswith("gptq") else "gptq_v2"
    found = _gptq({**description, "dynamic": own, "checkpoint_format": version})
    if "awq" in kind:
        awq = _awq({**description, "version": "gemm"})
        changed = tuple(
            (name, scheme and replace(awq.groups[0][1], group=scheme.group))
            for name, scheme in found.changed
        )
        found = replace(awq, changed=changed)
    return replace(found, method="auto-round")


TORCHAO = {"Int8": ("ct-int", 8), "Float8": ("float", 8), "Intx": ("ct-packed", 8)}
"""Begin of a configuration's name -> kind and bits."""


def _torchao(description: Mapping[str, Any]) -> CheckpointQuantization:
    """`quant_type` has one configuration ("default"), which may have one for each layer."""
    says = description["quant_type"]["default"]
    by_name = {} if "Fqn" not in says["_type"] else says["_data"]
    by_name = (
        by_name.get("fqn_to_config") or by_name.get("module_fqn_to_config") or {"_default": says}
    )
    changed: list[tuple[str, QuantizationScheme | None]] = []
    for name, each in sorted(by_name.items(), key=lambda item: item[0] == "_default"):
        pattern = name.removeprefix("re:") if name.startswith("re:") else re.escape(name) + "$"
        scheme = None if each is None else _torchao_scheme(each)
        changed.append((".*" if name == "_default" else pattern.removesuffix(r"\.weight$"), scheme))
    head = bool(by_name.get("lm_head") or by_name.get("lm_head.weight"))
    ignored = _names(description, *SKIPPED)
    return CheckpointQuantization("torchao", (), ignored, changed=tuple(changed), head=head)


def _torchao_scheme(says: Mapping[str, Any]) -> QuantizationScheme:
    called, data = str(says["_type"]), says["_data"]
    begin = "Intx" if "Intx" in called else called[: called.find("8") + 1]
    if begin not in TORCHAO or "Int4" in called:
        raise _refuse("TorchAO", f"{called} (Int8, Float8 and Intx configurations are supported)")
    kind, bits = TORCHAO[begin]
    per = json.dumps(data.get("weight_granularity") or data.get("granularity"))
    size = re.search(r'"group_size": (\d+)', per)
    if begin == "Intx":
        bits = 4 if int(str(data["weight_dtype"]["_data"]).removeprefix("int")) <= 4 else 8
    strategy = "group" if size else "tensor" if "PerTensor" in per else "channel"
    return QuantizationScheme(
        kind,
        bits,
        strategy,
        int(size[1]) if size else -1,
        symmetric=begin != "Intx",
        reader="torchao",
    )


FORMATS = {
    "int-quantized": "ct-int",
    "naive-quantized": "",
    "pack-quantized": "ct-packed",
    "float-quantized": "float",
}
DECODED_FORMATS = {
    "nvfp4-pack-quantized": ("nvfp4", 4),
    "mxfp4-pack-quantized": ("mxfp4", 4),
    "mxfp8-quantized": ("mxfp8", 8),
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
        if form not in FORMATS and form not in DECODED_FORMATS:
            raise _refuse("compressed-tensors", f"format={form}")
        if (weights := group.get("weights")) is not None:
            targets = tuple(str(target) for target in group["targets"])
            groups.append((targets, _compressed_scheme(form, weights)))
    if not groups:
        raise ConfigError(
            "config.json: quantization_config of compressed-tensors has no config_groups"
        )
    return CheckpointQuantization(
        "compressed-tensors", tuple(groups), ignored=_names(description, "ignore"), head=True
    )


def _compressed_scheme(form: str, weights: Mapping[str, Any]) -> QuantizationScheme:
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    symmetric = bool(weights.get("symmetric", True))
    variant = f"{form}: num_bits={bits} type={kind} strategy={strategy} symmetric={symmetric}"
    if form in DECODED_FORMATS:
        reader, bits = DECODED_FORMATS[form]
        return QuantizationScheme("decoded", bits, reader=reader)
    how = FORMATS[form] or ("float" if kind == "float" else "ct-int")
    allowed = {
        "ct-int": kind == "int" and bits == 8 and symmetric and strategy in ("tensor", "channel"),
        "ct-packed": kind == "int"
        and bits in range(1, 9)
        and strategy in ("tensor", "channel", "group"),
        "float": kind == "float" and bits == 8 and strategy in ("tensor", "channel", "block"),
    }
    if not allowed[how]:
        raise _refuse("compressed-tensors", variant)
    block = weights.get("block_structure") or (128, 128)
    return QuantizationScheme(
        kind=how,
        bits=int(bits or 0),
        strategy=str(strategy),
        group=int(weights.get("group_size") or -1),
        block=(int(block[0]), int(block[1])),
        symmetric=symmetric,
        ordered=str(weights.get("actorder")).lower() in ("group", "dynamic", "true"),
    )


MODELOPT = {
    "FP8": QuantizationScheme("float", 8, "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": QuantizationScheme("float", 8, "channel"),
    "FP8_PB_WO": QuantizationScheme("float", 8, "block"),
    **dict.fromkeys(
        ("NVFP4", "W4A16_NVFP4"), QuantizationScheme("decoded", 4, reader="modelopt-nvfp4")
    ),
    "MXFP8": QuantizationScheme("decoded", 8, reader="mxfp8"),
}
"""`quant_algo` -> scheme."""


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
        found.append((_glob(name), MODELOPT[algorithm]))
    ignored = [
        f"re:{_glob(name)}" if "*" in name else name
        for name in _names(inner, "ignore", "exclude_modules")
    ]
    return CheckpointQuantization("modelopt", (), tuple(ignored), changed=tuple(found), head=True)


def _glob(name: str) -> str:
    """A regular expression for a name with the signs of a shell: `*`, `?` and `[0-9]`."""
    return name.replace(".", r"\.").replace("?", ".").replace("*", ".*") + "$"


READERS = {
    "gguf": lambda description: CheckpointQuantization("gguf", (), kinds_in_file=True),
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp,
    "mxfp8": _mxfp,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "hqq": _hqq,
    "auto-round": _auto_round,
}

METHODS = tuple(READERS)
"""The supported values of `quant_method` in config.json."""


SKIPPED = ("ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules", "skip_modules")
"""Keys of a description that name unquantized layers."""


def _linears(description: Mapping[str, Any], scheme: QuantizationScheme) -> CheckpointQuantization:
    """All linear layers have this scheme, but those that a key of `SKIPPED` names."""
    method = SAME_METHODS.get(str(description["quant_method"]), str(description["quant_method"]))
    groups = ((("Linear",), scheme),)
    return CheckpointQuantization(method, groups, ignored=_names(description, *SKIPPED))


def _names(description: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(str(name) for key in keys for name in description.get(key) or ())

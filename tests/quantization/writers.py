"""Quantized checkpoints, written number by number from what the formats' papers and tools say; nothing here is the loader's.

A writer takes float weights [O, I] as numpy and gives (tensors by their last name, the float weight that they stand for).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.models.cases import Case

SMALL = Case(
    "qwen3", "qwen3", {"hidden_size": 64, "intermediate_size": 128, "attention_bias": True}
)
"""The model whose checkpoints these are."""

Written = tuple[dict[str, Tensor], np.ndarray]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # field -> output


def f16(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16).astype(np.float32)


def round_groups(
    w: np.ndarray, groups: np.ndarray, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q [O, I] from 0 on, scale [O, G] that float16 holds, zero [O, G]); `groups`: the group of each input."""
    top = (1 << bits) - 1
    count = int(groups.max()) + 1
    q = np.zeros(w.shape, np.int64)
    scale, zero = np.zeros((len(w), count), np.float32), np.zeros((len(w), count), np.int64)
    for g in range(count):
        part = w[:, groups == g]
        if symmetric:
            scale[:, g] = f16(2 * np.abs(part).max(1) / top)
            zero[:, g] = (top + 1) // 2
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale[:, g] = f16((high - low) / top)
            zero[:, g] = np.clip(np.round(-low / scale[:, g]), 1, top)
        q[:, groups == g] = np.clip(np.round(part / scale[:, g, None]) + zero[:, g, None], 0, top)
    return q, scale, zero


def meaning(q: np.ndarray, scale: np.ndarray, zero: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return (q - zero[:, groups]).astype(np.float32) * scale[:, groups]


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Along the last dimension, lowest field first; a field may cross words, and what the last word lacks is zero."""
    out = np.zeros((*values.shape[:-1], -(-values.shape[-1] * bits // 32) + 1), np.uint64)
    for index in range(values.shape[-1]):
        word, shift = divmod(bits * index, 32)
        field = values[..., index].astype(np.uint64) << np.uint64(shift)
        out[..., word] |= field & np.uint64(0xFFFFFFFF)
        out[..., word + 1] |= field >> np.uint64(32)
    return out[..., :-1].astype(np.uint32).view(np.int32)


def tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    made = torch.from_numpy(np.ascontiguousarray(array))
    return made if dtype is None else made.to(dtype)


def neighbours(ins: int, group: int) -> np.ndarray:
    return np.arange(ins) // (group if group > 0 else ins)


def shuffled(ins: int, group: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(neighbours(ins, group))


def gptq(
    w: np.ndarray, name: str, *, bits: int = 4, group: int = 32, symmetric: bool = True,
    order: str = "", version: int = 1,
) -> Written:  # fmt: skip
    """`order`: "" neighbours; "layer": shuffled, alike for layers with the same inputs; "own": each in its own way."""
    ins = w.shape[1]
    seed = sum(map(ord, name)) if order == "own" else ins
    groups = shuffled(ins, group, seed) if order else neighbours(ins, group)
    q, scale, zero = round_groups(w, groups, bits, symmetric)
    stored = zero - 1 if version == 1 else zero
    return {
        "qweight": tensor(words(q, bits).T),
        "qzeros": tensor(words(stored.T, bits)),
        "scales": tensor(scale.T, torch.float16),
        "g_idx": tensor(groups, torch.int32),
    }, meaning(q, scale, zero, groups)


def awq(w: np.ndarray, name: str, *, group: int = 32) -> Written:
    groups = neighbours(w.shape[1], group)
    q, scale, zero = round_groups(w, groups, 4, symmetric=False)

    def packed(values: np.ndarray) -> Tensor:  # [N, O]
        shown = values.reshape(len(values), -1, 8)[:, :, list(AWQ_ORDER)]
        return tensor(words(shown.reshape(len(values), -1), 4))

    return {
        "qweight": packed(q.T),
        "qzeros": packed(zero.T),
        "scales": tensor(scale.T, torch.float16),
    }, meaning(q, scale, zero, groups)


def ct_packed(
    w: np.ndarray, name: str, *, bits: int = 4, group: int = 32, symmetric: bool = True,
    strategy: str = "group", order: bool = False,
) -> Written:  # fmt: skip
    ins = w.shape[1]
    groups = shuffled(ins, group, ins) if order else neighbours(ins, group)
    q, scale, zero = round_groups(w, groups, bits, symmetric)
    found = {
        "weight_packed": tensor(words(q, bits)),
        "weight_scale": tensor(scale, torch.bfloat16 if strategy == "tensor" else torch.float16),
        "weight_shape": torch.tensor(w.shape),
    }
    if not symmetric:
        found["weight_zero_point"] = tensor(words(zero.T, bits).T)
    if order:
        found["weight_g_idx"] = tensor(groups, torch.int32)
    return found, meaning(q, scale, zero, groups)


def ct_int8(w: np.ndarray, name: str, *, strategy: str = "channel") -> Written:
    top = np.abs(w).max(1, keepdims=True) if strategy == "channel" else np.abs(w).max(keepdims=True)
    scale = (top / 127).astype(np.float32)
    q = np.clip(np.round(w / scale), -127, 127)
    stored = scale if strategy == "channel" else scale.reshape(1)
    return {"weight": tensor(q, torch.int8), "weight_scale": tensor(stored)}, q.astype(
        np.float32
    ) * scale


def float8(
    w: np.ndarray, name: str, *, strategy: str = "tensor", block: int = 32, scale_name: str = "weight_scale",
    static: bool = False, exponents: bool = False,
) -> Written:  # fmt: skip
    """`exponents`: scales are powers of two."""
    blocks = {"tensor": w.shape, "channel": (1, w.shape[1]), "block": (block, block)}[strategy]
    rows, columns = (-(-size // part) for size, part in zip(w.shape, blocks, strict=True))
    q, means = torch.zeros(w.shape, dtype=torch.float8_e4m3fn), np.zeros_like(w)
    scale = np.zeros((rows, columns), np.float32)
    for r in range(rows):
        for c in range(columns):
            at = np.s_[r * blocks[0] : (r + 1) * blocks[0], c * blocks[1] : (c + 1) * blocks[1]]
            scale[r, c] = np.abs(w[at]).max() / 448
            if exponents:
                scale[r, c] = np.exp2(np.ceil(np.log2(scale[r, c])))
            q[at] = tensor(w[at] / scale[r, c], torch.float8_e4m3fn)
            means[at] = q[at].float().numpy() * scale[r, c]
    stored = tensor(scale.reshape(()) if strategy == "tensor" else scale)
    stored = stored.to(torch.float8_e8m0fnu) if exponents else stored
    found = {"weight": q, scale_name: stored}
    if static:
        found["input_scale"] = torch.tensor(0.02)
    return found, means


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def block_floats(w: np.ndarray, name: str, *, form: str) -> Written:
    """NVFP4 (compressed-tensors: "nvfp4"; ModelOpt: "modelopt"), MXFP4 ("mxfp4") and MXFP8 ("mxfp8")."""
    block = 16 if form in ("nvfp4", "modelopt") else 32
    top = np.abs(w.reshape(len(w), -1, block)).max(2)
    whole = np.float32(448 * 6 / np.abs(w).max())
    if form in ("nvfp4", "modelopt"):
        stored = tensor(top / 6 * whole, torch.float8_e4m3fn)
        # ModelOpt stores the reciprocal, and multiplies by it.
        whole = whole if form == "nvfp4" else np.float32(1) / whole
        scale = (
            stored.float().numpy() / whole if form == "nvfp4" else stored.float().numpy() * whole
        )
    else:
        exponent = np.floor(np.log2(top)) - (2 if form == "mxfp4" else 8)
        stored, scale = tensor(exponent + 127, torch.uint8), np.exp2(exponent).astype(np.float32)
    scale_OI = scale.repeat(block, 1)
    if form == "mxfp8":
        codes = tensor(w / scale_OI).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": stored}, codes.float().numpy() * scale_OI
    nearest = np.abs(np.abs(w / scale_OI)[..., None] - E2M1).argmin(-1)
    means = E2M1[nearest] * np.where(w < 0, -1, 1) * scale_OI
    code = (nearest | (w < 0) << 3).astype(np.uint8)
    packed = tensor(code[:, ::2] | code[:, 1::2] << 4)
    if form == "modelopt":
        found = {
            "weight": packed,
            "weight_scale_2": tensor(whole),
            "input_scale": torch.tensor(0.1),
        }
    elif form == "nvfp4":
        found = {"weight_packed": packed, "weight_global_scale": tensor(whole.reshape(1))}
        found["input_global_scale"] = torch.tensor([9.0])
    else:
        found = {"weight_packed": packed}
    return {**found, "weight_scale": stored}, means.astype(np.float32)


NF4 = np.sort(np.random.default_rng(4).uniform(-1, 1, 16)).astype(np.float32)
"""Any code book will do: files contain their own."""


def bnb_4bit(w: np.ndarray, name: str, *, nested: bool = False, block: int = 64) -> Written:
    flat = w.reshape(-1, block)
    absmax = np.abs(flat).max(1)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(w.shape)}
    found = {"weight.quant_map": tensor(NF4.copy())}
    if nested:
        book, offset, size = np.linspace(-1, 1, 256).astype(np.float32), absmax.mean(), 32
        state |= {
            "nested_blocksize": size,
            "nested_offset": float(offset),
            "nested_dtype": "float32",
        }
        top = np.abs(absmax - offset).reshape(-1, size).max(1)
        code = np.abs((absmax - offset) / top.repeat(size) - book[:, None]).argmin(0)
        absmax = (book[code] * top.repeat(size) + np.float32(float(offset))).astype(np.float32)
        found |= {"weight.nested_absmax": tensor(top), "weight.nested_quant_map": tensor(book)}
        found["weight.absmax"] = tensor(code, torch.uint8)
    else:
        found["weight.absmax"] = tensor(absmax)
    code = np.abs((flat / absmax[:, None])[..., None] - NF4).argmin(-1).astype(np.uint8)
    pairs = code.reshape(-1, 2)
    found["weight"] = tensor((pairs[:, 0] << 4 | pairs[:, 1])[:, None])
    says = np.frombuffer(json.dumps(state).encode(), np.uint8)
    found["weight.quant_state.bitsandbytes__nf4"] = tensor(says.copy())
    return found, (NF4[code] * absmax[:, None]).reshape(w.shape)


def bnb_int8(w: np.ndarray, name: str) -> Written:
    top = np.abs(w).max(1)
    q = np.round(w / top[:, None] * 127).astype(np.int8)
    found = {"weight": tensor(q), "SCB": tensor(top), "weight_format": torch.tensor(0).byte()}
    return found, q.astype(np.float32) * (top / 127)[:, None]


def hqq(w: np.ndarray, name: str, *, bits: int = 4, group: int = 64, axis: int = 1) -> Written:
    grouped = w.reshape(-1, group) if axis == 1 else w.reshape(group, -1)
    low, high = grouped.min(axis, keepdims=True), grouped.max(axis, keepdims=True)
    scale = (high - low) / ((1 << bits) - 1)
    zero = -low / scale + np.float32(0.25)
    q = np.clip(np.round(grouped / scale + zero), 0, (1 << bits) - 1).astype(np.int64)
    per = 10 if bits == 3 else 8 // bits
    padded = np.concatenate([q, np.zeros((-len(q) % per, q.shape[1]), np.int64)])
    packed = np.zeros((len(padded) // per, q.shape[1]), np.int64)
    for part in np.split(padded, per):
        packed = packed << bits | part
    found = {"W_q": tensor(packed, torch.int32 if bits == 3 else torch.uint8)}
    found |= {"scale": tensor(scale), "zero": tensor(zero), "shape": torch.tensor(w.shape)}
    for told in ("nbits", "axis", "group_size", "packing", "view_as_float", "stores_quant_config"):
        found[told] = torch.tensor(1, dtype=torch.int32)
    return found, ((q.astype(np.float32) - zero) * scale).reshape(w.shape)


def torchao(w: np.ndarray, name: str, *, form: str, group: int = 32) -> Written:
    if form == "float8":
        found, means = float8(w, name, strategy="channel")
    elif form == "int8":
        found, means = ct_int8(w, name)
        found["zero_point"] = torch.zeros(len(w), 1, dtype=torch.int8)
    else:
        groups = neighbours(w.shape[1], group)
        q, scale, zero = round_groups(w, groups, 4, symmetric=False)
        means = meaning(q, scale, zero, groups)
        found = {"weight": tensor(q - 8, torch.int8), "zero_point": tensor(zero - 8, torch.int8)}
        found["weight_scale"] = tensor(scale)
    own = {"weight": "qdata", "weight_scale": "scale"}
    return {f"_weight_{own.get(part, part)}": each for part, each in found.items()}, means


def torchao_config(called: str, **data: Any) -> dict[str, Any]:
    layer = {"_type": called, "_version": 2, "_data": data}
    by_name = {"_default": layer, PLAIN: None}
    quantizes = {"_type": "FqnToConfig", "_data": {"fqn_to_config": by_name}}
    return {"quant_method": "torchao", "quant_type": {"default": quantizes}}


def compressed(form: str, *, ignore: bool = True, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", PLAIN] if ignore else [],
        "quantization_status": "compressed",
    }


PLAIN = "model.layers.1.mlp.down_proj"
"""A layer that every checkpoint here leaves as it is."""


@dataclass(frozen=True)
class Form:
    """A variant of a format: what config.json says, who writes its tensors, and what becomes of the numbers."""

    name: str
    config: dict[str, Any]
    write: Callable[..., Written]
    how: dict[str, Any] = field(default_factory=dict)
    becomes: str = "int4"  # int4 and int8: as stored; requantized: int8 of its own; plain: floats


def gptq_config(**more: Any) -> dict[str, Any]:
    says = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    return {**says, "modules_to_not_convert": [PLAIN], **more}


def modelopt(algorithm: str) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head", f"*{PLAIN[6:]}"],
    }


INT = {"type": "int", "symmetric": True, "num_bits": 8, "strategy": "channel"}
FLOAT = {**INT, "type": "float"}
FOUR = {**INT, "num_bits": 4, "strategy": "group", "group_size": 32}
WIDE = {"bits": 4, "group": -1}


def auto_round(packing_format: str = "auto_round") -> dict[str, Any]:
    return {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int",
        "packing_format": packing_format, "extra_config": {PLAIN: {"bits": 16, "data_type": "fp"}},
    }  # fmt: skip


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": [PLAIN]}
HQQ = {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head", PLAIN]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": [PLAIN]}
FORMS = [
    Form("gptq", gptq_config(), gptq),
    Form("gptq one group", gptq_config(group_size=-1), gptq, {"group": -1}),
    Form("gptq asymmetric", gptq_config(sym=False), gptq, {"symmetric": False}),
    Form("gptq ordered", gptq_config(desc_act=True), gptq, {"order": "layer"}),
    Form("gptq ordered each its way", gptq_config(desc_act=True), gptq, {"order": "own"}, "plain"),
    Form(
        "gptq v2 asymmetric ordered",
        gptq_config(checkpoint_format="gptq_v2", sym=False, desc_act=True),
        gptq,
        {"version": 2, "symmetric": False, "order": "layer"},
    ),
    Form("gptq 2 bits", gptq_config(bits=2), gptq, {"bits": 2}),
    Form("gptq 3 bits", gptq_config(bits=3, sym=False), gptq, {"bits": 3, "symmetric": False}),
    Form("gptq 8 bits", gptq_config(bits=8), gptq, {"bits": 8}, "requantized"),
    Form(
        "gptq 8 bits one group", gptq_config(bits=8, group_size=-1), gptq, {"bits": 8, "group": -1}, "int8"
    ),
    Form(
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": [PLAIN]},
        awq,
    ),
    Form("ct int8", compressed("int-quantized", **INT), ct_int8, becomes="int8"),
    Form("ct int8 tensor", compressed("int-quantized", **{**INT, "strategy": "tensor"}), ct_int8, {"strategy": "tensor"}, "int8"),
    Form("ct int4", compressed("pack-quantized", **FOUR), ct_packed),
    Form("ct int4 asymmetric", compressed("pack-quantized", **{**FOUR, "symmetric": False}), ct_packed, {"symmetric": False}),
    Form("ct int4 channel", compressed("pack-quantized", **{**INT, "num_bits": 4}), ct_packed, {"strategy": "channel", "group": -1}),
    Form("ct int4 ordered", compressed("pack-quantized", **FOUR, actorder="group"), ct_packed, {"order": True}),
    Form("ct packed int8", compressed("pack-quantized", **{**INT, "strategy": "group", "group_size": 32}), ct_packed, {"bits": 8}, "requantized"),
    Form("ct packed 6 bits", compressed("pack-quantized", **{**INT, "num_bits": 6, "symmetric": False}), ct_packed, {"bits": 6, "group": -1, "symmetric": False}, "int8"),
    Form("bnb nf4", BNB, bnb_4bit, becomes="plain"),
    Form("bnb nf4 nested", BNB, bnb_4bit, {"nested": True}, "plain"),
    Form("bnb int8", {**BNB, "load_in_4bit": False, "load_in_8bit": True}, bnb_int8, becomes="int8"),
    Form("hqq", HQQ, hqq, becomes="plain"),
    Form("hqq 3 bits by outputs", HQQ, hqq, {"bits": 3, "axis": 0}, "plain"),
    Form("torchao int8", torchao_config("Int8DynamicActivationInt8WeightConfig", granularity={"_type": "PerRow"}), torchao, {"form": "int8"}, "int8"),
    Form("torchao float8", torchao_config("Float8WeightOnlyConfig", granularity=[{"_type": "PerRow"}]), torchao, {"form": "float8"}, "requantized"),
    Form("torchao intx", torchao_config("IntxWeightOnlyConfig", granularity={"_type": "PerGroup", "_data": {"group_size": 32}}, weight_dtype={"_data": "int4"}), torchao, {"form": "intx"}),
    Form("auto-round", auto_round(), gptq, {"version": 2, "symmetric": False}),
    Form("auto-round gptq", auto_round(packing_format="auto_round:auto_gptq"), gptq, {"symmetric": False}),
    Form("auto-round awq", auto_round(packing_format="auto_round:auto_awq"), awq),
    Form("fp8", FP8, float8, {"static": True}, "requantized"),
    Form("fp8 blocks", {**FP8, "weight_block_size": [32, 32]}, float8, {"strategy": "block", "scale_name": "weight_scale_inv"}, "requantized"),
    Form("fp8 blocks e8m0", {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}, float8, {"strategy": "block", "scale_name": "weight_scale_inv", "exponents": True}, "requantized"),
    Form("fbgemm", {**FP8, "quant_method": "fbgemm_fp8"}, float8, {"strategy": "channel"}, "requantized"),
    Form("ct float8", compressed("float-quantized", **FLOAT), float8, {"strategy": "channel"}, "requantized"),
    Form("ct float8 tensor", compressed("float-quantized", **{**FLOAT, "strategy": "tensor"}), float8, {"static": True}, "requantized"),
    *(
        Form(f"ct {form}", compressed(f, **INT), block_floats, {"form": form}, "plain")
        for form, f in (
            ("nvfp4", "nvfp4-pack-quantized"), ("mxfp4", "mxfp4-pack-quantized"), ("mxfp8", "mxfp8-quantized")
        )
    ),
    Form("modelopt fp8", modelopt("FP8"), float8, {"static": True}, "requantized"),
    Form("modelopt nvfp4", modelopt("NVFP4"), block_floats, {"form": "modelopt"}, "plain"),
    Form("mxfp8", {**FP8, "quant_method": "mxfp8"}, block_floats, {"form": "mxfp8"}, "plain"),
    Form("ct float8 blocks", compressed("float-quantized", **{**FLOAT, "strategy": "block"}, block_structure=[32, 32]), float8, {"strategy": "block"}, "requantized"),
]  # fmt: skip

"""What a GGUF file says about its model: config.json, and the checkpoint name of each tensor.

Knows architectures.toml, and what a table cannot say: rope, windows, experts. Does not know torch or blocks.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import ConfigError, Unsupported
from quire.models.gguf.header import GgufHeader, GgufTensor, read_header
from quire.models.gguf.recurrent import head_sizes, layer_sizes
from quire.models.registry import choose_impl

TOP = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm", "token_embd_norm": "model.embedding_norm",
}  # fmt: skip
ROPE = re.compile(r"^rope_(?:freqs|factors_(?:long|short))\.weight$")
SAFETENSORS = "serve the model's safetensors checkpoint"
BIASED = re.compile(r"\.attn_(?:q|qkv|kv_a_mqa)\.bias$")
SIGMOID = 2  # of expert_gating_func
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SWITCHES = {
    "expert_count": "experts", "attention.sliding_window": "window", "ssm.dt_b_c_rms": "rms",
    "expert_shared_feed_forward_length": "shared",
}  # fmt: skip
"""Key -> the line of a family that names the family of files with this key."""


@functools.cache
def table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("architectures.toml").read_text("utf-8"))


def family(header: GgufHeader) -> dict[str, Any]:
    """The table of the header's architecture.

    Raises:
        Unsupported: there is none.
    """
    families, name = table()["families"], header.architecture
    for key, also in SWITCHES.items():
        if header.get(key) and also in families.get(name, {}):
            name = families[name][also]
    if header.get("expert_gating_func") == SIGMOID:
        name = families.get(name, {}).get("sigmoid", name)
    if name == "clip":
        raise Unsupported(f"{header.files[0]} (a vision tower) as a model", "pass the file of the language model, and this one with --mmproj")  # fmt: skip
    if name not in families:
        raise Unsupported(
            f"{header.files[0]} (a GGUF file of the architecture {name or 'without a name'!r})",
            f"{SAFETENSORS}; GGUF is read for {', '.join(families)}",
        )
    found: dict[str, Any] = families[name]
    return found


# ------------------------------------------------------------------------------------ config.json


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The config.json of the model.

    Raises:
        Unsupported: of this architecture there is no table. ConfigError: a value is missing or of a wrong type.
    """
    about = family(header)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    config: dict[str, Any] = {
        "architectures": [about["architecture"]],
        "model_type": about["model_type"],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": any(BIASED.search(name) for name in shapes),
        "attention_out_bias": any(name.endswith(".attn_output.bias") for name in shapes),
        "mlp_bias": any(name.endswith(".ffn_down.bias") for name in shapes),
        "conv_bias": any(name.endswith(".shortconv.in_proj.bias") for name in shapes),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in shapes,
        "dtype": _dtype(header),
        **about.get("config", {}),
    }
    if any(tensor.kind not in FLOATS for tensor in header.tensors):
        config["quantization_config"] = {"quant_method": "gguf"}
    for key, name in {**table()["keys"], **about.get("keys", {})}.items():
        value = header.get(key)
        if value is not None and name:
            config[name] = _scalar(header, key, value, key in about.get("by_layer", ()))
    if (embeddings := shapes.get("token_embd.weight")) is None or len(embeddings) != 2:
        raise ConfigError(f"{header.files[0]} has no table token_embd.weight")
    config["vocab_size"] = embeddings[0]
    try:
        _complete(header, about, config, shapes)
        impl, why = choose_impl(about["architecture"], config)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{header.files[0]}: its metadata are not complete: {error!r}") from None
    if impl != "native":
        what = f"{header.files[0]} (a GGUF file of the architecture {header.architecture!r}: {why})"
        raise Unsupported(what, SAFETENSORS)
    return config


def _complete(
    header: GgufHeader, about: Mapping[str, Any], config: dict[str, Any], names: Collection[str]
) -> None:
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"] = config["num_attention_heads"] or 1  # 0: no attention
    layers = config["num_hidden_layers"] = int(config["num_hidden_layers"]) - int(
        header.get("nextn_predict_layers", 0)
    )
    if not 0 < layers <= 4096:
        raise ConfigError(f"{header.files[0]}: it claims {layers} layers")
    if about["model_type"] == "gemma4_text":
        config |= _gemma4(header, config)
    config |= layer_sizes(header, about, names, config)
    if header.get("attention.kv_lora_rank"):
        config |= _latent_attention(header)
    config.setdefault("num_key_value_heads", heads)
    size = config.setdefault("head_dim", hidden // heads)
    rotated = header.get("rope.dimension_count") or size
    if rotated != size and "global_head_dim" not in config:
        config["partial_rotary_factor"] = rotated / size
    every = header.get("attention.sliding_window_pattern", about.get("full_every"))
    if every and config.get("sliding_window"):
        windows = every if isinstance(every, list) else [(i + 1) % every for i in range(layers)]
        if len(windows) < layers:
            raise ConfigError(f"{header.files[0]}: its sliding_window_pattern is too short")
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[bool(window)] for window in windows[:layers]]
    elif not config.get("sliding_window"):
        config["sliding_window"] = None
    else:
        config["use_sliding_window"] = True
    if (every := config.pop("no_rope_layer_interval", None)) is not None:
        config["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(layers)]
        config["no_rope_layer_interval"] = every
    if (count := about.get("experts_without_qk_norm")) is not None:
        config["use_qk_norm"] = header.get("expert_count") != count
    if (largest := about.get("query_scale_layers")) is not None:  # the 27B models scale otherwise
        config["query_pre_attn_scalar"] = hidden // heads if layers == largest else size
    rope = {**_rope(header), **about.get("rope", {})}
    if (theta := header.get("rope.freq_base_swa", about.get("window_theta"))) is not None:
        of_windows = {"rope_type": "default", "rope_theta": theta}
        rope = {"full_attention": rope, "sliding_attention": of_windows}
    if (sections := header.get("rope.dimension_sections")) is not None:
        rope["mrope_section"] = sections[:3]
    if "global_head_dim" in config:
        rope = _proportional(header, int(config["global_head_dim"]), int(size))
    config["rope_parameters"] = rope
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = header.metadata.get(f"tokenizer.ggml.{key}_token_id")


def _gemma4(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """What layers differ in: windows, key heads, widths, and the sharing of keys and values."""
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    widths, kv_heads = (
        header.get(key) for key in ("feed_forward_length", "attention.head_count_kv")
    )
    windows = header.get("attention.sliding_window_pattern")
    full = windows.index(0)
    found: dict[str, Any] = {
        "enable_moe_block": bool(header.get("expert_count")),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in shapes,
        "vocab_size_per_layer_input": shapes.get("per_layer_token_embd.weight", (0,))[0],
    }
    if isinstance(widths, list):
        found["intermediate_size"] = widths[0]
        found["use_double_wide_mlp"] = widths[-1] != widths[0]
    if isinstance(kv_heads, list):
        found["num_key_value_heads"] = kv_heads[windows.index(1)]
        found["num_global_key_value_heads"] = kv_heads[full]
    return found


def _proportional(header: GgufHeader, size: int, window_size: int) -> dict[str, Any]:
    """Gemma 4's rotation: rope_freqs has huge factors for the features that full layers do not rotate."""
    freqs = _numbers(next((t for t in header.tensors if t.name == "rope_freqs.weight"), None))
    rotated = sum(factor < 1e20 for factor in freqs) * 2 / size if freqs else 1.0
    theta, of_windows = header.get("rope.freq_base", 1e6), header.get("rope.freq_base_swa", 1e4)
    part = (header.get("rope.dimension_count_swa") or window_size) / window_size
    window = {"rope_type": "default", "rope_theta": of_windows, "partial_rotary_factor": part}
    full = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": rotated}
    return {"full_attention": full, "sliding_attention": window}


def _latent_attention(header: GgufHeader) -> dict[str, Any]:
    """DeepSeek's sizes of a head; newer files describe the cache in key_length, and have one key head."""
    rotated = header.get("rope.dimension_count")
    sizes = [
        header.get(f"attention.{which}_length_mla", header.get(f"attention.{which}_length"))
        for which in ("key", "value")
    ]
    groups = header.get("expert_group_count") or 1
    return {
        "kv_lora_rank": header.get("attention.kv_lora_rank"),
        "q_lora_rank": header.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": sizes[0] - rotated,
        "v_head_dim": sizes[1],
        "head_dim": rotated,
        "num_key_value_heads": header.get("attention.head_count"),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def _scalar(header: GgufHeader, key: str, value: Any, differs: bool) -> Any:
    """One value for all layers; the largest, if they may differ. Raises Unsupported: they differ, and may not."""
    if isinstance(value, list) and differs:
        value = max((each for each in value if isinstance(each, int)), default=0)
    if isinstance(value, list):
        if len(set(map(str, value))) != 1:
            what = f"{header.files[0]} (layers that differ in {key})"
            raise Unsupported(what, SAFETENSORS)
        value = value[0]
    if isinstance(value, str):
        raise ConfigError(f"{header.files[0]}: {key} is {value[:80]!r}; it must be a number")
    return value


def _dtype(header: GgufHeader) -> str:
    """That of the matrices, if they are floats; else bfloat16."""
    kinds = {t.kind for t in header.tensors if len(t.shape) > 1}
    return FLOATS[kinds.pop()] if len(kinds) == 1 and kinds <= FLOATS.keys() else "bfloat16"


def _rope(header: GgufHeader) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(header.get("rope.freq_base", 10000.0)),
    }
    kind, factor = header.get("rope.scaling.type"), header.get("rope.scaling.factor")
    trained = header.get("rope.scaling.original_context_length")
    lists = {t.name: t for t in header.tensors if ROPE.match(t.name)}
    if lists:
        # Llama 3 stores the factors that its recipe gives, Phi 3 the factors of its config.json.
        short = _numbers(lists.get("rope_factors_short.weight") or lists.get("rope_freqs.weight"))
        long = _numbers(lists.get("rope_factors_long.weight")) or short
        longest = header.get("context_length")
        rope |= {"rope_type": "longrope", "short_factor": short or long, "long_factor": long}
        rope["original_max_position_embeddings"] = trained or longest
        if "rope_freqs.weight" in lists:
            rope["attention_factor"] = 1.0
        elif (attention := header.get("rope.scaling.attn_factor")) is not None:
            rope["attention_factor"] = attention
    elif kind in ("linear", "yarn") and factor:
        rope |= {"rope_type": kind, "factor": factor}
        if (scale := header.get("rope.scaling.yarn_log_multiplier")) is not None:
            rope |= dict.fromkeys(("mscale", "mscale_all_dim"), scale * 10)
        if trained:
            rope["original_max_position_embeddings"] = trained
    elif kind not in (None, "none", "linear", "yarn", "longrope"):
        raise Unsupported(f"{header.files[0]} (rope.scaling.type={kind!r})", SAFETENSORS)
    return rope


def _numbers(tensor: GgufTensor | None) -> list[float]:
    """The values of a small float tensor."""
    if tensor is None:
        return []
    import struct

    if tensor.kind != "F32" or tensor.nbytes > 1 << 16:
        raise ConfigError(
            f"{tensor.file}: {tensor.name} has {tensor.nbytes} bytes of {tensor.kind}"
        )
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.nbytes // 4}f", opened.read(tensor.nbytes)))


# ------------------------------------------------------------------------------------ tensors


class TensorPlace(NamedTuple):
    """Where a tensor belongs in a checkpoint: its name, with * for the number of an expert in a stack of them.

    `heads`: of a weight whose rows are in the order of interleaved rope, else 0. `minus_one`: it is stored with 1 added.
    `half`: which half of each expert's rows it is; None: all. `tiled`: (first, key heads, value heads of each): rows from `first`
    on have the heads of one key head apart; columns, if `columns`. `is_decay`: it is -exp(the checkpoint's).
    `by_head`: (key heads, rows of each part): each key head has its rows of all parts; the first half is all parts but the last.
    """

    tensor: GgufTensor
    name: str
    heads: int = 0
    minus_one: bool = False
    half: int | None = None
    tiled: tuple[int, int, int] | None = None
    columns: bool = False
    is_decay: bool = False
    by_head: tuple[int, tuple[int, ...]] | None = None


def tensor_places(header: GgufHeader, config: Mapping[str, Any]) -> list[TensorPlace]:
    """Each tensor of the model, in the order of the files.

    Raises:
        Unsupported: a layer has a tensor of an unknown name.
    """
    about = family(header)
    names = {**table()["tensors"], **about.get("tensors", {})}
    top, layers = {**TOP, **about.get("top", {})}, about.get("layers", "model.layers")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = []
    for tensor in header.tensors:
        base, _, end = tensor.name.rpartition(".")
        if re.fullmatch(r"blk\.\d+", base):  # a name without .weight
            base, end = tensor.name, ""
        if base in top:
            name = top[base]
        elif match := re.match(r"^blk\.(\d+)\.(.+)$", base):
            layer, base = int(match[1]), match[2]
            if layer >= config["num_hidden_layers"]:
                continue  # layers that predict further tokens
            base = f"{base}.{end}" if f"{base}.{end}" in names else base
            if base not in names:
                what = f"{tensor.file} (a tensor {tensor.name} in a {header.architecture} model)"
                raise Unsupported(what, SAFETENSORS)
            name = f"{layers}.{layer}.{names[base]}"
        elif ROPE.match(tensor.name):
            continue
        else:
            name, end = tensor.name, ""
        place = TensorPlace(
            tensor,
            name[:-1] if name.endswith(".") else f"{name}.{end}".rstrip("."),
            int(heads.get(base, 0)) if about.get("permuted") else 0,
            bool(about.get("plus_one"))
            and base.endswith("norm")
            and base not in about.get("without_one", ()),
            tiled=_tiles(base, about, config),
            columns=base == "ssm_out",
            is_decay=base == "ssm_a",
            by_head=head_sizes(base, config) if base in about.get("by_key_head", ()) else None,
        )
        if both := re.match(r"(.+\.)(\w+)\+(\w+)(\.\w+)$", place.name):
            start, end = both[1], both[4]
            halves = enumerate((both[2], both[3]))
            found += [place._replace(name=start + half + end, half=i) for i, half in halves]
        else:
            found.append(place)
    return found


def _tiles(
    base: str, about: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[int, int, int] | None:
    if base not in about.get("tiled", ()):
        return None
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    joined = base in ("attn_qkv", "ssm_conv1d")  # queries and keys are before the values
    return 2 * joined * keys * config["linear_key_head_dim"], keys, values // keys


def stored_in(file: Path) -> list[tuple[str, str, Sequence[int]]]:
    """Checkpoint name, type and shape of each tensor of a model."""
    header = read_header(file, tokenizer=False)
    found = tensor_places(header, config_of(header))
    return [
        (each.name, "BF16" if each.columns and each.tiled else each.tensor.kind, _shape(each))
        for each in found  # other columns of a block cannot be put in order
    ]


def _shape(place: TensorPlace) -> Sequence[int]:
    shape = place.tensor.shape
    if place.half is None:
        return shape
    if place.by_head is not None:
        keys, rows = place.by_head
        return (keys * (rows[-1] if place.half else sum(rows[:-1])), *shape[1:])
    return (shape[0], shape[1] // 2, *shape[2:])

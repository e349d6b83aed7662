"""The spec of a speculator's model: its config.json in one form, with what its checkpoint has, checked against the target.

Knows the configs and the tensor names of every kind of speculator. Does not know their layers.

Added to the config: `own_table`, `own_head` (whether the checkpoint has an embedding and a head of its own, which are not the
target's), `after` and `target_ids` (see `Speculator`), `mask_state`, and which biases and norms there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.config.engine import ModelSpec
from quire.config.model_sizes import model_size
from quire.config.speculation import MAX_DRAFT_TOKENS
from quire.errors import ConfigError, Unsupported
from quire.logging import get_logger
from quire.models.checkpoint_files import stored_tensors, tensors, weight_files
from quire.models.construction import model_class
from quire.models.hf_config import check_sizes
from quire.models.registry import MTP

log = get_logger(__name__)

COMPARED_ROWS = 64
"""Rows of a shipped table or head that are compared: if all are equal, the target's is used."""
REMEDY = "use the speculator that was made for this model"


def speculator_spec(
    method: str, spec: ModelSpec, target: ModelSpec, num_tokens: int = 1
) -> ModelSpec:
    """The spec of a speculator for `build_model`.

    Args:
        method: eagle, eagle3, mtp, medusa or mlp_speculator.
        num_tokens: the most guesses of a step.
        spec: its checkpoint; for MTP layers in the target's checkpoint, the target's spec.

    Raises:
        ConfigError: the checkpoint lacks a tensor, or does not fit the target; the message names field and remedy.
        Unsupported: the target's family has no MTP layers here.
    """
    if method == "mtp":
        if (name := MTP.get(target.architecture, "")) == "":
            raise Unsupported(
                f"MTP of {target.architecture}",
                f"use a model of {', '.join(sorted(MTP))}, or another method",
            )
        config = _mtp(spec, target, num_tokens)
    else:
        name, read = READERS[method]
        config = read(_Checkpoint.of(name, spec, target))
    config |= {"architectures": [name], "tie_word_embeddings": False}
    own = replace(spec, hf_config=config, architecture=name)
    return replace(own, max_model_len=target.max_model_len, dtype=target.dtype)


@dataclass
class _Checkpoint:
    """The tensors of a speculator by their usual names (views of the mapped files), its config and the target."""

    spec: ModelSpec
    target: ModelSpec
    config: dict[str, Any]
    found: Mapping[str, Tensor]

    @classmethod
    def of(cls, name: str, spec: ModelSpec, target: ModelSpec) -> _Checkpoint:
        kind = model_class(name)
        found = tensors(spec.path, spec.load.load_format)
        config = dict(spec.hf_config)
        for key in ("transformer_layer_config", "eagle_config"):
            if not isinstance(inner := config.get(key) or {}, Mapping):
                raise ConfigError(f"{key}={inner!r:.50} of {spec.path}: this is an object")
        config |= config.get("transformer_layer_config") or {}
        check_sizes(config)
        return cls(spec, target, config, {kind.usual_name(each): one for each, one in found})

    @property
    def hidden_size(self) -> int:
        """Raises ConfigError: config.json has none."""
        if type(found := self.config.get("hidden_size")) is not int:
            raise ConfigError(
                f"hidden_size={found!r:.50} of {self.spec.path}: this is a whole number; {REMEDY}"
            )
        return found

    def option(self, key: str, default: Any = None) -> Any:
        """A value of config.json, or of its `eagle_config`."""
        inner = self.config.get("eagle_config") or {}
        value = self.config.get(key)
        value = inner.get(key) if value is None else value
        return default if value is None else value

    def size(self, key: str) -> int:
        """A size of the target."""
        return model_size(self.target.hf_config, key)

    def tensor(self, name: str) -> Tensor:
        """Raises ConfigError: it is missing, or a single number."""
        if (found := self.found.get(name)) is None or not found.dim():
            raise ConfigError(
                f"{self.spec.path} has no tensor {name}; {REMEDY}, of the method that is set"
            )
        return found

    def has(self, pattern: str) -> bool:
        return any(re.search(pattern, name) for name in self.found)

    def count(self, pattern: str) -> int:
        """The highest number that the pattern's group finds in names, plus one."""
        numbers = (match for name in self.found if (match := re.search(pattern, name)))
        return max((int(match[1]) + 1 for match in numbers), default=0)

    def check(self, what: str, value: int, key: str) -> None:
        """Raises ConfigError: it differs from the target's size."""
        if value != self.size(key):
            raise ConfigError(
                f"{what} of {self.spec.path} is {value}, but the target {self.target.path} has {key}={self.size(key)};"
                f" {REMEDY}"
            )

    def owns(self, name: str, vocab: int) -> bool:
        """Whether it has this table or head, and that is not the target's.

        Raises:
            ConfigError: it has none, and the target's has another width.
        """
        if (own := self.found.get(name)) is None:
            self.check(f"hidden_size (without a tensor {name})", self.hidden_size, "hidden_size")
            return False
        if tuple(own.shape) != (vocab, self.hidden_size):
            raise ConfigError(
                f"{name} of {self.spec.path} has shape {list(own.shape)}, but its config requires"
                f" {[vocab, self.config['hidden_size']]}"
            )
        return not self._is_targets(name, own)

    def _is_targets(self, name: str, own: Tensor) -> bool:
        load = self.target.load.load_format
        if load == "dummy" or weight_files(self.target.path, load)[0] != "safetensors":
            return False
        names = (name, "embed_tokens.weight")  # (a tied head is the table)
        for each in names[: 1 + bool(self.target.hf_config.get("tie_word_embeddings"))]:
            for called, found in tensors(self.target.path, load):
                if called.endswith(each) and "layers." not in called:
                    return _equal(own, found)
        return False


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return False
    rows = torch.linspace(0, len(one) - 1, min(len(one), COMPARED_ROWS)).long()
    return torch.equal(one[rows], other[rows])


def _check_count(spec: ModelSpec, name: str, count: Any) -> None:
    """Raises ConfigError: no speculator has this number of parts."""
    if type(count) is not int or not 0 < count <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"{name}={count!r:.50} of {spec.path}: this is a whole number from 1 to {MAX_DRAFT_TOKENS}; {REMEDY}"
        )


def _target_ids(checkpoint: _Checkpoint, ids: Tensor, name: str, count: int) -> Tensor:
    """Raises ConfigError: an id is outside the target's vocabulary, or there are not `count`."""
    vocab = checkpoint.size("vocab_size")
    if ids.dim() != 1 or ids.is_floating_point() or len(ids) != count:
        raise ConfigError(
            f"{name} of {checkpoint.spec.path} is {ids.dtype} {list(ids.shape)}; it must have an integer for each of the"
            f" {count} tokens that the speculator knows"
        )
    ids = ids.long() + (torch.arange(count) if name == "d2t" else 0)
    if wrong := ((ids < 0) | (ids >= vocab)).nonzero().flatten().tolist():
        raise ConfigError(
            f"{name}[{wrong[0]}] of {checkpoint.spec.path} is token {int(ids[wrong[0]])} of the target, outside its vocabulary"
            f" of {vocab}; {REMEDY}"
        )
    return ids


def _layers(checkpoint: _Checkpoint) -> dict[str, Any]:
    """What an EAGLE checkpoint has, apart from its kind."""
    config, vocab = checkpoint.config, checkpoint.size("vocab_size")
    config["vocab_size"] = vocab
    config["own_table"] = checkpoint.owns("embed_tokens.weight", vocab)
    for key, pattern in {
        "fc_bias": r"^fc\.bias$",
        "qkv_bias": r"[qkv]_proj\.bias$",
        "o_bias": r"o_proj\.bias$",
        "mlp_bias": r"down_proj\.bias$",
        "qk_norm": r"q_norm\.weight$",
    }.items():
        config[key] = checkpoint.has(pattern)
    return config


def _eagle(checkpoint: _Checkpoint) -> dict[str, Any]:
    checkpoint.check("hidden_size", checkpoint.hidden_size, "hidden_size")
    checkpoint.tensor("fc.weight")
    config = _layers(checkpoint)
    config["draft_vocab_size"] = config["vocab_size"]
    return config | {"own_head": checkpoint.owns("lm_head.weight", config["vocab_size"])}


def _eagle3(checkpoint: _Checkpoint) -> dict[str, Any]:
    config, vocab = _layers(checkpoint), checkpoint.size("vocab_size")
    width = checkpoint.option("target_hidden_size") or checkpoint.size("hidden_size")
    checkpoint.check("target_hidden_size", width, "hidden_size")
    words = checkpoint.option("draft_vocab_size")
    if not words and "lm_head.weight" in checkpoint.found:
        words = len(checkpoint.tensor("lm_head.weight"))
    words = words or vocab
    after = _aux_layers(checkpoint) if checkpoint.option("use_aux_hidden_state", True) else []
    if not after:  # the first layer reads the target's last state as it is
        checkpoint.check("hidden_size", checkpoint.hidden_size, "hidden_size")
    flags = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
    config |= {flag: bool(checkpoint.option(flag, False)) for flag in flags}
    config["norm_before_fc"] |= checkpoint.has(r"^input_norm\.")
    config["fc_norm"] |= checkpoint.has(r"^fc_norm\.")
    if words != vocab:
        checkpoint.tensor("lm_head.weight")
        checkpoint.tensor("d2t")
    if (d2t := checkpoint.found.get("d2t")) is not None:
        config["target_ids"] = _target_ids(checkpoint, d2t, "d2t", words)
    if after and (got := checkpoint.tensor("fc.weight").shape[-1]) != len(after) * width:
        raise ConfigError(
            f"fc.weight of {checkpoint.spec.path} takes {got} features, but the target gives {width} after each of the layers"
            f" {after}; {REMEDY}"
        )
    if checkpoint.option("parallel_drafting") or "mask_hidden" in checkpoint.found:
        config |= _mask(checkpoint, len(after) * width or width)
    return config | {
        "after": after,
        "target_hidden_size": width,
        "draft_vocab_size": words,
        "own_head": checkpoint.owns("lm_head.weight", words),
    }


def _aux_layers(checkpoint: _Checkpoint) -> list[int]:
    layers, key = checkpoint.size("num_hidden_layers"), "eagle_aux_hidden_state_layer_ids"
    found = checkpoint.option(key) or [min(2, layers), layers // 2, max(layers - 3, 0)]
    if not isinstance(found, list) or not all(
        type(each) is int and 0 <= each <= layers for each in found
    ):
        raise ConfigError(
            f"{key}={found} of {checkpoint.spec.path}: these are whole numbers up to the target's {layers} layers; {REMEDY}"
        )
    return list(found)


def _mask(checkpoint: _Checkpoint, width: int) -> dict[str, Any]:
    """Parallel drafting: the token and the state that stand for tokens to come."""
    keys = ("ptd_token_id", "pard_token", "mask_token_id")
    token = next((id for key in keys if (id := checkpoint.option(key)) is not None), None)
    state = checkpoint.tensor("mask_hidden").reshape(1, -1)
    if type(token) is not int or not 0 <= token < checkpoint.size("vocab_size"):
        raise ConfigError(
            f"mask_token_id={token} of {checkpoint.spec.path}: parallel drafting needs a token id of the target's vocabulary"
        )
    if state.shape[1] != width:
        raise ConfigError(
            f"mask_hidden of {checkpoint.spec.path} has {state.shape[1]} features; it must have {width}"
        )
    dtype = getattr(torch, checkpoint.target.dtype)
    return {"mask_token_id": token, "mask_state": state.to(dtype)}


def _medusa(checkpoint: _Checkpoint) -> dict[str, Any]:
    first, vocab = checkpoint.tensor("blocks.0.layers.0.weight"), checkpoint.size("vocab_size")
    checkpoint.check("the width of blocks.0.layers.0.weight", first.shape[-1], "hidden_size")
    heads, blocks = (
        checkpoint.count(rf"^{part}\.(\d{{1,9}})\.") for part in ("lm_heads", "blocks")
    )
    ids = checkpoint.tensor("token_map") if "token_map" in checkpoint.found else None
    words = vocab if ids is None else len(ids)
    config = {
        **_without_layers(checkpoint),
        "hidden_size": first.shape[-1],
        "num_heads": blocks,
        "num_hidden_layers": checkpoint.count(r"^blocks\.\d+\.layers\.(\d{1,9})\."),
        "fc_bias": checkpoint.has(r"^blocks\..*\.bias$"),
        "draft_vocab_size": words,
        "num_lm_heads": min(heads, 1 if checkpoint.option("original_lm_head") else blocks),
    }
    for key in ("num_heads", "num_hidden_layers"):
        _check_count(checkpoint.spec, key, config[key])
    if 1 < config["num_lm_heads"] < config["num_heads"]:
        checkpoint.tensor(f"lm_heads.{heads}.weight")
    if ids is not None:
        config["target_ids"] = _target_ids(checkpoint, ids, "token_map", words)
        checkpoint.tensor("lm_heads.0.weight")
    return config


def _mlp_speculator(checkpoint: _Checkpoint) -> dict[str, Any]:
    first, table = checkpoint.tensor("proj.0.weight"), checkpoint.tensor("emb.0.weight")
    checkpoint.check("emb_dim", first.shape[-1], "hidden_size")
    checkpoint.check("the vocabulary of emb.0.weight", len(table), "vocab_size")
    keys = ("n_predict", "tie_weights", "scale_input")
    options = {key: checkpoint.option(key) for key in keys if checkpoint.option(key) is not None}
    sizes = {"emb_dim": first.shape[-1], "inner_dim": first.shape[0]}
    config = {"n_predict": 3, **_without_layers(checkpoint), **sizes, **options}
    _check_count(checkpoint.spec, "n_predict", config["n_predict"])
    return config


def _without_layers(checkpoint: _Checkpoint) -> dict[str, Any]:
    """The config of a speculator without decoder layers."""
    keys = ("model_type", "quantization_config")
    config = {key: checkpoint.config[key] for key in keys if key in checkpoint.config}
    sizes = {"num_attention_heads": 1, "head_dim": 1, "vocab_size": checkpoint.size("vocab_size")}
    return {**config, **sizes}


def _mtp(spec: ModelSpec, target: ModelSpec, num_tokens: int) -> dict[str, Any]:
    """The config for the MTP layers, which differs from the target's in the number of layers, or is their own."""
    config = dict(spec.hf_config)
    for key in ("hidden_size", "vocab_size"):
        if (own := model_size(config, key)) != (its := model_size(target.hf_config, key)):
            raise ConfigError(
                f"{key}={own} of {spec.path}: the target {target.path} has {its}; {REMEDY}"
            )
    keys = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    count = next((config[key] for key in keys if config.get(key)), 1)
    _check_count(spec, " or ".join(keys), count)
    follows_target = model_class(MTP[target.architecture]).follows_target
    layers = model_size(config, "num_hidden_layers")
    first = f"model.layers.{layers}.eh_proj." if follows_target else "mtp.fc."
    stored = stored_tensors(spec.path, config, spec.load.load_format)
    if not isinstance(stored, int) and not any(name.startswith(first) for name, *_ in stored):
        raise ConfigError(
            f"{spec.path} has no MTP layers (no tensor {first}weight); use a checkpoint that has them, or another method"
        )
    if num_tokens > count:
        log.warning(
            "num_speculative_tokens=%d: %s has %d MTP layer(s), and the last one makes the further guesses too, less often"
            " right ones", num_tokens, spec.path, count,
        )  # fmt: skip
    if follows_target:
        return config | {"num_nextn_predict_layers": count}
    kinds = {"layer_types": ["full_attention"] * count, "mlp_only_layers": []}
    return config | {"num_hidden_layers": count, **kinds}


READERS: dict[str, tuple[str, Callable[[_Checkpoint], dict[str, Any]]]] = {
    "eagle": ("EAGLE speculator", _eagle),
    "eagle3": ("EAGLE-3 speculator", _eagle3),
    "medusa": ("Medusa speculator", _medusa),
    "mlp_speculator": ("MLP speculator", _mlp_speculator),
}
"""Method -> the model's name in the registry, and what reads its config; without mtp."""

"""Builds a model's pooler, with its weights: heads from the checkpoint's own files, stages from folders beside them.

Knows where tensors are. Does not know how they are applied (`layers/pooler.py`). A tensor that is missing is an error: scores
of a random head would look like scores.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.config.engine import ModelSpec
from quire.config.pooling import PoolingModel, Stage
from quire.errors import ConfigError
from quire.layers.linear import Linear
from quire.layers.pooler import Pooler, PoolerStage
from quire.layers.weight_slots import set_parameter
from quire.models.checkpoint_files import tensors
from quire.models.pickled_weights import pickled

LM_HEAD = ("lm_head.weight", "output.weight", "embed_tokens.weight", "tok_embeddings.weight", "wte.weight")  # fmt: skip
"""Ends of the names of an LM head; a tied one is the table of embeddings."""
TABLES = ("word_embeddings.weight", "tok_embeddings.weight")
"""Ends of the names of an encoder's table of embeddings."""

Found = Callable[[str], Tensor | None]
"""The tensor of this name; None: the checkpoint lacks it."""


def build_pooler(spec: ModelSpec, device: torch.device) -> Pooler | None:
    """None: the model generates.

    Raises:
        ConfigError: a tensor is missing, or has another shape.
    """
    if (model := spec.pooling) is None:
        return None
    pooler = Pooler(model)
    dtype = torch.float32 if model.float32_head else getattr(torch, spec.dtype)
    if spec.load.load_format == "dummy":
        _fill(pooler, lambda folder: None, dtype, spec.options.seed)
    else:
        _fill(pooler, lambda folder: _tensors_in(spec, folder), dtype)
    if model.from_tokens:
        pooler.rows_LD = _rows(spec, model)
    return pooler.to(device)


def without_heads(
    found: Iterable[tuple[str, Tensor]], model: PoolingModel
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a pooling model, without the LM head and the heads that `build_pooler` reads."""
    logits = [] if model.splade is None else model.splade.stages
    stages = (*model.head, *model.token_head, *logits)
    own = {name for stage in stages if not stage.folder for name in stage.names}
    own |= {name.rpartition(".")[0] for stage in stages if stage.is_tied for name in stage.names}
    for name, tensor in found:
        module = name.rpartition(".")[0]
        if module not in own and module != "lm_head":
            yield name, tensor


def _tensors_in(spec: ModelSpec, folder: str) -> dict[str, Tensor]:
    if not folder:
        return dict(tensors(spec.path, spec.load.load_format, spec.hf_config, spec.dtype))
    if folder.endswith(".pt"):
        return dict(pickled(Path(spec.path) / folder))
    return dict(tensors(str(Path(spec.path) / folder)))


def _fill(
    pooler: Pooler,
    read: Callable[[str], dict[str, Tensor] | None],
    dtype: torch.dtype,
    seed: int = 0,
) -> None:
    own: dict[str, dict[str, Tensor] | None] = {}
    for number, layer in enumerate(pooler.modules()):
        if not isinstance(layer, PoolerStage) or layer.stage.kind == "normalize":
            continue
        folder = layer.stage.folder
        if folder not in own:
            own[folder] = read(folder)
        found = own[folder]
        _set(layer, _random(layer.stage, seed + number) if found is None else found, dtype)


def _set(layer: PoolerStage, found: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    stage = layer.stage
    name, weight = _named(stage, found)
    bias = _bias(stage, found, name)
    sizes = {"num_out": stage.num_out, "num_in": stage.num_in}
    want = (stage.num_in,) if stage.kind == "layer_norm" else tuple(sizes.values())
    if tuple(weight.shape) != want:
        raise ConfigError(
            f"weight {name} has shape {list(weight.shape)}, but {_place(stage)} requires {list(want)}"
        )
    if bias is None and stage.bias:
        raise ConfigError(
            f"the checkpoint lacks {name.removesuffix('weight')}bias ({_place(stage)})"
        )
    if stage.kind == "layer_norm":
        layer.scale_D, layer.shift_D = weight.to(dtype), None if bias is None else bias.to(dtype)
        return
    layer.linear = _linear(weight, bias, dtype)
    if stage.residual and stage.num_in != stage.num_out:
        extra = found.get("residual.weight")
        if extra is None or tuple(extra.shape) != want:
            raise ConfigError(f"{_place(stage)} lacks residual.weight of shape {list(want)}")
        layer.residual = _linear(extra, None, dtype)


def _bias(stage: Stage, found: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The bias next to the weight; for a tied weight, next to its head or in the head's parent module."""
    if not stage.is_tied:
        return found.get(name.removesuffix("weight") + "bias")
    own = stage.names[0]
    return found.get(f"{own}.bias", found.get(f"{own.rpartition('.')[0]}.bias"))


def _place(stage: Stage) -> str:
    if stage.folder.endswith(".pt"):
        return stage.folder
    return f"{stage.folder}/config.json" if stage.folder else "config.json"


def _named(stage: Stage, found: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """The first of the stage's names that is there; a wrapper may have put a prefix before it."""
    names = [f"{name}.weight".removeprefix(".") for name in stage.names]
    for name in names:
        if (weight := found.get(name)) is not None:
            return name, weight
        longer = [other for other in found if "." in name and other.endswith(f".{name}")]
        if len(longer) == 1:
            return longer[0], found[longer[0]]
    for other in found if stage.is_tied else ():
        if other.endswith(TABLES):
            return other, found[other]
    some = ", ".join(sorted(name for name in found if "layer" not in name)[:5])
    raise ConfigError(
        f"the checkpoint lacks {' or '.join(names)}, which {_place(stage)} requires; it has {some or 'none like it'}"
    )


def _linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    with torch.device("meta"):
        layer = Linear(weight.shape[1], weight.shape[0], bias=bias is not None, exact=True)
    set_parameter(layer, "weight", weight.to(dtype))
    if bias is not None:
        set_parameter(layer, "bias", bias.to(dtype))
    return layer


def _random(stage: Stage, seed: int) -> dict[str, Tensor]:
    """Small random weights, for load_format=dummy."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {stage.names}".encode()))
    name = f"{stage.names[0]}.weight".removeprefix(".")
    bias = name.removesuffix("weight") + "bias"
    if stage.kind == "layer_norm":
        return {name: torch.ones(stage.num_in), bias: torch.zeros(stage.num_in)}
    weight = torch.empty(stage.num_out, stage.num_in).normal_(0.0, 0.02, generator=draw)
    return {name: weight, bias: torch.zeros(stage.num_out), "residual.weight": weight}


def _rows(spec: ModelSpec, model: PoolingModel) -> Tensor:
    """rows_LD: the LM head's rows of the tokens, in float32; of two tokens as one label, the second minus the first.

    Source: sigmoid(yes - no) is the softmax over both logits.
    """
    if spec.load.load_format == "dummy":
        draw = torch.Generator().manual_seed(spec.options.seed)
        rows = torch.empty(len(model.from_tokens), model.hidden_size).normal_(0.0, 0.02, generator=draw)  # fmt: skip
    else:
        rows = _head_rows(spec, model)
    rows = rows.float()
    return rows[1:] - rows[:1] if model.difference else rows


def _head_rows(spec: ModelSpec, model: PoolingModel) -> Tensor:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors(spec.path, spec.load.load_format, spec.hf_config, spec.dtype):
        for end in LM_HEAD:
            if name == end or name.endswith(f".{end}"):
                found[end] = tensor
    for end in LM_HEAD:
        if (table := found.get(end)) is None:
            continue
        if table.dim() != 2 or table.shape[1] != model.hidden_size or not table.is_floating_point():
            raise ConfigError(
                f"weight {end} has shape {list(table.shape)} and dtype {table.dtype}: its rows cannot be classes"
            )
        if max(model.from_tokens) >= len(table):
            raise ConfigError(
                f"classifier_from_token: {max(model.from_tokens)} is outside the vocabulary of {len(table)}"
            )
        return table[list(model.from_tokens)]
    raise ConfigError(
        f"the checkpoint lacks an LM head ({', '.join(LM_HEAD)}), whose rows are the classes"
    )

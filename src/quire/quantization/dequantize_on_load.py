"""Reads the weights of formats that no kernel multiplies as they are stored: decodes them while the files are read.

The model gets them as a checkpoint of 16 bits would have them, or as a format that has kernels. Knows which tensors are
parts of one weight, by their names. Does not know what they contain (block_floats.py, ...), files or models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.config.checkpoint_quantization import CheckpointQuantization, QuantizationScheme
from quire.errors import ConfigError
from quire.logging import get_logger
from quire.quantization import bitsandbytes, hqq, torchao
from quire.quantization.block_floats import mxfp4, mxfp4_experts, mxfp8, nvfp4, nvfp4_of_modelopt

log = get_logger(__name__)

Parts = Mapping[str, Tensor]
"""Last part of a tensor's name -> tensor, of one weight."""


class Reader(NamedTuple):
    """Reads the weights of one format.

    `pattern`: matches the names of their tensors: group 1 the layer, group 2 the part, or nothing: it is not used. `needs`:
    the parts that a weight needs, by those found so far. `decode`: the parts, and the dtype of floats -> name -> tensor
    of the layer.
    """

    pattern: re.Pattern[str]
    needs: Callable[[Parts], Collection[str]]
    decode: Callable[[Parts, QuantizationScheme, torch.dtype], Mapping[str, Tensor]]


def _floats(separator: str, parts: str, decode: Callable[..., Tensor], unused: str = "-") -> Reader:
    """A reader of a fixed set of parts, which are one weight of floats."""
    named = tuple(parts.split())
    pattern = re.compile(rf"(.+){separator}(?:({'|'.join(named)})|{unused})")
    name = "weight" if separator == r"\." else ""
    return Reader(
        pattern,
        lambda _: named,
        lambda found, _, dtype: {name: decode(*(found[part] for part in named), dtype)},
    )


READERS: dict[str, Reader] = {
    "nvfp4": _floats(r"\.", "weight_packed weight_scale weight_global_scale", nvfp4),
    "modelopt-nvfp4": _floats(r"\.", "weight weight_scale weight_scale_2", nvfp4_of_modelopt),
    "mxfp4": _floats(r"\.", "weight_packed weight_scale", mxfp4),
    "mxfp4-experts": _floats("_", "blocks scales", mxfp4_experts),
    "mxfp8": _floats(r"\.", "weight weight_scale", mxfp8),
    "hqq": _floats(r"\.", "W_q scale zero shape", hqq.decode, hqq.UNUSED),
    "bnb-4bit": Reader(
        re.compile(r"(.+)\.(weight(?:\.\w+)?)(?:\.bitsandbytes__\w+)?"),
        bitsandbytes.parts_of_4bit,
        lambda found, *_: {"weight": bitsandbytes.decode_4bit(found)},
    ),
    # Each tensor of these by itself:
    "bnb-int8": Reader(
        re.compile(r"(.+)\.(?:(SCB)|weight_format)"),
        lambda found: found,
        lambda found, *_: bitsandbytes.int8_scale(found),
    ),
    "torchao": Reader(
        re.compile(r"(.+)\._weight_(qdata|scale|zero_point)"),
        lambda found: found,
        lambda found, scheme, _: torchao.renamed(found, scheme),
    ),
}
"""`QuantizationScheme.reader` (config/checkpoint_quantization.py) -> what reads the tensors."""


def decoded(
    found: Iterable[tuple[str, Tensor]], stored: CheckpointQuantization, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) pairs of a checkpoint, with floats of `dtype` in place of the weights that readers decode.

    A weight waits until all of its tensors are read: files sort them by name, so few wait at a time.

    Raises:
        ConfigError: tensors of a weight are missing, or do not fit together; the message names the weight.
    """
    names = {scheme.reader for scheme in stored.schemes()} - {""}
    waiting: dict[str, dict[str, Tensor]] = {}
    count, before, after = 0, 0, 0
    for name, tensor in found:
        belongs = _weight_of(name, tensor, stored) if names else None
        if belongs is None:
            yield name, tensor
            continue
        layer, part, scheme = belongs
        if part is None:
            continue
        parts = waiting.setdefault(layer, {})
        parts[part] = tensor
        reader = READERS[scheme.reader]
        if set(reader.needs(parts)) <= parts.keys():
            made = _decode(layer, waiting.pop(layer), scheme, dtype)
            count += 1
            before += sum(each.nbytes for each in parts.values())
            after += sum(each.nbytes for each in made.values())
            yield from made.items()
    if waiting:
        layer, parts = next(iter(waiting.items()))
        raise ConfigError(
            f"the checkpoint lacks tensors of {len(waiting)} quantized weights: of {layer} it has only"
            f" {', '.join(sorted(parts))}"
        )
    if stored is not None and stored.is_decoded and count:
        log.info(
            "decoded %d weights (%s) of %.2f GiB to floats of %.2f GiB; --quantization int8 or int4 makes them smaller",
            *(count, ", ".join(sorted(names)), before / 2**30, after / 2**30),
        )


def _weight_of(
    name: str, tensor: Tensor, stored: CheckpointQuantization
) -> tuple[str, str | None, QuantizationScheme] | None:
    """(layer, part, scheme) of a tensor that a reader reads; the part is None if nothing uses it."""
    for reader_name, reader in READERS.items():
        if (match := reader.pattern.fullmatch(name)) is None:
            continue
        scheme = stored.scheme_of(match[1])
        if scheme is None or scheme.reader != reader_name:
            continue
        if match[2] == "weight" and tensor.is_floating_point() and tensor.itemsize > 1:
            return None  # a weight that is not quantized
        return match[1], match[2], scheme
    return None


def _decode(
    layer: str, parts: Parts, scheme: QuantizationScheme, dtype: torch.dtype
) -> dict[str, Tensor]:
    try:
        made = READERS[scheme.reader].decode(parts, scheme, dtype)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in sorted(parts.items()))
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"weight {layer} cannot be decoded as {scheme.reader} ({shapes}): {reason}"
        ) from None
    return {f"{layer}.{name}" if name else layer: tensor for name, tensor in made.items()}

"""The tensors of a GGUF model under the names of a checkpoint: views of the mapped files, and floats made of their blocks.

Knows what llama.cpp's converter changed: the order of q and k, norms with 1 added, stacked experts. Does not know what multiplies
by blocks.

Shape suffixes: O outputs, E experts, N bytes.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import ConfigError, Unsupported
from quire.logging import get_logger
from quire.models.gguf.families import TensorPlace, tensor_places
from quire.models.gguf.folder import only_model
from quire.models.gguf.header import TYPES, GgufHeader, GgufTensor, read_header
from quire.models.gguf.projector import LINK, projector_places, read_projector
from quire.quantization.gguf_forms import FORMS

log = get_logger(__name__)

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS = {name: (elements, size) for name, elements, size in TYPES.values()}
MAX_FLOATS = 1 << 22  # values that are float32 at a time


def header_in(folder: str) -> GgufHeader:
    """The header of the model in a directory. Raises: as `read_header`; ConfigError: there is none."""
    if (file := only_model(Path(folder))) is None:
        raise ConfigError(f"{folder} has no GGUF file")
    return read_header(file, tokenizer=False)


def gguf_tensors(
    folder: str, config: Mapping[str, Any], dtype: str, blocks: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of all tensors: bytes of those named in `blocks`, floats of `dtype` of other blocks.

    Raises:
        ConfigError: the file is damaged. Unsupported: it has a tensor or a type that is not known.
    """
    yield from _joined(_tensors(header_in(folder), config, dtype, blocks))


def projector_tensors(folder: str, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of the vision tower beside a model. Raises: as `read_projector`."""
    projector = read_projector(Path(folder) / LINK)
    data = mapped(projector.file)

    def read(tensor: GgufTensor) -> Tensor:
        bytes_N = data[tensor.start : tensor.start + tensor.nbytes]
        return floats_of(tensor, bytes_N, getattr(torch, dtype))

    for each in projector_places(projector):
        values = read(each.tensor)
        if each.minus_one:
            values = (values.float() - 1).to(values.dtype)
        if each.also is not None:
            values = torch.stack([values, read(each.also)], 2)
        yield each.name, values


def _joined(found: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Latent attention's expansion as one tensor: newer files have keys, transposed, and values of each head apart."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found:
        layer, _, part = name.rpartition(".")
        if part not in ("keys", "values"):
            yield name, tensor
            continue
        parts = waiting.setdefault(layer, {})
        parts[part] = tensor
        if len(parts) == 2:
            del waiting[layer]
            heads = [parts["keys"].transpose(1, 2), parts["values"]]
            yield f"{layer}.weight", torch.cat(heads, 1).flatten(0, 1)


def _tensors(
    header: GgufHeader, config: Mapping[str, Any], dtype: str, blocks: Container[str]
) -> Iterator[tuple[str, Tensor]]:
    files = {file: mapped(file) for file in header.files}
    num_stored, num_converted = Counter[str](), Counter[str]()
    for each in tensor_places(header, config):
        tensor = each.tensor
        bytes_N = files[tensor.file][tensor.start : tensor.start + tensor.nbytes]
        if each.name.replace("*", "0") in blocks:
            num_stored[tensor.kind] += 1
            rows = bytes_N.view(*tensor.shape[:-1], -1)
            yield from ((name, part.flatten()) for name, part in _in_place(each, rows))
            continue
        num_converted[tensor.kind] += tensor.kind not in PLAIN
        yield from _in_place(each, floats_of(tensor, bytes_N, getattr(torch, dtype)))
    for counts, fate in (
        (num_stored, "multiplied as they are stored"),
        (num_converted, f"made {dtype}"),
    ):
        if some := [f"{count} of {kind}" for kind, count in sorted(counts.items()) if count]:
            log.info("blocks of the GGUF file that are %s: %s", fate, ", ".join(some))


def mapped(file: Path) -> Tensor:
    """The bytes of a file; written pages would be private."""
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(data, dtype=torch.uint8)


def _in_place(each: TensorPlace, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if each.heads:
        tensor = rope_halves(tensor, each.heads)
    if each.tiled is not None:
        tensor = grouped_heads(tensor, *each.tiled, dim=int(each.columns))
    if each.tensor.name.endswith("ssm_norm.weight"):  # Mamba-2: [groups, features]
        tensor = tensor.flatten()
    if each.is_decay:
        tensor = (-tensor.float()).log()
    if each.by_head is not None and each.half is not None:
        tensor = part_of_heads(tensor, *each.by_head, each.half)
    elif each.half is not None:
        tensor = tensor.chunk(2, 1)[each.half]
    if each.minus_one:
        tensor = (tensor.float() - 1).to(tensor.dtype)
    if "*" not in each.name:
        yield each.name, tensor
        return
    for expert, part in enumerate(tensor):
        yield each.name.replace("*", str(expert)), part


def rope_halves(tensor_ON: Tensor, heads: int) -> Tensor:
    """Rows of q or k in the order of rope over halves; the file has them in pairs of neighbours.

    Raises:
        ConfigError: the number of heads does not divide the rows.
    """
    if len(tensor_ON) % (2 * heads):
        raise ConfigError(f"{len(tensor_ON)} rows of queries or keys for {heads} heads")
    pairs = tensor_ON.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def grouped_heads(tensor: Tensor, first: int, keys: int, values: int, dim: int) -> Tensor:
    """From `first` on along `dim`, the value heads of one key head beside each other; the file has the n-th of all key heads so.

    Raises:
        ConfigError: the number of heads does not divide the size.
    """
    rest = tensor.shape[dim] - first
    if rest <= 0 or keys < 1 or values < 1 or rest % (keys * values):
        raise ConfigError(f"{tensor.shape[dim]} rows for {keys} times {values} heads")
    heads = tensor.narrow(dim, first, rest).unflatten(dim, (values, keys, -1))
    grouped = heads.transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat([tensor.narrow(dim, 0, first), grouped], dim)


def part_of_heads(tensor: Tensor, keys: int, rows: tuple[int, ...], half: int) -> Tensor:
    """Of rows in the order of the key heads, the parts of one half, each with its rows of all heads together.

    Raises:
        ConfigError: the heads have another number of rows.
    """
    if len(tensor) != keys * sum(rows):
        raise ConfigError(f"{len(tensor)} rows for {keys} key heads with {sum(rows)} rows each")
    parts = tensor.unflatten(0, (keys, -1)).split(rows, 1)
    return torch.cat([part.flatten(0, 1) for part in (parts[-1:] if half else parts[:-1])])


def floats_of(tensor: GgufTensor, bytes_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, in their own dtype if they are floats, else in `dtype`."""
    if (own := PLAIN.get(tensor.kind)) is not None:
        if tensor.start % own.itemsize == 0:
            return bytes_N.view(own).view(tensor.shape)
        return bytes_N.clone().view(own).view(tensor.shape)
    elements, size = BLOCKS[tensor.kind]
    found = torch.empty(math.prod(tensor.shape), dtype=dtype)
    each = max(1, MAX_FLOATS // elements)
    for part, into in zip(bytes_N.split(each * size), found.split(each * elements), strict=True):
        into.copy_(_dequantized(tensor, part.numpy()))
    return found.view(tensor.shape)


def _dequantized(tensor: GgufTensor, blocks: np.ndarray[Any, Any]) -> Tensor:
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, tensor.kind)
    try:
        return torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    except NotImplementedError:
        if (form := FORMS.get(tensor.kind)) is not None:
            return form.floats(torch.from_numpy(blocks)[None])[0]
        raise Unsupported(
            f"{tensor.file} (a tensor of the type {tensor.kind})",
            "serve another quantization of the model",
        ) from None

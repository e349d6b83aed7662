"""The files of an adapter, as PEFT writes them.

Knows formats of files. Which tensor is which factor of which module is in `adapter_modules.py`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, ValidationError
from quire.features.lora.adapter_modules import (
    Shapes,
    Targets,
    places_of_tensors,
    tensors_by_module,
)
from quire.features.lora.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, PeftConfig, read_config
from quire.logging import get_logger
from quire.models.safetensors_header import header

if TYPE_CHECKING:
    from torch import Tensor

    from quire.layers.lora import LoraWeights

log = get_logger(__name__)

MAX_HEADER_BYTES = 16 << 20
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Header = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter that was read.

    Attributes:
        digest: of the content of all files but tensors that are not used; equal adapters have equal digests.
        tensors: module -> part (a value of `PARTS`, or "base_bias") -> tensor.
    """

    digest: str
    config: PeftConfig
    tensors: dict[str, dict[str, Tensor]] = field(repr=False)
    names: dict[str, str] = field(default_factory=dict)
    """Module of the file -> module of the model, where they differ."""

    def modules(self) -> dict[str, LoraWeights]:
        """The weights of each module, by its path in the model."""
        from quire.layers.lora import LoraWeights

        found = {}
        for module, parts in self.tensors.items():
            scale, bias_O = self.config.scale_of(module), parts.get("bias")
            magnitude_O = parts.get("magnitude")
            found[self.names.get(module, module)] = LoraWeights(
                a_RI=parts.get("a", parts.get("embedding_a")),
                b_OR=parts.get("b", parts.get("embedding_b")),
                scale=scale,
                bias_O=None if bias_O is None else bias_O.float() * scale,
                base_bias_O=parts.get("base_bias"),
                magnitude_O=None if magnitude_O is None else magnitude_O.reshape(-1),
                is_embedding="embedding_a" in parts,
            )
        return found


def read_adapter(
    folder: Path, max_rank: int, targets: Targets, chosen: Sequence[str] = ()
) -> AdapterFiles:
    """Read an adapter for a model with these `targets`.

    `chosen`: last components of the modules that are adapted; tensors for others are left out. Empty: all.

    Raises:
        ValidationError: the adapter cannot be served; the message names file, tensor or field, and the remedy.
    """
    config_file = folder / CONFIG_FILE
    if not config_file.is_file():
        raise ValidationError(f"No adapter found for {folder}: it has no {CONFIG_FILE}")
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None:
        raise ValidationError(
            f"No adapter found for {folder}: it has none of {', '.join(WEIGHT_FILES)}"
        )
    try:
        if config_file.stat().st_size > MAX_CONFIG_BYTES:
            raise ValidationError(f"{config_file} is larger than {MAX_CONFIG_BYTES} bytes")
        text = config_file.read_bytes()
        content = blake2b(len(text).to_bytes(8, "little") + text, digest_size=16)
        config = read_config(text, config_file)
        if file.suffix == ".safetensors":
            found, start = _checked_header(file)
            shapes: Shapes = {name: tuple(each["shape"]) for name, each in found.items()}
            places, names = places_of_tensors(file, shapes, config, max_rank, targets, chosen)
            data, stored = _read_used(file, {name: found[name] for name in places}, start)
            content.update(start)
        else:
            _check_size(file, max_rank, targets)
            data = _read_bytes(file)
            stored = _from_pickle(bytes(data), file)
            shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
            places, names = places_of_tensors(file, shapes, config, max_rank, targets, chosen)
    except (ConfigError, ValidationError, OSError) as error:
        reason = str(error)
        raise ValidationError(reason if str(folder) in reason else f"{file}: {reason}") from None
    if config.unknown:
        log.warning(
            "%s: unknown fields have no effect: %s", config_file, ", ".join(config.unknown)[:200]
        )
    content.update(data)
    try:
        tensors_of = tensors_by_module(stored, places, config)
    except (ConfigError, ValidationError) as error:
        raise ValidationError(f"{file}: {error}") from None
    return AdapterFiles(content.hexdigest(), config, tensors_of, names)


# -- the files --------------------------------------------------------------------------------------
def _checked_header(file: Path) -> tuple[Header, bytes]:
    """The header of a safetensors file, and its bytes.

    Raises:
        ConfigError, ValidationError: the header is damaged, or has a dtype that is no float.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    if MAX_HEADER_BYTES < length < file.stat().st_size:
        raise ValidationError(f"{file} has a header of {length} bytes, at most {MAX_HEADER_BYTES}")
    found, end = header(file), 0
    for name, tensor in found.items():
        end = max(end, tensor["data_offsets"][1])
        if tensor["dtype"] not in FLOATS:
            raise ValidationError(
                f"{file}: {name!a:.200} is {tensor['dtype']}; save the adapter as one of {', '.join(FLOATS)}"
            )
    with file.open("rb") as opened:
        start = opened.read(8 + length)
    if (extra := file.stat().st_size - len(start) - end) > 0:
        raise ValidationError(f"{file} has {extra} bytes after the last tensor; save it again")
    return found, start


def _read_bytes(file: Path) -> memoryview:
    """The file's bytes. Python's lock is not held meanwhile, so the requests that run go on: the memory is not cleared first,
    which a bytearray's is."""
    with file.open("rb") as opened:
        data = memoryview(mmap(-1, max(1, file.stat().st_size)))
        return data[: opened.readinto(data)]


def _read_used(file: Path, used: Header, start: bytes) -> tuple[memoryview, dict[str, Tensor]]:
    """The data of the tensors that are used, in the order of the file, and the tensors: views of it. Nothing else is read: a
    file may have others of any size. Python's lock is not held meanwhile, so the requests that run go on.

    Raises ValidationError: the file has changed since its header was read.
    """
    import torch

    placed, total = [], 0
    for name, tensor in sorted(used.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = tensor["data_offsets"]
        placed.append((name, tensor, total, total + last - first))
        total += -(-(last - first) // 8) * 8  # each begins at a multiple of its item's size
    data = memoryview(mmap(-1, max(1, total)))[:total]
    tensors = {}
    with file.open("rb") as opened:
        if opened.read(len(start)) != start:
            raise ValidationError(f"{file} changed while it was read")
        for name, tensor, begin, end in placed:
            opened.seek(len(start) + tensor["data_offsets"][0])
            if opened.readinto(data[begin:end]) != end - begin:
                raise ValidationError(f"{file} changed while it was read")
            dtype = getattr(torch, FLOATS[tensor["dtype"]])
            flat = torch.frombuffer(data[begin:end], dtype=dtype) if end > begin else torch.empty(0, dtype=dtype)  # fmt: skip
            tensors[name] = flat.reshape(tensor["shape"])
    return data, tensors


def _check_size(file: Path, max_rank: int, targets: Targets) -> None:
    """Raises ValidationError: a pickle that is larger than any adapter of this rank."""
    most = sum((ins + outs) * max_rank + 2 * outs for ins, outs in targets.sizes.values()) * 4
    if (size := file.stat().st_size) > most + (16 << 20):
        raise ValidationError(
            f"{file} has {size} bytes, more than an adapter of rank {max_rank} can have: raise max_lora_rank,"
            " or convert it to safetensors"
        )


def _from_pickle(data: bytes, file: Path) -> dict[str, Tensor]:
    import warnings
    import zipfile
    from pickle import UnpicklingError

    import torch

    remedy = "convert it to safetensors"
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            unpacked = sum(entry.file_size for entry in opened.infolist())
        if unpacked > len(data):
            raise ValidationError(f"{file} is compressed; {remedy}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except ValidationError:
        raise
    except zipfile.BadZipFile as error:
        raise ValidationError(
            f"{file} is damaged, or older than torch 1.6 ({error}); {remedy}"
        ) from None
    except (RuntimeError, EOFError, UnpicklingError, ValueError, TypeError, AttributeError, KeyError,
            IndexError, OverflowError, RecursionError, ImportError, OSError) as error:  # fmt: skip
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValidationError(
            f"{file} cannot be read as weights only ({reason}); {remedy}"
        ) from None
    if not isinstance(state, dict):
        raise ValidationError(
            f"{file} contains a {type(state).__name__}, not a dict of tensors; {remedy}"
        )
    for name, tensor in state.items():
        if not isinstance(name, str) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise ValidationError(
                f"{file}: {name!a:.200} is a {type(tensor).__name__}, not a tensor; {remedy}"
            )
        if tensor.layout != torch.strided or not tensor.is_floating_point() or tensor.is_meta:
            raise ValidationError(f"{file}: {name!a:.200} is no dense tensor of floats; {remedy}")
        if tensor.numel() > tensor.untyped_storage().nbytes() // tensor.itemsize:
            raise ValidationError(
                f"{file}: {name!a:.200} has more elements than the file stores; {remedy}"
            )
    return state

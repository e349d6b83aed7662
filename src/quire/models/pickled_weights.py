"""Reads weights that torch has pickled, and the copy of them in numpy's format that `load_format="npcache"` keeps.

Distrusts the files: no code in them runs, and their names, sizes and contents may be false. Does not know models.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, BinaryIO

from quire.errors import ConfigError
from quire.models.json_files import read_object

if TYPE_CHECKING:
    from torch import Tensor


NO_WEIGHTS = (
    OSError, RuntimeError, EOFError, UnpicklingError, ValueError, TypeError, AttributeError, LookupError, ImportError,
    OverflowError, zipfile.BadZipFile,
)  # fmt: skip
"""What torch and numpy raise for files that are damaged."""


def pickled(file: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each tensor of a file that torch has pickled. Raises ConfigError: it cannot be read."""
    import warnings

    import torch

    try:
        check_not_compressed(file)
        with warnings.catch_warnings():
            # About pickles of other tools: they load, or fail below.
            warnings.simplefilter("ignore")
            try:
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # written before torch 1.6: not a zip, so it cannot be mapped
                state = torch.load(file, map_location="cpu", weights_only=True)
    except NO_WEIGHTS as error:
        raise ConfigError(
            f"{file} cannot be read as weights only ({_reason(error)}); convert it to safetensors"
        ) from None
    if not isinstance(state, dict):
        raise ConfigError(f"{file} contains a {type(state).__name__}, not a dict of tensors")
    for nest in ("state_dict", "model"):
        if isinstance(state.get(nest), dict):
            state = state[nest]
    yield from ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))


def check_not_compressed(file: Path) -> None:
    """Torch stores tensors as they are; a compressed file of 600 KB would take gigabytes.

    Raises:
        ConfigError: a part of the file is compressed, or its parts are larger than the file.
        BadZipFile, OSError, and others of NO_WEIGHTS: the file is damaged.
    """
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as opened:
        entries = opened.infolist()
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if packed or sum(entry.file_size for entry in entries) > file.stat().st_size:
        raise ConfigError(f"{file} is compressed; convert it to safetensors")


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def numpy_copy(folder: Path, files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Read a copy of the checkpoint as numpy files, written beside it at the first load; bfloat16 is stored as bits."""
    index = folder / "index.json"
    if folder.is_symlink():  # of a model by a stranger: files elsewhere would be overwritten
        raise ConfigError(f"{folder} is a link; load_format=npcache needs a folder there")
    if not index.is_file():
        try:
            _write_numpy(folder, index, files)
        except OSError as error:
            raise ConfigError(
                f"load_format=npcache writes to {folder}, which failed: {error}"
            ) from None
    for name, entry in read_object(index).items():
        yield name, _of_numpy(index, name, entry)


def _write_numpy(folder: Path, index: Path, files: list[Path]) -> None:
    import numpy as np
    import torch

    folder.mkdir(exist_ok=True)
    names: dict[str, list[str]] = {}
    for number, (name, tensor) in enumerate(t for file in files for t in pickled(file)):
        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        with _new_file(folder / f"{number}.npy") as opened:
            np.save(opened, bits.contiguous().numpy())
        names[name] = [f"{number}.npy", str(tensor.dtype).removeprefix("torch.")]
    unfinished = folder / "index.json.part"
    with _new_file(unfinished) as opened:
        opened.write(json.dumps(names).encode())
    os.replace(unfinished, index)


def _new_file(path: Path) -> BinaryIO:
    """Replaces a file that is there, or a link, and does not write through it."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def _of_numpy(index: Path, name: str, entry: Any) -> Tensor:
    """The tensor of one entry of the index: a file in its folder, and the element type.

    Raises:
        ConfigError: the entry or the file is damaged, or the file is not in the folder.
    """
    import numpy as np
    import torch

    remedy = f"delete the folder {index.parent}, which is made again"
    match entry:
        case [str(file), str(dtype)] if re.fullmatch(r"[0-9]+\.npy", file):
            path = index.parent / file
        case _:
            raise ConfigError(f'{index}: {name!a:.200} is not ["NUMBER.npy", type]; {remedy}')
    if path.is_symlink():
        raise ConfigError(f"{index}: {file} is a link; {remedy}")
    try:
        # Copy-on-write: torch needs a writable array. Mapping fails if the file is shorter than its header says.
        tensor = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    except NO_WEIGHTS as error:
        raise ConfigError(f"{path} cannot be read ({_reason(error)}); {remedy}") from None

"""The header of a safetensors file, which a damaged or hostile file may have made up: everything is checked before use.

Knows the file format: 8 bytes with the header's length, a JSON object of that length, the tensors' data. Does not know torch.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}  # fmt: skip
"""Name of a dtype -> bits of an element."""

LONGEST_HEADER = 100 << 20
LFS = b"version https://git-lfs.github.com"


def check_fetched(file: Path) -> None:
    """Raises ConfigError: the file is a Git LFS pointer, as `git clone` without git-lfs leaves it."""
    with file.open("rb") as opened:
        if opened.read(len(LFS)) == LFS:
            raise ConfigError(
                f"{file} is a Git LFS pointer, not the file: run `git lfs pull` in its directory"
            )


def header(file: Path) -> dict[str, dict[str, Any]]:
    """Name -> {"dtype", "shape", "data_offsets"} of a safetensors file.

    Raises:
        ConfigError: the file is damaged, for instance cut short by an unfinished download.
    """
    size = file.stat().st_size
    check_fetched(file)
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError(
                    f"its header of {length} bytes at offset 8 is longer than the file"
                )
            found = json.loads(opened.read(length).decode())
        found.pop("__metadata__", None)
        for name, tensor in found.items():
            name.encode()  # half of a surrogate pair can not be printed
            _check_entry(name, tensor)
        _check_overlaps(found)
        last = max((tensor["data_offsets"][1] for tensor in found.values()), default=0)
    except RecursionError:
        raise ConfigError(
            f"{file} is not a complete safetensors file: its header is nested too deeply"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file} is not a complete safetensors file: {error}") from None
    if 8 + length + last > size:
        raise ConfigError(
            f"{file} is truncated: {size} bytes of {8 + length + last}; download it again"
        )
    return dict(found)


def _check_entry(name: str, tensor: dict[str, Any]) -> None:
    """Raises ValueError, KeyError, TypeError: the header's entry for a tensor is malformed."""
    dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"the dtype of {name} is {dtype!a:.50}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(
                f"the {what} of {name} is {numbers!a:.200}; they must be whole numbers"
            )
    if len(offsets) != 2:
        raise ValueError(
            f"the data_offsets of {name} are {len(offsets)} numbers; there must be two"
        )
    start, stop = offsets
    if stop < start:
        raise ValueError(f"the data_offsets of {name} are {start} and {stop}, in the wrong order")
    if (stop - start) * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(
            f"{name}, {dtype} {shape!a:.200}, does not have the {stop - start} bytes at offset {start} of the data"
        )


def _check_overlaps(found: dict[str, dict[str, Any]]) -> None:
    """Raises ValueError: tensors share bytes."""
    end, before = 0, ""
    for name, tensor in sorted(found.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = tensor["data_offsets"]
        if start < end and stop > start:
            raise ValueError(f"the data of {name} at offset {start} overlaps the data of {before}")
        if stop > start:
            end, before = stop, name

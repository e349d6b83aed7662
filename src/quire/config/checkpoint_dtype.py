"""The number format of a checkpoint, from config.json or from the first weight file's header."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}
LONGEST_HEADER = 100 << 20


def stored_dtype(path: str, config: Mapping[str, Any]) -> str:
    """float32, float16 or bfloat16; float32 if neither file says, as in Transformers."""
    for key in ("dtype", "torch_dtype"):
        if isinstance(config.get(key), str):
            name = str(config[key]).removeprefix("torch.")
            if name in NAMES.values():
                return name
    return header_dtype(path) or "float32"


def header_dtype(path: str) -> str | None:
    """The format of most tensors of the first safetensors file; None if there is no such file."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        return None
    try:
        with files[0].open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, LONGEST_HEADER)))
        kinds = Counter(
            NAMES.get(t["dtype"]) for name, t in header.items() if name != "__metadata__"
        )
    except (OSError, ValueError, struct.error, TypeError, KeyError, AttributeError, RecursionError):
        return None  # the loader reports a broken file
    kinds.pop(None, None)
    return kinds.most_common(1)[0][0] if kinds else None

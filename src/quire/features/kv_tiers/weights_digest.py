"""A digest of all bytes of a checkpoint's weights, which is remembered while the files do not change.

Samples would not do: two fine-tunes may differ in one tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quire.models.checkpoint_files import weight_files

FILE = "weights.json"
PIECE = 8 << 20
MOST_KNOWN = 64


def weights_digest(path: str, load_format: str, folder: Path) -> str:
    """Of the weights of one checkpoint. `folder` keeps the digests of files that do not change.

    Raises: OSError, and as `weight_files`.
    """
    if load_format == "dummy":
        return "dummy"
    files = weight_files(path, load_format)[1]
    states = json.dumps([_state(file) for file in files])
    known = _known(folder / FILE)
    if (found := known.get(states)) is not None:
        return found
    digest = _digest(files)
    if states == json.dumps([_state(file) for file in files]):
        _remember(folder / FILE, {**known, states: digest})
    return digest


def _state(file: Path) -> list[str | int]:
    """Changes whenever the content does: no program can set the time of the last change of an inode."""
    about = file.stat()
    return [str(file.resolve()), about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]  # fmt: skip


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    piece = bytearray(PIECE)
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(piece):
                digest.update(memoryview(piece)[:count])
    return digest.hexdigest()


def _known(path: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return {str(key): str(value) for key, value in found.items()}
    return {}


def _remember(path: Path, known: dict[str, str]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        draft.write_text(json.dumps(dict(list(known.items())[-MOST_KNOWN:])))
        draft.replace(path)

"""The key of block hashes: from a file that the user names, or from a file in the folder of kept blocks.

Without a stable key each process draws a secret of its own, and no block is found after a restart.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from quire.errors import ConfigError
from quire.logging import get_logger

log = get_logger(__name__)

KEY_BYTES = 32
FOLDER_KEY = "key"
"""Its name in a folder of kept blocks."""


def read_key(path: Path) -> bytes:
    """The key in a file.

    Raises:
        ConfigError: it is missing, has another length, or other users can read it.
    """
    remedy = f"`quire kv key {path}` makes one"
    try:
        with path.open("rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(KEY_BYTES + 1)
    except OSError as why:
        raise ConfigError(f"kv_key_file {path}: {why.strerror}; {remedy}") from None
    if not stat.S_ISREG(mode) or len(key) != KEY_BYTES:
        raise ConfigError(f"kv_key_file {path}: must be a file of {KEY_BYTES} bytes; {remedy}")
    if mode & 0o077:
        raise ConfigError(f"kv_key_file {path}: other users can read it; run `chmod 600 {path}`")
    return key


def make_key(path: Path) -> None:
    """Write a new key into a new file of mode 0600. Raises FileExistsError: the file is there already."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.link(draft, path)  # whole, or not at all
    finally:
        draft.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder of mode 0700, if there is none.

    Raises:
        OSError: it cannot be made, belongs to another user, or others may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user, who can read what is kept; name a folder in it, or another one")  # fmt: skip
    if folder.stat().st_mode & 0o022:
        raise PermissionError(
            f"other users may write to {folder}, and so choose what the model remembers; run `chmod 700 {folder}`"
        )


def folder_key(folder: Path) -> bytes:
    """The key of a folder of kept blocks, which is made at the first use.

    Raises:
        OSError: the folder or its key cannot be made.
        ConfigError: as `read_key`.
    """
    make_folder(folder)
    path = folder / FOLDER_KEY
    if not path.exists():
        with suppress(FileExistsError):
            make_key(path)
            log.info(
                "made %s, the key of the block names: it protects kept blocks from clients, not from readers of this"
                " folder; --kv-key-file puts it elsewhere",
                path,
            )
    return read_key(path)


def name_key(key_file: str | None, folder: str | None) -> bytes | None:
    """The key of all block names of an engine with these options; None: each process draws its own.

    Raises:
        ConfigError: as `read_key`.
    """
    if key_file is not None:
        return read_key(Path(key_file).expanduser())
    if folder is None:
        return None
    try:
        return folder_key(Path(folder).expanduser())
    except OSError:
        return None  # the tier will not open either, and says why

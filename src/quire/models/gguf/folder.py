"""A GGUF model as a checkpoint directory: its metadata as config.json, tokenizer.json and the like, and links to its files.

The directory is in the cache, under a name made of the file's path, size and time, so that a file is converted once and all
processes of a server read the same. Knows paths and files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from quire import env
from quire.errors import ConfigError, ModelNotFound, QuireError
from quire.logging import get_logger
from quire.models.gguf.families import config_of
from quire.models.gguf.header import MAGIC, SPLIT, GgufHeader, parts_of, read_header
from quire.models.gguf.tokenizer import GgufTokenizer

log = get_logger(__name__)

FORM = 1  # changes with the content of the directory
PROJECTOR = "mmproj"  # files with encoders of images, which llama.cpp keeps apart


def is_gguf(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(4) == MAGIC or file.suffix == ".gguf"
    except OSError:
        return file.suffix == ".gguf"


def only_model(folder: Path) -> Path | None:
    """The GGUF model in a directory: its only file or the first of its parts; None: there is none.

    Raises:
        ModelNotFound: there are several.
    """
    files = [f for f in sorted(folder.glob("*.gguf")) if not f.name.startswith(PROJECTOR)]
    models = [f for f in files if (part := SPLIT.match(f.name)) is None or int(part[2]) == 1]
    if len(models) > 1:
        names = ", ".join(f.name for f in models[:8])
        raise ModelNotFound(
            f"{folder} has {len(models)} GGUF models ({names}): pass one of these files"
        )
    return next(iter(models or files), None)


def checkpoint_folder(file: Path) -> str:
    """The directory of a model, made if it is not in the cache.

    Raises:
        ConfigError, ModelNotFound, Unsupported: as `read_header` and `config_of`.
    """
    files = parts_of(file.absolute())
    about = [(str(each), (at := each.stat()).st_size, at.st_mtime_ns) for each in files]
    key = hashlib.sha256(json.dumps([FORM, about]).encode()).hexdigest()[:16]
    name = f"{files[0].stem[:80]}-{key}"
    root = Path(str(env.get("CACHE_ROOT"))).expanduser().absolute() / "gguf"
    if (root / name / "config.json").is_file():
        return str(root / name)
    header = read_header(file.absolute())
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = Path(tempfile.mkdtemp(prefix=".", dir=root))
    except OSError as why:
        raise ConfigError(f"{root} is not writable ({why}); set QUIRE_CACHE_ROOT") from None
    _forget_gone(root)
    try:
        _write(header, unfinished)
        os.rename(unfinished, root / name)
    except OSError as why:  # another process has made it meanwhile
        if not (root / name / "config.json").is_file():
            raise ConfigError(f"{root} is not writable ({why}); set QUIRE_CACHE_ROOT") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return str(root / name)


def _forget_gone(root: Path) -> None:
    """Delete the directories of files that no longer exist."""
    for folder in root.glob("[!.]*"):
        if any(not link.exists() for link in folder.glob("*.gguf")):
            shutil.rmtree(folder, ignore_errors=True)


def _write(header: GgufHeader, folder: Path) -> None:
    texts: dict[str, Any] = {"config.json": config_of(header)}
    try:
        tokenizer = GgufTokenizer(header)
        texts["tokenizer.json"] = tokenizer.tokenizer_json()
        texts["tokenizer_config.json"] = tokenizer.tokenizer_config()
        texts["generation_config.json"] = tokenizer.generation_config()
    except QuireError as why:  # the user may pass another tokenizer
        log.warning("%s", why)
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    for file in header.files:
        name = file.name if file.suffix == ".gguf" else f"{file.name}.gguf"
        (folder / name).symlink_to(file)

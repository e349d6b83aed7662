"""A GGUF model as a checkpoint directory: its metadata as config.json, tokenizer.json and the like, and links to its files."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ModelNotFound, QuireError
from quire.logging import get_logger
from quire.models.converted_folder import converted_folder
from quire.models.gguf.families import config_of
from quire.models.gguf.header import MAGIC, SPLIT, GgufHeader, parts_of, read_header
from quire.models.gguf.tokenizer import GgufTokenizer

log = get_logger(__name__)

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
    links = {each.name if each.suffix == ".gguf" else f"{each.name}.gguf": each for each in files}
    return converted_folder(
        "gguf", files[0].stem, files, lambda: _texts(read_header(files[0])), links
    )


def _texts(header: GgufHeader) -> dict[str, object]:
    texts: dict[str, object] = {"config.json": config_of(header)}
    try:
        tokenizer = GgufTokenizer(header)
        texts["tokenizer.json"] = tokenizer.tokenizer_json()
        texts["tokenizer_config.json"] = tokenizer.tokenizer_config()
        texts["generation_config.json"] = tokenizer.generation_config()
    except QuireError as why:  # the user may pass another tokenizer
        log.warning("%s", why)
    return texts

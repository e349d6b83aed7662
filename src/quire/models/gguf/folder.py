"""A GGUF model as a checkpoint directory: its metadata as config.json, tokenizer.json and the like, and links to its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.errors import ModelNotFound, QuireError
from quire.logging import get_logger
from quire.models.converted_folder import converted_folder
from quire.models.gguf.families import config_of
from quire.models.gguf.header import MAGIC, SPLIT, GgufHeader, parts_of, read_header
from quire.models.gguf.projector import (
    LINK,
    PROJECTOR,
    Projector,
    projectors_in,
    read_projector,
    wrapper_texts,
)
from quire.models.gguf.tokenizer import GgufTokenizer

log = get_logger(__name__)


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
    files = [f for f in sorted(folder.glob("*.gguf")) if PROJECTOR not in f.name.lower()]
    models = [f for f in files if (part := SPLIT.match(f.name)) is None or int(part[2]) == 1]
    if len(models) > 1:
        names = ", ".join(f.name for f in models[:8])
        raise ModelNotFound(
            f"{folder} has {len(models)} GGUF models ({names}): pass one of these files"
        )
    return next(iter(models or files), None)


def checkpoint_folder(
    file: Path, mmproj: str | None = None, beside: Sequence[Path] | None = None
) -> str:
    """The directory of a model, made if it is not in the cache.

    `mmproj`: the file of its vision tower; None: the only one of `beside`, if it fits. `beside`: None: those in the model's directory.

    Raises:
        ConfigError, ModelNotFound, Unsupported: as `read_header`, `config_of` and `wrapper_texts`.
    """
    files = parts_of(file.absolute())
    if mmproj is not None:
        return _folder(files, read_projector(Path(mmproj).expanduser().absolute()))
    beside = projectors_in(files[0].parent) if beside is None else beside
    if len(beside) > 1:
        names = ", ".join(each.name for each in beside[:8])
        log.warning("%s has %d vision towers (%s): pass one with --mmproj to send pictures", files[0].parent, len(beside), names)  # fmt: skip
    elif beside and beside[0] not in files:
        try:
            return _folder(files, read_projector(beside[0]))
        except QuireError as why:
            log.warning("the model is served without pictures: %s", why)
    return _folder(files, None)


def _folder(files: list[Path], projector: Projector | None) -> str:
    links = {each.name if each.suffix == ".gguf" else f"{each.name}.gguf": each for each in files}
    all_files = list(files)
    if projector is not None:
        all_files.append(projector.file)
        links[LINK] = projector.file
    texts = lambda: _texts(read_header(files[0]), projector)  # noqa: E731
    return converted_folder("gguf", files[0].stem, all_files, texts, links)


def _texts(header: GgufHeader, projector: Projector | None) -> dict[str, object]:
    config = config_of(header)
    texts: dict[str, object] = {"config.json": config}
    try:
        tokenizer = GgufTokenizer(header)
    except QuireError as why:  # the user may pass another tokenizer
        if projector is not None:
            raise
        log.warning("%s", why)
        return texts
    if projector is not None:
        texts |= wrapper_texts(projector, header, config, tokenizer)
    try:
        texts["tokenizer.json"] = tokenizer.tokenizer_json()
        texts["tokenizer_config.json"] = tokenizer.tokenizer_config()
        texts["generation_config.json"] = tokenizer.generation_config()
    except QuireError as why:
        log.warning("%s", why)
    return texts

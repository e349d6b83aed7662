"""A checkpoint directory made of files of another kind: config.json, tokenizer.json and the like, and links to the weights.

It is in the cache, under a name made of the files' paths, sizes and times, so that files are converted once and all processes
of a server read the same. Knows paths. Does not know what the files contain.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quire import env
from quire.errors import ConfigError
from quire.logging import get_logger
from quire.ops.cpu.build import Unsafe, check_owner

log = get_logger(__name__)

FORM = 2  # changes with the content of the directories


def converted_folder(
    kind: str,
    name: str,
    files: Sequence[Path],
    texts: Callable[[], Mapping[str, object]],
    links: Mapping[str, Path],
) -> str:
    """The directory, made if it is not in the cache.

    Args:
        kind, name: begin its path in the cache. files: that it is made of, absolute.
        texts: returns file name -> text, or what JSON can express; called if the directory is made.
        links: name -> file that a link refers to.

    Raises:
        ConfigError: the cache is not writable. What `texts` raises.
    """
    about = [(str(each), (status := each.stat()).st_size, status.st_mtime_ns) for each in files]
    key = hashlib.sha256(json.dumps([FORM, about]).encode()).hexdigest()[:16]
    root = _safe_root(kind)
    target = root / f"{name[:80]}-{key}"
    if _is_there(target):
        return str(target)
    content = texts()
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=".", dir=root))
    except OSError as why:
        raise ConfigError(f"{root} is not writable ({why}); set QUIRE_CACHE_ROOT") from None
    _forget_gone(root)
    try:
        for file, text in content.items():
            shown = text if isinstance(text, str) else json.dumps(text)
            (unfinished / file).write_text(shown, encoding="utf-8")
        for link, file_there in links.items():
            (unfinished / link).symlink_to(file_there)
        os.rename(unfinished, target)
    except OSError as why:  # another process has made it meanwhile
        if not _is_there(target):
            raise ConfigError(f"{root} is not writable ({why}); set QUIRE_CACHE_ROOT") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return str(target)


def _safe_root(kind: str) -> Path:
    """A folder to which no other user can write: whoever writes there chooses the model's files and its chat template.

    Raises:
        ConfigError: there is none, or the cache is not writable.
    """
    cache = Path(str(env.get("CACHE_ROOT"))).expanduser().absolute() / kind
    own = Path(tempfile.gettempdir()).absolute() / f"quire-converted-{os.geteuid()}" / kind
    reason = ""
    for root in (cache, own):
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_owner(root)
            return root
        except OSError as why:
            raise ConfigError(f"{root} is not writable ({why}); set QUIRE_CACHE_ROOT") from None
        except Unsafe as why:
            reason = str(why)
            log.warning("%s: its converted models are not used; set QUIRE_CACHE_ROOT to a folder of this user", reason)  # fmt: skip
    raise ConfigError(f"{reason}; set QUIRE_CACHE_ROOT to a folder of this user")


def _is_there(target: Path) -> bool:
    """Raises ConfigError: the directory was made by another user."""
    if not (target / "config.json").is_file():
        return False
    try:
        check_owner(target)
    except Unsafe as why:
        raise ConfigError(f"{why}: delete {target}, or set QUIRE_CACHE_ROOT") from None
    if target.is_symlink():
        raise ConfigError(f"{target} is a link: delete it, or set QUIRE_CACHE_ROOT")
    return True


def _forget_gone(root: Path) -> None:
    """Delete the directories of files that no longer exist."""
    for folder in root.glob("[!.]*"):
        if any(link.is_symlink() and not link.exists() for link in folder.glob("*")):
            shutil.rmtree(folder, ignore_errors=True)

"""Finds the LoRA adapter that a client of the server names: a directory, or a hub id if the operator allows them.

Unlike `checkpoint_locator.find_adapter`, for names of the operator: the size of a download is known before it begins, no token is sent, the
cache alone is never enough (it may have private adapters), and `~` is a name like any other.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire.config.load import LoadConfig
from quire.errors import ModelNotFound, QuireError, Unsupported
from quire.models.checkpoint_locator import ADAPTER_CONFIG, EMBEDDED, LOCAL_ADAPTER, refuse_url

MAX_BYTES = 2 << 30
"""Of the files of an adapter that a client has downloaded."""
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
WAIT_S = 10


def find_requested_adapter(path: str, load: LoadConfig, from_hub: bool) -> str:
    """The absolute directory of the adapter.

    Raises:
        ModelNotFound: there is no such directory, or no such public repository.
        Unsupported: a URL, or an adapter of the hub that is too large.
    """
    if os.path.isdir(path):
        return os.path.abspath(path)
    if "/" not in path and os.path.isfile(EMBEDDED / path / ADAPTER_CONFIG):
        return str(EMBEDDED / path)
    refuse_url("the adapter's path", path, LOCAL_ADAPTER)
    if HUB_ID.fullmatch(path) is None:
        raise ModelNotFound(f"no adapter in {path}: there is no such directory; {LOCAL_ADAPTER}")
    if not from_hub:
        raise ModelNotFound(
            f"no adapter in {path}: there is no such directory, and this server downloads no adapters of the hub for"
            f" clients (--allow-lora-from-hub); {LOCAL_ADAPTER}"
        )
    return _download(path, load)


def _download(name: str, load: LoadConfig) -> str:
    """The directory of a public adapter of the hub, with its configuration and one file of weights."""
    import huggingface_hub as hub

    try:
        found = hub.HfApi(token=False).model_info(name, timeout=WAIT_S, files_metadata=True)
        sizes = {file.rfilename: file.size for file in found.siblings or []}
        wanted = _wanted(name, sizes)
        return str(
            Path(
                hub.snapshot_download(
                    name, revision=found.sha, allow_patterns=wanted, cache_dir=load.download_dir, token=False
                )
            ).absolute()
        )  # fmt: skip
    except QuireError:
        raise
    except Exception as error:  # the class of network errors depends on the hub's HTTP client
        raise ModelNotFound(
            f"no adapter in {name}: there is no such directory, and no public repository of the hub could be read"
            f" ({type(error).__name__})"
        ) from None


def _wanted(name: str, sizes: dict[str, int | None]) -> list[str]:
    """The files to download. Raises ModelNotFound, Unsupported: there are none, or they are too large."""
    weights = next((file for file in WEIGHTS if file in sizes), None)
    if weights is None or ADAPTER_CONFIG not in sizes:
        raise ModelNotFound(
            f"{name} on the hub is no LoRA adapter: it needs {ADAPTER_CONFIG} and one of {', '.join(WEIGHTS)}"
        )
    wanted = [ADAPTER_CONFIG, weights]
    known = [size for file in wanted if (size := sizes[file]) is not None]
    if len(known) < len(wanted) or sum(known) > MAX_BYTES:
        raise Unsupported(
            f"the adapter {name} of the hub ({sum(known)} bytes; clients may have at most {MAX_BYTES} downloaded)",
            "ask the operator to download it",
        )
    return wanted

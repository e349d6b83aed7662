"""vLLM's functions for files of a model's repository, on the hub's own client."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi, HfFileSystem

LIBRARY = {"library_name": "quire", "library_version": __version__}


def hf_api() -> HfApi:
    """A client of the hub that names Quire in its requests."""
    from huggingface_hub import HfApi

    return HfApi(**LIBRARY)


def hf_fs() -> HfFileSystem:
    """The hub's repositories as a file system."""
    from huggingface_hub import HfFileSystem

    return HfFileSystem(**LIBRARY)


def list_repo_files(
    repo_id: str, *, revision: str | None = None, repo_type: str | None = None,
    token: str | bool | None = None,
) -> list[str]:  # fmt: skip
    """Paths of the files of a directory or a repository; [] for a repository while HF_HUB_OFFLINE=1."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    folder = Path(repo_id)
    if folder.is_dir():
        return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    try:
        about = {"revision": revision, "repo_type": repo_type, "token": token}
        return list(hf_api().list_repo_files(repo_id, **about))
    except OfflineModeIsEnabled:
        return []


def list_filtered_repo_files(
    model_name_or_path: str, allow_patterns: Sequence[str], revision: str | None = None,
    repo_type: str | None = None, token: str | bool | None = None,
) -> list[str]:  # fmt: skip
    """Those files whose names match one of the patterns, in the order of the patterns."""
    files = list_repo_files(model_name_or_path, revision=revision, repo_type=repo_type, token=token)
    return [
        file
        for pattern in allow_patterns
        for file in files
        if fnmatch.fnmatch(file.rpartition("/")[2], pattern)
    ]


def file_exists(
    repo_id: str, file_name: str, *, repo_type: str | None = None, revision: str | None = None,
    token: str | bool | None = None,
) -> bool:  # fmt: skip
    """Whether a directory or a repository has a file of this path."""
    return file_name in list_repo_files(
        repo_id, revision=revision, repo_type=repo_type, token=token
    )


def try_get_local_file(
    model: str | Path, file_name: str, revision: str | None = "main"
) -> Path | None:
    """The file in the directory, or in the hub's local cache; None: in neither."""
    from huggingface_hub import try_to_load_from_cache

    file = Path(model) / file_name
    if file.is_file():
        return file
    if Path(model).is_dir():
        return None
    cached = try_to_load_from_cache(str(model), file_name, revision=revision)
    return Path(cached) if isinstance(cached, str) else None


def get_hf_file_bytes(
    file_name: str, model: str | Path, revision: str | None = "main"
) -> bytes | None:
    """A file's bytes, from the directory, the cache or the hub; None: there is no such file, or no hub."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    file = try_get_local_file(model, file_name, revision)
    if file is None and not Path(model).is_dir():
        try:
            file = Path(hf_api().hf_hub_download(str(model), file_name, revision=revision))
        except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled):
            return None
    return None if file is None else file.read_bytes()


def get_hf_file_to_dict(
    file_name: str, model: str | Path, revision: str | None = "main"
) -> dict[str, Any] | None:
    """A JSON file as a dict; None as for `get_hf_file_bytes`."""
    text = get_hf_file_bytes(file_name, model, revision)
    return None if text is None else json.loads(text)


def get_model_path(model: str | Path, revision: str | None = None) -> str:
    """A directory as it is given, or the directory of a repository in the local cache.

    Raises:
        LocalEntryNotFoundError: the cache does not have the repository.
    """
    if Path(model).exists():
        return str(model)
    return str(hf_api().snapshot_download(str(model), revision=revision, local_files_only=True))

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not all(find_spec(name) for name in ("soundfile", "soxr", "av", "python_multipart")):
    collect_ignore_glob = ["test_*.py"]  # the extra "audio" is not installed


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def whisper_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    from whisper_checkpoint import make_whisper

    folder: Path = tmp_path_factory.mktemp("whisper")
    return make_whisper(folder)

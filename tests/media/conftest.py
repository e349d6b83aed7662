from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from quire import LLM
from quire.frontend.media.picture_processes import PictureProcesses

if find_spec("PIL") is None:  # the extra "vision" is not installed
    collect_ignore_glob = ["test_*.py"]
else:
    import vision_checkpoints

SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16,
    "seed": 0,
}  # fmt: skip


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Path of the tiny checkpoint of a kind, made once."""
    made: dict[str, str] = {}

    def get(kind: str) -> str:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = vision_checkpoints.make_checkpoint(kind, folder)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[[str], PictureProcesses]]:
    """The picture processes of a checkpoint: their start takes seconds."""
    made: dict[str, PictureProcesses] = {}

    def get(path: str) -> PictureProcesses:
        if path not in made:
            made[path] = PictureProcesses(path)
        return made[path]

    yield get
    for one in made.values():
        one.close()


@pytest.fixture
def engine(checkpoint: Callable[[str], str], processes: Any) -> Callable[..., Any]:
    """`with engine(kind, option=...) as llm`: an LLM in this process, on one thread."""

    @contextmanager
    def started(kind: str, **options: Any) -> Iterator[LLM]:
        path, threads = checkpoint(kind), torch.get_num_threads()
        torch.set_num_threads(1)
        with LLM(model=path, **{**SMALL, **options}) as llm:
            if llm.front.pictures is not None:
                llm.front.pictures.processes = processes(path)
            try:
                yield llm
            finally:
                torch.set_num_threads(threads)

    return started

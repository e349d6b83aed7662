"""A whole checkpoint, and a copy of it to be spoilt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch import nn

from tests.models.cases import Case, write

QWEN = Case("qwen3", "qwen3", {"tie_word_embeddings": False})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp("original")
    return folder, write(QWEN, folder)


@pytest.fixture
def copy(original: tuple[Path, nn.Module], tmp_path: Path) -> Path:
    """A checkpoint to be spoilt."""
    return Path(shutil.copytree(original[0], tmp_path / "model"))

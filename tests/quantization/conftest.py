"""The checkpoint that is quantized."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.cases import write
from tests.quantization.writers import SMALL


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write(SMALL, folder)
    return folder

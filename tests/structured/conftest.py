"""One tiny checkpoint whose tokens are bytes, for all tests of constrained output."""

from __future__ import annotations

import pytest
from grammar_reader import Reader
from tiny_llama import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def reader(checkpoint: str) -> Reader:
    return Reader(checkpoint)

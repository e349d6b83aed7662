from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "frontend"))

import page_model_engine

from quire.api.llm import LLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's directory with a tokenizer and no weights."""
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., LLM]]:
    """An LLM over the model of a page, with the keywords of LLM()."""
    made: list[LLM] = []

    def llm(**keywords: Any) -> LLM:
        made.append(LLM.from_client(page_model_engine.make(folder, **keywords)))
        return made[-1]

    yield llm
    for one in made:
        one.shutdown()


@pytest.fixture
def llm(make: Callable[..., LLM]) -> LLM:
    return make()

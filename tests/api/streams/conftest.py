"""AsyncLLM over a scripted model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import page_model_engine
import pytest
from streaming import executor

from quire.api.async_llm import AsyncLLM


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., AsyncLLM]]:
    made: list[AsyncLLM] = []

    def one(**keywords: Any) -> AsyncLLM:
        made.append(AsyncLLM.from_client(page_model_engine.make(folder, **keywords)))
        return made[-1]

    yield one
    for llm in made:
        llm.shutdown()


@pytest.fixture
def llm(make: Callable[..., AsyncLLM]) -> AsyncLLM:
    return make()


@pytest.fixture
def slow(llm: AsyncLLM) -> AsyncLLM:
    """One that is still at it when a test gives up: 190 tokens take four seconds."""
    executor(llm).pause = 0.02
    return llm

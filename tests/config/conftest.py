"""An environment without Quire's variables for each test, and the logged warnings."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator

import pytest
from small_llama import CPU, LLAMA

from quire.config import flags
from quire.config.engine import EngineConfig
from quire.config.resolve import resolve


@pytest.fixture(autouse=True, scope="module")
def one_parser() -> Iterator[None]:
    """Making a parser takes 20 ms, and a parser keeps nothing of what it parsed.

    For these tests only: commands elsewhere add flags of their own to the parser that they get.
    """
    make, flags.make_parser = flags.make_parser, functools.cache(flags.make_parser)
    yield
    flags.make_parser = make


@pytest.fixture(autouse=True)
def as_if_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A developer's own QUIRE_* and VLLM_* must not decide what a test sees, nor a test how others log."""
    for name in [n for n in os.environ if n.startswith(("QUIRE_", "VLLM_"))]:
        monkeypatch.delenv(name)
    ours = logging.getLogger("quire")
    before = (list(ours.handlers), ours.level, ours.propagate)
    yield
    ours.handlers[:], ours.level, ours.propagate = before


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Texts of the warnings that our loggers wrote, whatever the logging setup of other tests."""
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler, ours = Keep(logging.WARNING), logging.getLogger("quire")
    ours.addHandler(handler)
    yield texts
    ours.removeHandler(handler)


@pytest.fixture
def settle() -> Callable[..., object]:
    """Resolve keywords against a small Llama on a CPU; `config` and `facts` change those."""

    def settled(config=None, facts=CPU, per_request_cache=False, **keywords):
        return resolve(
            EngineConfig.from_keywords(**keywords),
            "/nowhere",
            {**LLAMA, **(config or {})},
            facts,
            per_request_cache=per_request_cache,
        )

    return settled

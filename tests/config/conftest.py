"""Clean variables for every test here, and what was logged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import pytest

from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.platforms.facts import PlatformFacts

GIB = 1 << 30


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


CPU = PlatformFacts(
    device="cpu",
    name="a test",
    dtypes=("bfloat16", "float32"),
    block_size=64,
    num_batched_tokens=2048,
    max_num_seqs=256,
    depth=1,
    total_bytes=8 * GIB,
    available_bytes=4 * GIB,
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 100,
    "dtype": "bfloat16",
}


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

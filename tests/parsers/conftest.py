"""The embedded model in a whole server, for all tests of conversations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from scripted import make_state

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.server.state import ServerState


@pytest.fixture(scope="session")
def state() -> Iterator[ServerState]:
    config = EngineConfig.from_keywords(
        model="quire-tiny", max_model_len=1024, max_num_seqs=32, kv_cache_memory_bytes=64 << 20
    )
    client = make_client(config)
    made = make_state(None)
    made.attach(engine := AsyncEngine(client, config))
    yield made
    engine.shutdown()

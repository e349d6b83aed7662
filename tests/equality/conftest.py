from __future__ import annotations

from collections.abc import Callable

import engines
import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Path of the tiny checkpoint of a kind, made once."""
    made: dict[str, str] = {}

    def get(kind: str) -> str:
        if kind not in made:
            made[kind] = engines.make_checkpoint(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get

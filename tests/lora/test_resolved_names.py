"""Names that resolvers registered: how many there may be, and which of them the engine forgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.features.lora import resolved_names
from quire.features.lora.registry import LoraRegistry


class Workers:
    """Workers that read every adapter at once; its version is its path."""

    def __init__(self) -> None:
        self.read: dict[int, str] = {}

    def __call__(self, name: str, *args: Any) -> list[Any]:
        if name == "read_adapter":
            self.read[args[0]] = args[1]
        if name == "adapters_read":
            about = {"rank": 1, "bytes": 8}
            return [{ticket: about | {"version": self.read[ticket]} for ticket in args[0]}]
        return [True]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> LoraRegistry:
    monkeypatch.setattr(resolved_names, "MOST", 4)
    monkeypatch.setattr(resolved_names, "MOST_OF_A_KEY", 3)
    return LoraRegistry(Workers(), slots=2, wake=lambda: None)


def load(registry: LoraRegistry, name: str, resolved_for: str | None = None) -> None:
    assert registry.load(name, name, f"/{name}", if_absent=True, resolved_for=resolved_for)


def names(registry: LoraRegistry) -> list[str]:
    return list(registry.names)


def test_the_oldest_unused_name_of_a_key_is_forgotten(registry: LoraRegistry) -> None:
    """Regression: a client registered 4,096 names, and nobody could load an adapter any more."""
    load(registry, "fixed")
    for name in "abc":
        load(registry, name, "bob")
    assert registry.find("a")["is_resolved"]  # a request names it
    load(registry, "d", "bob")
    assert names(registry) == ["fixed", "a", "c", "d"]
    assert registry.find("b") is None
    assert "/b" not in registry.versions


def test_all_keys_together_have_a_bound(registry: LoraRegistry) -> None:
    for number in range(20):
        load(registry, f"x{number}", f"key {number}")
    assert names(registry) == ["x16", "x17", "x18", "x19"]


def test_names_in_use_are_forgotten_last_and_their_requests_go_on(registry: LoraRegistry) -> None:
    for name in "abc":
        load(registry, name, "bob")
    registry.versions["/a"].running = 1
    load(registry, "d", "bob")
    assert names(registry) == ["a", "c", "d"]
    registry.versions["/c"].running = registry.versions["/d"].running = 1
    load(registry, "e", "bob")
    assert names(registry) == ["c", "d", "e"]
    assert "/a" in registry.versions


def test_a_name_that_is_loaded_by_its_user_is_not_forgotten(registry: LoraRegistry) -> None:
    load(registry, "a", "bob")
    assert registry.load("again", "a", "/a", load_inplace=True)
    for name in "bcdef":
        load(registry, name, "bob")
    assert names(registry) == ["a", "d", "e", "f"]


def test_a_replaced_engine_forgets_the_same_names(registry: LoraRegistry, tmp_path: Path) -> None:
    registry.persist(tmp_path / "names")
    load(registry, "fixed")
    for name in "abc":
        load(registry, name, "bob")
    replaced = LoraRegistry(Workers(), slots=2, wake=lambda: None)
    replaced.persist(tmp_path / "names")
    load(replaced, "d", "bob")
    assert names(replaced) == ["fixed", "b", "c", "d"]

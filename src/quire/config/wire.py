"""A Resolved as bytes, for a process of our own: msgpack of plain values, no pickle.

Functions and classes (hf_overrides, logits_processors) travel by their name, `module:Name`, and are found again
by import. Knows the tree of dataclasses. Does not know who sends or receives.
"""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import Any

import msgspec

from quire.config.engine import EngineConfig, Resolved
from quire.config.options import section_class
from quire.errors import ConfigError

MARK = "__by_name__"


def to_wire(resolved: Resolved) -> bytes:
    """Encode.

    Raises:
        ConfigError: a function or class that the other process could not import (a lambda, or defined in a
            function or in the program's main file).
    """
    return _encode(_plain(resolved))


def from_wire(data: bytes) -> Resolved:
    """Decode what `to_wire` made.

    Raises:
        ConfigError: a name in it cannot be imported here.
    """
    plain = msgspec.msgpack.decode(data)
    return Resolved(**{**_revive(plain), "asked": _asked(plain["asked"])})


def config_to_wire(asked: EngineConfig) -> bytes:
    """The same for a configuration that is not resolved yet."""
    return _encode(_plain(asked))


def config_from_wire(data: bytes) -> EngineConfig:
    return _asked(msgspec.msgpack.decode(data))


def _asked(plain: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        **{name: section_class(name)(**_revive(values)) for name, values in plain.items()}
    )


def _encode(plain: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(plain)
    except (TypeError, OverflowError) as why:
        raise ConfigError(
            f"the configuration holds a value that cannot go to another process: {why}"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, (EngineConfig, Resolved)) or hasattr(value, "__dataclass_fields__"):
        if isinstance(value, type):
            return {MARK: name_of(value)}
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, type) or callable(value):
        return {MARK: name_of(value)}
    return value


def _revive(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {MARK}:
            return by_name(value[MARK])
        return {key: _revive(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_revive(item) for item in value]
    return value


def name_of(thing: Any) -> str:
    """`module:Name` of a function or class, if another process can import it by that."""
    module = getattr(thing, "__module__", None) or "__main__"
    name = getattr(thing, "__qualname__", "") or type(thing).__qualname__
    if module != "__main__" and "<" not in name:
        try:
            if by_name(f"{module}:{name}") is thing:
                return f"{module}:{name}"
        except ConfigError:
            pass
    raise ConfigError(
        f"{module}.{name} cannot be found by another process: define it at the top of a module that can be imported,"
        " or keep the engine in this process (distributed_executor_backend=uni)"
    )


def by_name(name: str) -> Any:
    """The thing that `module:Name` names."""
    module, _, path = name.partition(":")
    try:
        thing: Any = importlib.import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError) as why:
        raise ConfigError(f"{name} cannot be imported: {why}") from None
    return thing

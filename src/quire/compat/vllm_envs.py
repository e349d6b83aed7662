"""The module `vllm.envs`: VLLM_* variables as attributes, read from the environment at each access.

Knows the table of `quire.env`. A variable that tunes a part of vLLM which Quire lacks is the text of the environment; if
it is not set, there is no such name, since Quire has no default for it.
"""

from __future__ import annotations

from typing import Any

from quire import env


def is_set(name: str) -> bool:
    """Whether the environment sets VLLM_x, or QUIRE_x.

    Raises:
        AttributeError: no variable of vLLM has this name.
    """
    if _name(name) not in env.VARIABLES and _name(name) not in env.QUIET:
        raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
    return env.raw(_name(name)) is not None


def _name(written: str) -> str:
    return written.removeprefix("VLLM_") if written.startswith("VLLM_") else ""


def __getattr__(written: str) -> Any:
    name = _name(written)
    if name in env.VARIABLES:
        return env.get(name)
    if name in env.QUIET and (text := env.raw(name)) is not None:
        return text
    raise AttributeError(f"module 'vllm.envs' has no attribute {written!r}")


def __dir__() -> list[str]:
    return [f"VLLM_{name}" for name in env.VARIABLES] + ["is_set"]

"""ResolvedNames: the names of adapters that resolvers registered. Their number is bounded, since requests register them.

Knows names, and the API key whose request registered each. Does not know versions or files (`registry.py`).
"""

from __future__ import annotations

from collections.abc import Callable

MOST = 1024
"""Names that resolvers registered, of all keys."""
MOST_OF_A_KEY = 256
"""The same, of one API key; requests without a key count as one."""


class ResolvedNames:
    """`is_used(name)`: whether a request has the adapter of this name; such names are forgotten last."""

    def __init__(self, is_used: Callable[[str], bool]):
        self._is_used = is_used
        self._keys: dict[str, str] = {}  # name -> key; the least recently used first

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def add(self, name: str, key: str) -> None:
        self._keys[name] = key

    def use(self, name: str) -> None:
        """Note that a request names it."""
        if (key := self._keys.pop(name, None)) is not None:
            self._keys[name] = key

    def remove(self, name: str) -> None:
        self._keys.pop(name, None)

    def to_forget(self, key: str) -> str | None:
        """The name that must be forgotten before `key` gets another one; None: there is room.

        It is the oldest unused one of the key, or of all keys; if requests use all, the oldest: they go on without the name.
        """
        of_key = [name for name, other in self._keys.items() if other == key]
        if len(of_key) >= MOST_OF_A_KEY:
            names = of_key
        elif len(self._keys) >= MOST:
            names = list(self._keys)
        else:
            return None
        return next((name for name in names if not self._is_used(name)), names[0])

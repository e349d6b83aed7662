"""EngineListener: what a part of an engine hears when the engine pauses, sleeps, wakes up, or empties its prefix cache.

Knows when it is called. Does not know who listens.
"""

from __future__ import annotations

from collections.abc import Sequence


class EngineListener:
    """The base does nothing. No step is in flight in `on_sleep` and `on_wake_up`."""

    def on_pause(self) -> None:
        """From now on the engine admits no requests, or only those that were there before."""

    def on_resume(self) -> None:
        """The engine admits requests again."""

    def on_sleep(self, level: int) -> None:
        """The engine sleeps: 0: it only pauses; 1: the KV cache is freed, and the weights are in host memory; 2: both are freed.

        The levels are the same as of `SleepController.sleep`. No request has a row from level 1 on.
        """

    def on_wake_up(self, parts: Sequence[str]) -> None:
        """The workers have these parts again: "weights", "kv_cache"."""

    def on_cache_reset(self) -> None:
        """The prefix cache forgot the blocks that no request uses."""

    def on_close(self) -> None:
        """The engine ends: it runs no more requests. Its workers still run, unless they have failed."""

"""An event loop whose clock shows only the time that its timers wait for, and none that the machine takes."""

from __future__ import annotations

import asyncio


class FakeClockLoop(asyncio.SelectorEventLoop):
    """Waits for no timer: when nothing else is left to do, its clock jumps to the next one. It has no threads."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> list[object]:
            self.now += timeout or 0.0
            return select(0 if timeout is not None else None)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

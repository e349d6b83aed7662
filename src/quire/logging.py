"""One logger setup for every process, and warnings that do not flood."""

from __future__ import annotations

import logging
import time
from typing import Any


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger that can also warn at most once in a while."""

    def __init__(self, logger: logging.Logger):
        super().__init__(logger)
        self._last: dict[str, float] = {}

    def warning_every(self, key: str, seconds: float, message: str, *args: Any) -> None:
        now = time.monotonic()
        if now - self._last.get(key, -seconds) >= seconds:
            self._last[key] = now
            self.warning(message, *args)


def get_logger(name: str) -> Logger:
    return Logger(logging.getLogger(name))

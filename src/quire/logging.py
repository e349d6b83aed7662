"""Logging setup for every process, and rate-limited warnings.

A library must not change the program's logging. Quire's own commands and processes call `configure()`;
LLM(...) calls it with force=False. Knows Python's logging and the variables in `env.py`.
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from quire import env
from quire.errors import ConfigError
from quire.terminal import OutputHandler

ROOT = "quire"
CONTINUED = "| "
"""Starts each line of a message after the first, so that text from a client cannot look like a log record."""
MOST_KEYS = 1024
"""Keys of `warning_every` that a logger remembers. It forgets the oldest first."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, end a line, change text direction, or cannot be encoded."""
_COLORS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "31;1", "DEBUG": "2"}


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger with rate-limited warnings."""

    def __init__(self, logger: logging.Logger):
        super().__init__(logger)
        self._last: dict[str, float] = {}
        """When each key last warned; only the latest MOST_KEYS keys."""

    def warning_every(self, key: str, seconds: float, message: str, *args: Any) -> None:
        """Warn, unless `key` warned within `seconds`."""
        now = time.monotonic()
        if now - self._last.get(key, -seconds) >= seconds:
            self._last.pop(key, None)
            self._last[key] = now
            if len(self._last) > MOST_KEYS:
                del self._last[next(iter(self._last))]
            self.warning(message, *args)

    def warning_once(self, message: str, *args: Any) -> None:
        """Warn, unless this logger has already logged the same message."""
        self.warning_every(message, float("inf"), message, *args)


def get_logger(name: str) -> Logger:
    return Logger(logging.getLogger(name))


def printable(text: str) -> str:
    """The text with control characters escaped, except line feeds and tabs."""
    return _CONTROL.sub(_escaped, text.replace("\r\n", "\n"))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class Lines(logging.Formatter):
    """Text format: `12-31 12:00:00.123 WARNING engine[4711] scheduler.py:88: text`.

    Each further line of a message, such as a row of a table, begins with a bar.
    """

    def __init__(self, process: str, *, prefix: str = "", color: bool = False):
        super().__init__()
        self.process, self.prefix, self.color = process, prefix, color

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        head = (
            f"{self.prefix}{when}.{int(record.msecs):03d} {record.levelname} {self.process}[{os.getpid()}]"
            f" {record.filename}:{record.lineno}:"
        )
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        if record.stack_info:
            text = f"{text}\n{record.stack_info}"
        shown = f"\n{self.prefix}{CONTINUED}".join(printable(text).removesuffix("\n").split("\n"))
        line = f"{head} {shown}"
        code = _COLORS.get(record.levelname)
        return f"\033[{code}m{line}\033[0m" if self.color and code else line


class JsonLines(logging.Formatter):
    """JSON format for log collectors, one object a line: QUIRE_LOGGING_FORMAT=json."""

    def __init__(self, process: str):
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "process": self.process,
            "pid": os.getpid(),
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            entry["exception"] = printable(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False)


def configure(process: str = "quire", level: str | None = None, *, force: bool = True) -> None:
    """Set up logging for this process.

    Args:
        process: short name in each line: server, engine, worker 0.
        level: DEBUG, INFO, ...; None: QUIRE_LOGGING_LEVEL.
        force: False: do nothing if Quire's logger or the root logger already has a handler.

    Raises:
        ConfigError: no such level; QUIRE_LOGGING_CONFIG_PATH is not a valid configuration file.
    """
    ours = logging.getLogger(ROOT)
    if not env.get("CONFIGURE_LOGGING"):
        return
    if not force and (ours.handlers or logging.getLogger().handlers):
        return
    if path := env.get("LOGGING_CONFIG_PATH"):
        try:
            logging.config.dictConfig(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as why:
            raise ConfigError(f"QUIRE_LOGGING_CONFIG_PATH={path}: {why}") from None
        return
    name = (level or str(env.get("LOGGING_LEVEL"))).upper()
    if name not in logging.getLevelNamesMapping():
        raise ConfigError(
            f"log level {name}: choose from DEBUG, INFO, WARNING, ERROR, CRITICAL (--log-level, QUIRE_LOGGING_LEVEL)"
        )
    stream = sys.stdout if env.get("LOGGING_STREAM") == "stdout" else sys.stderr
    handler = OutputHandler(stream)
    if env.get("LOGGING_FORMAT") == "json":
        handler.setFormatter(JsonLines(process))
    else:
        handler.setFormatter(
            Lines(process, prefix=str(env.get("LOGGING_PREFIX")), color=_colored(stream))
        )
    for old in list(ours.handlers):
        ours.removeHandler(old)
    ours.addHandler(handler)
    ours.setLevel(name)
    ours.propagate = False


def _colored(stream: TextIO) -> bool:
    wanted = str(env.get("LOGGING_COLOR"))
    if wanted == "auto":
        return env.outer("NO_COLOR") is None and stream.isatty()
    return wanted in env.TRUE

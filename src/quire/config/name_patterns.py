"""Regular expressions that a file of a model or an adapter brings to name modules: a small subset, within limits.

Knows which constructs are accepted, and the limits of number, length and time. Does not know what the names mean.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import regex

from quire.errors import ConfigError

MAX_PATTERNS = 4096
MAX_LENGTH = 256
MAX_REPEATS = 8
ACCEPTED = re.compile(
    r"\\[dDwWsSbBAZ]|\\[^\w\s]"  # classes and positions; an escaped sign
    r"|\[\^?(?:\\[dDwWsS]|\\[^\w\s]|[\w.^$-])+\]"
    r"|\(\?[:=!]|\((?!\?)|[)|.^$]"
    r"|[*+?]\??|[\w:/@-]",
    re.ASCII,
)
"""One piece of a pattern. Not accepted are counted repeats (`a{1000}` nested takes gigabytes), recursion and back references."""
REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+]")
"""Not accepted either: a repeat of a repeat, or of alternatives, takes exponential time."""


class NamePatterns:
    """The patterns of one file. A pattern must match the begin of a name.

    Args:
        field: where they are in the file, for messages.
        seconds: processor time that compiling and matching all of them may take together.
        form: what is compiled, with the pattern in place of {}.

    """

    def __init__(self, field: str, seconds: float, form: str = "{}"):
        self._field, self._left, self._form = field, seconds, form
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def add(self, patterns: Iterable[str]) -> None:
        """Compile the patterns. Raises ConfigError: one is not accepted, there are too many, or they take too long."""
        distinct = dict.fromkeys(patterns)
        if len(distinct) > MAX_PATTERNS:
            raise ConfigError(f"{self._field}: {len(distinct)} patterns, at most {MAX_PATTERNS}")
        for pattern in distinct:
            began = time.thread_time()
            self._compiled[pattern] = self._compile(pattern)
            self._spend(pattern, began)

    def match(self, pattern: str, name: str) -> bool:
        """Whether one of the patterns matches; Python's lock is not held meanwhile. Raises ConfigError: they took too long."""
        began = time.thread_time()
        try:
            matched = self._compiled[pattern].match(name, timeout=self._left, concurrent=True)
        except TimeoutError:
            self._left = 0.0
            raise self._too_slow(pattern) from None
        self._spend(pattern, began)
        return matched is not None

    def _compile(self, pattern: str) -> regex.Pattern[str]:
        if len(pattern) > MAX_LENGTH:
            raise ConfigError(
                f"{self._field}: the pattern {pattern!r:.80} has {len(pattern)} characters, at most {MAX_LENGTH}"
            )
        if refused := ACCEPTED.sub("", pattern):
            raise ConfigError(
                f"{self._field}: the pattern {pattern!r:.80} has {refused!r:.20}, which is not accepted: use names, .  \\d  [ ]"
                "  ( | )  *  +  ? and lookahead, and * or + in place of a counted repeat"
            )
        if REPEATED_GROUP.search(pattern) or len(re.findall(r"[*+?]", pattern)) > MAX_REPEATS:
            raise ConfigError(
                f"{self._field}: the pattern {pattern!r:.80} repeats a group, or has more than {MAX_REPEATS} repeats: use fewer"
            )
        try:
            return regex.compile(self._form.format(pattern), cache_pattern=False)
        except (regex.error, RecursionError) as error:
            raise ConfigError(
                f"{self._field}: {pattern!r:.80} is no regular expression: {error}"
            ) from None

    def _spend(self, pattern: str, began: float) -> None:
        self._left -= time.thread_time() - began
        if self._left <= 0:
            raise self._too_slow(pattern)

    def _too_slow(self, pattern: str) -> ConfigError:
        return ConfigError(
            f"{self._field}: its patterns take too long to match (at {pattern!r:.80}): use fewer repeats, or plain names"
        )

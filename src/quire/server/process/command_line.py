"""Hides secrets on this process's command line, which `ps` shows to every user of the machine.

Knows Linux's files of a process. On other systems, and without permission, the command line stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from quire.config.api_key_file import plain_keys
from quire.config.engine import EngineConfig

FLAGS = (b"--api-key", b"--hf-token")
FIRST, LAST = 45, 46  # arg_start and arg_end among the fields of /proc/PID/stat after the name


def hide_secrets(config: EngineConfig) -> None:
    """Hide the values of --api-key and --hf-token."""
    token = config.model.hf_token
    hide_words([*plain_keys(config.server.api_key), token if isinstance(token, str) else ""])


def hide_words(secrets: Sequence[str]) -> None:
    """Overwrite these values where the system reads the command line. Until this call, they are visible."""
    values = {secret.encode(errors="surrogateescape") for secret in secrets if secret}
    if not values:
        return
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[FIRST]), int(fields[LAST])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            words = memory.read(end - start).split(b"\0")
            memory.seek(start)
            memory.write(b"\0".join(hidden(word, values) for word in words))


def hidden(word: bytes, values: set[bytes]) -> bytes:
    """A word of the command line, as long as before: `KEY` or `--api-key=KEY` with stars in place of the key."""
    flag, equals, value = word.partition(b"=")
    if equals and value in values and flag.replace(b"_", b"-") in FLAGS:
        return flag + equals + b"*" * len(value)
    return b"*" * len(word) if word in values else word

"""A redis server of a test, and connections to it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed")


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """Its URL. It listens on a socket in the folder, and keeps nothing on disk."""
    assert PROGRAM is not None
    path = folder / "redis.sock"
    command = [PROGRAM, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder), *options]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + 20
            while not answers(path):
                assert time.monotonic() < end, "redis-server does not answer"
                time.sleep(0.01)
            yield f"unix://{path}"
        finally:
            server.kill()
            server.wait()
            path.unlink(missing_ok=True)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
            probe.sendall(b"PING\r\n")
            return bool(probe.recv(100))
        except OSError:
            return False


def client(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url)

"""The key that the machines of one engine share: a file that QUIRE_CLUSTER_KEY_FILE names, the same on each machine.

Knows the file and which addresses need a key. Does not know sockets (`processes/keyed_socket.py`).
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from quire import env
from quire.errors import ConfigError

VARIABLE = "QUIRE_CLUSTER_KEY_FILE"
MIN_BYTES = 16
MAKE = "create it with `openssl rand -hex 32`, and copy it to each machine"


def cluster_key(address: str) -> bytes:
    """The key for connections to `address`; empty if there is no file, and the address is of this machine only.

    Raises:
        ConfigError: the file is missing, cannot be read or is too short.
    """
    if (path := env.get("CLUSTER_KEY_FILE")) is None:
        if is_loopback(address):
            return b""
        raise ConfigError(
            f"processes on other machines connect to {address}, which needs a key: set {VARIABLE} to a file with one;"
            f" {MAKE}"
        )
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except OSError as why:
        raise ConfigError(f"{VARIABLE}={path}: {why.strerror or why}") from None
    if len(key) < MIN_BYTES:
        raise ConfigError(
            f"{VARIABLE}={path}: the key has {len(key)} bytes, and needs {MIN_BYTES}; {MAKE}"
        )
    return key


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach the address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"

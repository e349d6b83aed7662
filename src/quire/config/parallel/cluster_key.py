"""The key that the machines of one engine share: a file that QUIRE_CLUSTER_KEY_FILE names, the same on each machine.

On a loopback address it may be missing: then both sides use a file in QUIRE_CACHE_ROOT that only their user can read, since
other users of the machine reach such an address, too. Knows the files. Does not know sockets (`processes/keyed_socket.py`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import tempfile
from pathlib import Path

from quire import env
from quire.errors import ConfigError

VARIABLE = "QUIRE_CLUSTER_KEY_FILE"
MIN_BYTES = 16
MAKE = "create it with `openssl rand -hex 32`, and copy it to each machine"


def cluster_key(address: str) -> bytes:
    """The key for connections to `address`.

    Raises:
        ConfigError: the file is missing, cannot be read or is too short; or another user could have written it.
    """
    if (path := env.get("CLUSTER_KEY_FILE")) is None:
        if is_loopback(address):
            return _key_of_this_user()
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


def _key_of_this_user() -> bytes:
    """The content of QUIRE_CACHE_ROOT/cluster_key, which the first process makes."""
    file = Path(str(env.get("CACHE_ROOT"))).expanduser().absolute() / "cluster_key"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            with tempfile.NamedTemporaryFile(
                dir=file.parent, prefix="cluster_key-"
            ) as new:  # mode 0600
                new.write(secrets.token_hex(32).encode())
                new.flush()
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.link(new.name, file)
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
            status, key = os.fstat(opened.fileno()), opened.read(1024)
    except OSError as why:
        raise ConfigError(f"{file}: {why.strerror or why}; set {VARIABLE}; {MAKE}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or len(key) < MIN_BYTES:
        raise ConfigError(
            f"{file} must be a file of this user that no other user can read (mode 0600): remove it, or set {VARIABLE}"
        )
    return key


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach the address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"

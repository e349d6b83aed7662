"""TLS: checks certificates before anything is loaded, and reloads them when their files change.

Knows files and Python's ssl. Does not know HTTP or clients.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable

from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.logging import get_logger

log = get_logger(__name__)

LOOK_EVERY_S = 5.0


def check(server: ServerConfig) -> None:
    """Raises ConfigError: a TLS file is unusable, or one is given without the other."""
    if server.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(server, name) is not None:
                raise ConfigError(f"{name} without ssl_certfile: TLS also needs the certificate")
        return
    if server.ssl_cert_reqs not in (0, 1, 2):
        raise ConfigError(
            f"ssl_cert_reqs={server.ssl_cert_reqs}: 0 clients need no certificate, 1 optional, 2 required"
        )
    try:
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server)
    except (OSError, ValueError) as why:
        raise ConfigError(f"the TLS files cannot be used: {why} (ssl_certfile={server.ssl_certfile!r},"
                          f" ssl_keyfile={server.ssl_keyfile!r}, ssl_ca_certs={server.ssl_ca_certs!r})") from why  # fmt: skip


def load(context: ssl.SSLContext, server: ServerConfig) -> None:
    """Load the files into a context; connections after this use them.

    Raises:
        OSError: a file is missing, or invalid (ssl.SSLError).
    """
    if server.ssl_certfile is None:
        return
    context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, _no_password)
    if server.ssl_ca_certs is not None:
        context.load_verify_locations(server.ssl_ca_certs)
    if server.ssl_ciphers is not None:
        context.set_ciphers(server.ssl_ciphers)


def _no_password() -> str:
    raise ValueError(
        "the private key is encrypted, and the server cannot ask for its password; use a key without a password"
    )


async def keep_fresh(find: Callable[[], ssl.SSLContext | None], server: ServerConfig) -> None:
    """Reload the files whenever they change, forever. Unusable files leave the old ones in place."""
    before = stamps(server)
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now, context = stamps(server), find()
        if now == before or context is None:
            continue
        before = now
        try:
            load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server)  # all files, or none
            load(context, server)
        except (OSError, ValueError) as why:
            log.error("the new TLS files are not valid; keeping the old ones: %s", why)
        else:
            log.info("reloaded the TLS files from %s", server.ssl_certfile)


def stamps(server: ServerConfig) -> list[tuple[int, int, int] | None]:
    """Values that change when a file does; None: there is no file."""
    return [
        _stamp(path)
        for path in (server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs)
        if path is not None
    ]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size

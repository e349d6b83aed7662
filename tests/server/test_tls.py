"""TLS: a real handshake on a real socket, and files that change while it is up."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from scripted import ScriptedEngine, make_state

from quire.config.engine import EngineConfig
from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.server.app import build_app
from quire.server.process import launch, sockets, tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one.pem and two.pem, and their keys: each signs itself."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        command = (
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN={name}"
            f" -addext subjectAltName=IP:127.0.0.1 -keyout {name}.key -out {name}.pem"
        )
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def files(made: Path, tmp_path: Path) -> ServerConfig:
    put(made, tmp_path, "one")
    return ServerConfig(
        host="127.0.0.1", port=0, ssl_certfile=str(tmp_path / "c.pem"), ssl_keyfile=str(tmp_path / "k.pem")
    )  # fmt: skip


def put(made: Path, folder: Path, name: str) -> None:
    shutil.copy(made / f"{name}.pem", folder / "c.pem")
    shutil.copy(made / f"{name}.key", folder / "k.pem")


@asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[tuple[sockets.UvicornServer, int]]:
    listener = sockets.bind(config)
    server = sockets.http_server(build_app(make_state(ScriptedEngine())), config)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def asked(port: int, trusted: Path, own: Path | None = None) -> bytes:
    """The first line of the answer of /health. Raises ssl.SSLError, OSError: no trust, or none in us."""
    context = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        context.load_cert_chain(own, own.with_suffix(".key"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
    try:
        return (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n")[0]
    finally:
        writer.close()


def test_new_certificates_are_loaded_and_broken_ones_ignored(
    made: Path, files: ServerConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):  # fmt: skip
    monkeypatch.setattr(tls, "LOOK_EVERY_S", 0.02)
    folder = Path(str(files.ssl_certfile)).parent

    async def logged(text: str) -> None:
        for _ in range(300):
            if text in caplog.text:
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"not logged: {text}")

    async def go() -> None:
        async with serving(files) as (server, port):
            context = partial(getattr, server.config, "ssl", None)
            watching = asyncio.ensure_future(tls.keep_fresh(context, files))
            assert await asked(port, made / "one.pem") == b"HTTP/1.1 200 OK"
            await asyncio.sleep(0.05)
            (folder / "c.pem").write_text("nonsense")
            await logged("are not valid")
            assert await asked(port, made / "one.pem") == b"HTTP/1.1 200 OK"
            put(made, folder, "two")
            await logged("reloaded")
            assert await asked(port, made / "two.pem") == b"HTTP/1.1 200 OK"
            with pytest.raises(ssl.SSLError):
                await asked(port, made / "one.pem")
            watching.cancel()

    with caplog.at_level("INFO", "quire"):
        asyncio.run(go())


def test_client_certificates_can_be_required(made: Path, files: ServerConfig):
    config = dataclasses.replace(
        files, ssl_cert_reqs=int(ssl.CERT_REQUIRED), ssl_ca_certs=str(made / "two.pem")
    )

    async def go() -> None:
        async with serving(config) as (_, port):
            answer = await asked(port, made / "one.pem", own=made / "two.pem")
            assert answer == b"HTTP/1.1 200 OK"
            try:
                answer = await asked(port, made / "one.pem")
            except OSError:  # the alert itself, or a broken pipe
                answer = b""
            assert answer == b""

    asyncio.run(go())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2])  # fmt: skip
def test_old_versions_of_tls_are_refused(made: Path, files: ServerConfig, version: ssl.TLSVersion):
    context = ssl.create_default_context(cafile=str(made / "one.pem"))
    context.set_ciphers("ALL:@SECLEVEL=0")  # or the client itself would not offer them
    context.minimum_version = context.maximum_version = version

    async def shaken() -> bool:
        async with serving(files) as (_, port):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            except (ssl.SSLError, ConnectionError):
                return False
            writer.close()
            return True

    assert asyncio.run(shaken()) == (version is ssl.TLSVersion.TLSv1_2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ssl_certfile": "/no/such.pem"}, "No such file"),
        ({"ssl_keyfile": __file__}, "cannot be used"),
        ({"ssl_ciphers": "NONE-SUCH"}, "No cipher"),
        ({"ssl_cert_reqs": 9}, "ssl_cert_reqs=9: 0 clients"),
        ({"ssl_certfile": None}, "ssl_keyfile without ssl_certfile"),
    ],
)
def test_files_that_cannot_be_used_end_the_start(files: ServerConfig, change, why):
    with pytest.raises(ConfigError, match=why):
        launch.serve(EngineConfig(server=dataclasses.replace(files, **change)))

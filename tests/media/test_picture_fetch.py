"""Fetching pictures: addresses that are refused, redirects, time, size and files. The servers here are on loopback."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from vision_server import data_url, moved, ok, web_server

from quire.config.media import MediaConfig
from quire.errors import NotFetched, ValidationError
from quire.frontend.media.addresses import is_public, read_url
from quire.frontend.media.content_parts import GivenMedia
from quire.frontend.media.fetch import Fetcher

BODY = bytes(range(256)) * 40


def fetch(*urls: str, **config: Any) -> list[bytes]:
    given = [GivenMedia(f"at[{n}]", url) for n, url in enumerate(urls)]
    return asyncio.run(Fetcher(MediaConfig(**config)).fetch(given))


def refused(*urls: str, kind: type[Exception] = ValidationError, **config: Any) -> str:
    with pytest.raises(kind) as caught:
        fetch(*urls, **config)
    return str(caught.value)


LISTED = {"allowed_media_domains": ["127.0.0.1"]}


@pytest.mark.parametrize("host", [
    "127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.1.2.3", "192.168.0.1", "172.16.0.9",
    "2130706433", "0177.0.0.1", "0x7f000001", "127.1", "0", "0.0.0.0", "[fd00::1]", "[fe80::1]", "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]", "224.0.0.1", "255.255.255.255", "100.64.0.1",
])  # fmt: skip
def test_hosts_that_are_not_public_are_refused(host):
    """Most at the address; a host that the system does not resolve cannot be fetched."""
    text = refused(f"http://{host}/a.png")
    assert "public internet" in text or "unknown" in text


@pytest.mark.parametrize("ip", ["127.0.0.1", "::ffff:10.0.0.1", "169.254.1.1", "fe80::1%eth0", "::", "ff02::1", "64:ff9b::a00:1", "2002:a00:1::"])  # fmt: skip
def test_addresses_that_are_not_public(ip):
    assert not is_public(ip)


@pytest.mark.parametrize("ip", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses(ip):
    assert is_public(ip)


@pytest.mark.parametrize("url", [
    "http://user@127.0.0.1/", "http://a\\@b/", "http://a b/", "http://a/\r\nX: y", "gopher://a/", "http:///x", "http://[::1",
    "http://a:99999/", "http://ex\u0430mple.org/", "javascript:1", "http://", "HTTP://a\t/", "http://" + "a" * 9000,
])  # fmt: skip
def test_urls_that_two_parsers_could_read_differently_are_refused(url):
    with pytest.raises(ValidationError) as caught:
        read_url(url, "at")
    assert caught.value.parameter == "at"


def test_a_host_name_is_resolved_once(monkeypatch):
    """A name whose address changes after the check: the connection goes to the checked one."""
    answers = ["127.0.0.1", "10.0.0.1"]
    with web_server(lambda head: ok(BODY)) as (port, _):

        async def changing(self, host, port, **options):  # fmt: skip
            return [(2, 1, 6, "", (answers.pop(0), port))]

        monkeypatch.setattr("asyncio.BaseEventLoop.getaddrinfo", changing)
        assert fetch(f"http://changes.test:{port}/a", allowed_media_domains=["changes.test"]) == [
            BODY
        ]
    assert answers == ["10.0.0.1"]


def test_a_listed_host_may_be_private_and_others_are_refused():
    with web_server(lambda head: ok(BODY)) as (port, seen):
        assert fetch(f"http://127.0.0.1:{port}/p/a.png?q=1", **LISTED) == [BODY]
        assert seen[0].startswith(b"GET /p/a.png?q=1 HTTP/1.1\r\n")
        assert f"Host: 127.0.0.1:{port}\r\n".encode() in seen[0]
        assert "--allowed-media-domains" in refused(f"http://localhost:{port}/", **LISTED)
        assert len(seen) == 1


def test_bodies_with_chunks_and_without_a_length():
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\n yo\r\n0\r\n\r\n"
    )
    with web_server(lambda head: chunked) as (port, _):
        assert fetch(f"http://127.0.0.1:{port}/", **LISTED) == [b"hello yo"]
    with web_server(lambda head: ok(BODY, length=False)) as (port, _):
        assert fetch(f"http://127.0.0.1:{port}/", **LISTED) == [BODY]


@pytest.mark.parametrize(("answer", "words"), [
    (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
    (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "status 500"),
    (b"", "without an answer"), (b"hello\r\n\r\n", "not HTTP"), (ok(BODY)[:-10], "incomplete"),
    (ok(BODY, "Content-Encoding: gzip"), "compressed"), (ok(b"", "X: " + "y" * 70_000), "too long"),
    (b"HTTP/1.1 200 OK\r\n" + b"X" * 70_000, "too long"),
])  # fmt: skip
def test_an_answer_that_is_no_picture_cannot_be_fetched(answer, words):
    with web_server(lambda head: answer) as (port, _):
        assert words in refused(f"http://127.0.0.1:{port}/", kind=NotFetched, **LISTED)


def test_a_closed_port_cannot_be_fetched():
    with web_server(lambda head: b"") as (port, _):
        pass
    assert "connection" in refused(f"http://127.0.0.1:{port}/", kind=NotFetched, **LISTED)


# -- redirects ------------------------------------------------------------------------------------
def test_redirects_pass_the_same_checks(monkeypatch):
    with web_server(lambda head: ok(BODY) if b" /b " in head else moved("/b")) as (port, seen):
        assert fetch(f"http://127.0.0.1:{port}/a", **LISTED) == [BODY]
        assert len(seen) == 2
        monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
        assert "VLLM_MEDIA_URL_ALLOW_REDIRECTS" in refused(f"http://127.0.0.1:{port}/a", **LISTED)
    monkeypatch.delenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS")
    for to, words in (("http://localhost/x", "this host"), ("http://169.254.169.254/", "this host"), ("file:///etc/passwd", "http://")):  # fmt: skip
        with web_server(lambda head, to=to: moved(to)) as (port, _):
            assert words in refused(f"http://127.0.0.1:{port}/a", **LISTED)
    with web_server(lambda head: moved("/again")) as (port, seen):
        assert "more than 3 times" in refused(f"http://127.0.0.1:{port}/a", **LISTED)
        assert len(seen) == 4


# -- bounds ---------------------------------------------------------------------------------------
def test_one_deadline_for_all_pictures_of_a_request(monkeypatch):
    monkeypatch.setenv("QUIRE_IMAGE_FETCH_TIMEOUT", "0.5")
    with web_server(lambda head: ok(BODY), seconds=0.2) as (port, _):
        began = time.monotonic()
        text = refused(*[f"http://127.0.0.1:{port}/{n}" for n in range(12)], kind=NotFetched, **LISTED)  # fmt: skip
        assert time.monotonic() - began < 3
    assert "0.5 s" in text


def test_one_bound_on_the_bytes_of_a_request(monkeypatch):
    monkeypatch.setenv("QUIRE_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    half = bytes(600_000)
    with web_server(lambda head: ok(half)) as (port, _):
        assert fetch(f"http://127.0.0.1:{port}/", **LISTED) == [half]
        assert "1 MiB" in refused(*[f"http://127.0.0.1:{port}/"] * 2, **LISTED)
    with web_server(lambda head: ok(bytes(1 << 21), length=False)) as (port, _):
        assert "1 MiB" in refused(f"http://127.0.0.1:{port}/", **LISTED)
    with web_server(lambda head: b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n") as (
        port,
        _,
    ):
        assert "1 MiB" in refused(f"http://127.0.0.1:{port}/", **LISTED)


# -- files ----------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    (root / "in side").mkdir(parents=True)
    (root / "in side" / "a.png").write_bytes(b"inside")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "linked").symlink_to(tmp_path)
    os.mkfifo(root / "pipe.png")
    return root


def test_a_file_below_the_allowed_directory_is_read(folder):
    url = f"file://{folder}/in%20side/a.png"
    assert fetch(url, allowed_local_media_path=str(folder)) == [b"inside"]
    assert "--allowed-local-media-path" in refused(url)


@pytest.mark.parametrize("name", [
    "../secret.png", "%2e%2e/secret.png", "link.png", "linked/secret.png", "pipe.png", "in%20side", "missing.png", "", "a%00b",
])  # fmt: skip
def test_all_other_files_are_refused_without_their_path(name, folder):
    text = refused(f"file://{folder}/{name}", allowed_local_media_path=str(folder))
    assert "no such file" in text
    assert str(folder) not in text


def test_files_of_other_places_and_hosts_are_refused(folder):
    for url in (
        "file:///etc/passwd",
        f"file://host{folder}/in%20side/a.png",
        f"file://{folder.parent}/secret.png",
    ):
        assert "no such file" in refused(url, allowed_local_media_path=str(folder))


# -- data: URLs -----------------------------------------------------------------------------------
def test_data_urls_of_every_short_length():
    """With and without padding."""
    for size in range(40):
        file = os.urandom(size)
        assert fetch(data_url(file)) == [file]


@pytest.mark.parametrize("text", ["abc", "abcde", "ab=c", "abc=abcd" * 4, "@@@@", "ab c", "abcd\n", "====", "=", "a==="])  # fmt: skip
def test_what_is_no_base64_is_refused(text):
    assert "not valid base64" in refused(f"data:image/png;base64,{text}")


def test_a_long_data_url_does_not_hold_the_event_loop():
    url = data_url(os.urandom(48 << 20))

    async def go() -> float:
        task, longest = asyncio.create_task(Fetcher(MediaConfig()).fetch([GivenMedia("at", url)])), 0.0  # fmt: skip
        while not task.done():
            began = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - began)
        assert len((await task)[0]) == 48 << 20
        return longest

    assert min(asyncio.run(go()) for _ in range(3)) < 0.1  # once of three: the machine may be busy

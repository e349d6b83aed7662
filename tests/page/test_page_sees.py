"""A picture that is dropped or pasted on the page of `quire serve`: quire-tiny says what is in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import PROGRAM, Chromium
from server_process import Served
from test_page_media import give

from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_vision.samples import ANSWER

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")
PICTURE = EMBEDDED / "quire-tiny" / "sample.png"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    flags = ["--override-generation-config", '{"temperature": 0}', "--kv-cache-memory-bytes", "32M"]
    with Served("quire-tiny", *flags) as server, Chromium(tmp_path_factory.mktemp("browser")) as found:  # fmt: skip
        found.sized(1300, 850)
        found.open(server.url + "/")
        found.until("!document.getElementById('attach').hidden")
        yield found


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_a_picture_is_answered(page: Chromium, way: str):
    page.js("document.getElementById('fresh').click(); 0")
    give(page, way, ("sample.png", "image/png", PICTURE.read_bytes()))
    page.until("document.querySelectorAll('#attached li').length === 1")
    page.js("document.getElementById('words').focus()")
    page.type("What is in this picture?")
    page.enter()
    page.until("document.querySelector('.assistant .note')?.textContent && !document.querySelector('.busy')")  # fmt: skip
    assert page.js("document.querySelector('.assistant .text').textContent") == ANSWER
    assert page.until("document.querySelector('.user img').naturalWidth") == 256
    assert page.complaints() == []

"""The moving picture of README.md: the page while a server of the embedded model is under load.

    python -m tools.page_movie            writes docs/pictures/page.webp

Needs Chromium, and Pillow (`pip install pillow`). The browser is the driver of tests/page.
"""

from __future__ import annotations

import io
import itertools
import sys
import tempfile
import threading
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
for folder in ("page", "processes"):
    sys.path.append(str(ROOT / "tests" / folder))

from chromium import Chromium  # noqa: E402
from server_process import Served  # noqa: E402

TARGET = ROOT / "docs/pictures/page.webp"
SIZE, FRAMES, EVERY_S, CLIENTS = (1280, 800), 60, 0.2, 9
PAUSE_S = 0.15  # of a client between two requests
QUESTIONS = ("Tell me a story about a fox.", "Tell me a story about an owl.", "What is 17 plus 25?", "Count to 20.", "Tell me a story about a bear.")  # fmt: skip
FLAGS = ("--kv-cache-memory-bytes", "40M", "--dtype", "bfloat16", "--max-num-seqs", "8")


def load(server: Served, which: int, ended: threading.Event) -> None:
    """One client: asks until the film is over."""
    for turn in itertools.count(which):
        if ended.is_set():
            return
        messages = [{"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]}]
        server.client.post("/v1/chat/completions", json={"messages": messages, "min_tokens": 150, "max_tokens": 450})  # fmt: skip
        time.sleep(PAUSE_S)


def film(server: Served) -> list[bytes]:
    """PNG frames of the page: examples are pressed while the clients ask."""
    frames, ended = [], threading.Event()
    clients = [threading.Thread(target=load, args=(server, n, ended)) for n in range(CLIENTS)]
    with tempfile.TemporaryDirectory() as folder, Chromium(Path(folder)) as browser:
        browser.sized(*SIZE)
        browser.open(server.url + "/")
        browser.until("!document.getElementById('send').disabled && document.getElementById('running').textContent !== '–'")  # fmt: skip
        for number in range(FRAMES):
            began = time.monotonic()
            frames.append(browser.shot())
            if number == 4:
                browser.js("document.querySelectorAll('.example')[0].click(); 0")
            if 5 <= number < 5 + CLIENTS:
                clients[number - 5].start()
            if number == 24:
                browser.js("document.getElementById('words').value = 'What is 17 plus 25?'; document.getElementById('ask').requestSubmit(); 0")  # fmt: skip
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))
        ended.set()
        for client in clients:
            client.join()
    return frames


def main() -> None:
    with Served("quire-tiny", *FLAGS) as server:
        shots = film(server)
    pictures = [Image.open(io.BytesIO(shot)).convert("RGB") for shot in shots]
    TARGET.parent.mkdir(exist_ok=True)
    pictures[0].save(TARGET, save_all=True, append_images=pictures[1:], duration=round(1000 * EVERY_S), loop=0, quality=60, method=4)  # fmt: skip
    print(
        f"{TARGET.relative_to(ROOT)}: {TARGET.stat().st_size / 1e6:.2f} MB, {len(pictures)} frames"
    )


if __name__ == "__main__":
    main()

"""Two minutes of a random mixture on a server of a model that sees: `python tests/processes/soak_pictures.py`.

A tiny Qwen2.5-VL, and pictures of five formats and several sizes; `soak_media.py` says what clients do. Prints what it did; exit status 1
if anything is not so.
"""

from __future__ import annotations

import base64
import sys
from functools import partial
from typing import Any

import soak_media
from vision_checkpoints import as_file, make_checkpoint, picture

FILES = {
    "png": as_file(picture(1, 150, 90)), "jpeg": as_file(picture(2, 300, 200), "JPEG", quality=80),
    "webp": as_file(picture(3, 64, 64), "WEBP"), "bmp": as_file(picture(4, 57, 80), "BMP"),
    "gif": as_file(picture(5, 70, 50), "GIF"), "large": as_file(picture(6, 1600, 1200), "JPEG"),
}  # fmt: skip
TALKS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in FILES}, "two": ("png", "webp"), "again": ("gif", "gif"), "text": (),
}  # fmt: skip


def part(file: bytes) -> dict[str, Any]:
    data = base64.b64encode(file).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


WRONG: list[Any] = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, {"type": "image_url", "image_url": {"url": ""}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, {"type": "image_url", "image_url": 7},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}, part(b"no picture"), part(FILES["png"][:60]),
]  # fmt: skip
PICTURES = soak_media.Medium(FILES, TALKS, part, WRONG, partial(make_checkpoint, "qwen2_5_vl"))

if __name__ == "__main__":
    sys.exit(soak_media.main(PICTURES, __doc__))

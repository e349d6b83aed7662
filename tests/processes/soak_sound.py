"""Two minutes of a random mixture on a server of a model that hears: `python tests/processes/soak_sound.py`.

A tiny Qwen2-Audio, and sounds of six formats; `soak_media.py` says what clients do. Prints what it did; exit status 1 if anything is not
so.
"""

from __future__ import annotations

import base64
import io
import sys
from functools import partial
from typing import Any

import soak_media
import soundfile
from audio_checkpoints import RATE, make_checkpoint, sound


def encoded(kind: str, subtype: str, seed: int, seconds: float, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound(seed, seconds, rate), rate, format=kind, subtype=subtype)
    return file.getvalue()


FILES = {
    "wav": encoded("WAV", "PCM_16", 1, 1.3), "wav24": encoded("WAV", "PCM_24", 2, 0.4, 8000),
    "flac": encoded("FLAC", "PCM_16", 3, 0.9), "ogg": encoded("OGG", "VORBIS", 4, 0.7, 44_100),
    "opus": encoded("OGG", "OPUS", 5, 0.6, 48_000), "mp3": encoded("MP3", "MPEG_LAYER_III", 6, 0.8),
}  # fmt: skip
TALKS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in FILES}, "two": ("wav", "flac"), "again": ("ogg", "ogg"), "text": (),
}  # fmt: skip
WRONG: list[Any] = [
    {"type": "input_audio", "input_audio": {"data": "@@@"}}, {"type": "input_audio", "input_audio": {"data": ""}},
    {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/x"}}, {"type": "audio_url", "audio_url": 7},
    {"type": "input_audio", "input_audio": {"data": base64.b64encode(encoded("FLAC", "PCM_16", 7, 9.0)).decode()}},
    {"type": "input_audio", "input_audio": {"data": base64.b64encode(encoded("WAV", "PCM_16", 7, 0.0)).decode()}},
]  # fmt: skip


def part(file: bytes) -> dict[str, Any]:
    data = base64.b64encode(file).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


SOUND = soak_media.Medium(FILES, TALKS, part, WRONG, partial(make_checkpoint, "qwen2_audio"))

if __name__ == "__main__":
    sys.exit(soak_media.main(SOUND, __doc__))

"""The sound of a load for /v1/audio/transcriptions: files of a folder, or tones that the seed decides; and its requests.

Knows files, forms and the events of transcriptions. Does not know when a request is sent.
"""

from __future__ import annotations

import contextlib
import io
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.serve.endpoints import KINDS, BenchPrompt, Kind, StreamEvent
from quire.errors import ConfigError

RATE = 16_000
BOUNDARY = "quire-bench-7d1f0c4e"
SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".mp4", ".webm")


def random_sounds(count: int, seconds: float, ratio: float, seed: int) -> list[BenchPrompt]:
    """WAV files of about this length."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        own = seconds * draw.uniform(1 - ratio, 1 + ratio)
        found.append(BenchPrompt("", 0, 0, tones(own, draw.getrandbits(32)), own))
    return found


def tones(seconds: float, seed: int) -> bytes:
    """A WAV file of four tones a second, with noise and pauses."""
    draw = np.random.default_rng(seed)
    count = max(1, int(seconds * RATE))
    pieces = max(1, int(4 * seconds))
    pitch = np.repeat(draw.uniform(100, 3000, pieces), -(-count // pieces))[:count]
    level = np.repeat(draw.choice([0.0, 0.2, 0.4], pieces), -(-count // pieces))[:count]
    wave_N = level * np.sin(2 * np.pi * pitch * np.arange(count) / RATE)
    wave_N += 0.01 * draw.standard_normal(count)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((wave_N.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def sounds_of(path: Path, count: int, seed: int, shuffle: bool) -> list[BenchPrompt]:
    """The files of a folder, or one file. Raises ConfigError: there are none."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.suffix.lower() in SUFFIXES and file.is_file()]
    if not files:
        raise ConfigError(f"--dataset-path {path}: no sound files ({', '.join(SUFFIXES)})")
    if shuffle:
        random.Random(seed).shuffle(files)
    read = [
        BenchPrompt(file.name, 0, 0, data := file.read_bytes(), length_of(data)) for file in files
    ]
    return [read[index % len(read)] for index in range(count)]


def length_of(data: bytes) -> float:
    """Seconds of a WAV file; of others by libsndfile, if it is installed; 0: unknown."""
    with contextlib.suppress(wave.Error, EOFError), wave.open(io.BytesIO(data)) as file:
        return file.getnframes() / file.getframerate()
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        import soundfile

        return float(soundfile.info(io.BytesIO(data)).duration)
    return 0.0


def form_of(prompt: BenchPrompt, fields: dict[str, Any]) -> tuple[bytes, str]:
    """(body, content type) of the form that asks for a stream."""
    given = {"stream": "true", "stream_format": "vllm", "stream_include_usage": "true", **fields}
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in given.items()
    ]
    name = prompt.text or "a.wav"
    parts.append(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode())  # fmt: skip
    parts += [prompt.sound, f"\r\n--{BOUNDARY}--\r\n".encode()]
    return b"".join(parts), f"multipart/form-data; boundary={BOUNDARY}"


def read_transcription(event: dict[str, Any]) -> StreamEvent:
    """An event of OpenAI's stream, or a chunk of vLLM's."""
    error = event.get("error")
    if error:
        return StreamEvent(error=str(error.get("message", error)) if isinstance(error, dict) else str(error))  # fmt: skip
    if (kind := event.get("type")) is not None:
        text = event.get("delta") or "" if kind == "transcript.text.delta" else ""
        return StreamEvent(text, True)
    choices = event.get("choices") or []
    text = "".join((choice.get("delta") or {}).get("content") or "" for choice in choices)
    return StreamEvent(text, bool(choices), event.get("usage"))


AUDIO = "openai-audio"
ALL_KINDS = {
    **KINDS,
    AUDIO: Kind(
        "/v1/audio/transcriptions", lambda text: {}, "", read_transcription, False, form_of
    ),
}

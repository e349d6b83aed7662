"""Sound of requests, from the bytes of a file to samples and spectrograms.

Knows limits, threads and the sound processes. Does not know HTTP routes, models or the engine.

Shape suffixes: N samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from quire import env
from quire.errors import QueueFull
from quire.frontend.media.errors import refused
from quire.frontend.media.sound_processes import SoundProcesses
from quire.frontend.media.wav import write_wav
from quire.protocol.tensor_data import TensorData

MOST_WAITING = 256  # files and windows of all requests that wait for a process
RATE = 16_000
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sound:
    """A decoded file: samples of one channel, RATE a second. `cuts`: the first sample of each window."""

    digest: str
    samples_N: np.ndarray
    cuts: list[int]

    @property
    def seconds(self) -> float:
        return len(self.samples_N) / RATE


class SoundInputs:
    """One for each frontend. The async functions are for its event loop; all else may be called from any thread."""

    def __init__(self) -> None:
        self.processes = SoundProcesses()
        self._threads = ThreadPoolExecutor(self.processes.count, "sound")
        self._waiting = 0

    def prepare(self) -> None:
        """Start a process before the first file comes; does not wait for it."""
        self.submit(self.processes.prepare)

    def submit(self, call: Callable[[], object]) -> None:
        """Run it in a thread, and do not wait for it."""
        self._threads.submit(call)

    async def load(self, data: bytes, where: str, window: int = 0) -> Sound:
        """Decode a file. `window`: samples between two cuts, at most; 0: none.

        Raises:
            ValidationError: it cannot be used. QueueFull: too much waits.
        """
        found: Sound = await self.in_thread(self.read, data, where, window)
        return found

    async def spectrogram(
        self, samples_N: np.ndarray, mels: int, frames: int, where: str
    ) -> TensorData:
        """As `SoundProcesses.spectrogram`. Raises QueueFull: too much waits."""
        make = self.processes.spectrogram
        mel: TensorData = await self.in_thread(make, samples_N, mels, frames, where)
        return mel

    def read(self, data: bytes, where: str, window: int = 0) -> Sound:
        """As `load`. Blocks."""
        most = int(env.get("MAX_AUDIO_CLIP_FILESIZE_MB"))
        if len(data) > most * MIB:
            raise refused(where, f"the file has {len(data)} bytes; the limit is {most} MiB (QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB)")  # fmt: skip
        decoded = self.processes.read(data, where, RATE, window)
        samples_N = np.frombuffer(decoded.samples.data, np.float32)
        digest = blake2b(data, digest_size=20, person=b"quire sound").hexdigest()
        return Sound(digest, samples_N, decoded.cuts)

    async def in_thread(self, call: Any, *args: Any) -> Any:
        """The result of a call. Raises QueueFull: too much waits."""
        if self._waiting >= MOST_WAITING:
            raise QueueFull(f"{self._waiting} pieces of sound wait to be decoded; try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
        finally:
            self._waiting -= 1


def as_file(source: Any, where: str) -> bytes:
    """Sound of a program as a WAV file: bytes of a file as they are; an array of samples [N] or [C, N]; or (array, rate).

    Raises:
        ValidationError: another object.
    """
    if isinstance(source, bytes):
        return source
    rate: Any = RATE
    if isinstance(source, tuple) and len(source) == 2:
        source, rate = source
    if hasattr(source, "detach"):  # a tensor
        source = source.detach().cpu().numpy()
    try:
        samples = np.asarray(source, np.float32) if not isinstance(source, str) else None
        rate = int(rate)
    except (TypeError, ValueError):
        samples = None
    if samples is None or samples.ndim not in (1, 2) or not 0 < rate < 1 << 32:
        raise refused(where, "must be an array of samples, or (array, samples a second)")
    if samples.ndim == 2:
        samples = samples.mean(0)
    return write_wav(samples, rate)

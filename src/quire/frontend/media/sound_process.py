"""A program that decodes sound of strangers, and makes spectrograms of it; it may be killed at any time.

Runs `python -m quire.frontend.media.sound_process FD`. The kernel ends it when it exceeds its processor time for a message
(ITIMER_PROF) or its memory (RLIMIT_AS). The first bytes of a file decide which library sees it, if any. Seconds and bytes are
counted while it is decoded: what a header says is not believed.

Shape suffixes: N samples, C channels.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.frontend.media.log_mel import log_mel, quiet_cuts
from quire.frontend.media.process_limits import limit_memory
from quire.frontend.media.sound_messages import (
    BeginSound,
    Decode,
    Decoded,
    SoundReady,
    SoundRefused,
    Transform,
    Transformed,
    Why,
    decode,
    encode,
)
from quire.frontend.media.wav import NotWav, is_wav, read_wav
from quire.processes.child import leave_signals_to_parent
from quire.processes.isolated_child import ProcessEnded, receive, send
from quire.protocol.tensor_data import TensorData

RATES = range(1000, 768_001)
BLOCK = 1 << 16  # frames that a library decodes at once


def serve(pipe: socket.socket) -> None:
    """Answer messages until the socket closes or a limit ends this process."""
    leave_signals_to_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ProcessEnded):
        begin: BeginSound = decode(receive(pipe))
        limit_memory(begin.memory)
        send(pipe, encode(SoundReady()))
        while True:
            job: Decode | Transform = decode(receive(pipe))
            signal.setitimer(signal.ITIMER_PROF, job.cpu_s)
            send(pipe, encode(answer_to(job)))
            signal.setitimer(signal.ITIMER_PROF, 0)


class CannotRead(Exception):
    """See `SoundRefused`."""

    def __init__(self, why: Why, detail: str = ""):
        super().__init__(why)
        self.refused = SoundRefused(why, detail)


def answer_to(job: Decode | Transform) -> Decoded | Transformed | SoundRefused:
    try:
        return transformed(job) if isinstance(job, Transform) else decoded(job)
    except CannotRead as error:
        return error.refused
    except MemoryError:
        return SoundRefused("memory")
    except Exception:  # a decoder may raise anything on a damaged file
        return SoundRefused("broken")


def transformed(job: Transform) -> Transformed:
    samples_N = np.frombuffer(job.samples.data, np.float32)
    return Transformed(as_data(log_mel(samples_N, job.mels, job.frames)))


def decoded(job: Decode) -> Decoded:
    file = opened(job.data)
    if file.rate not in RATES:
        raise CannotRead("broken")
    if file.says > job.seconds * file.rate:
        raise CannotRead("seconds", f"{file.says / file.rate:.1f}")
    parts = list(resampled(file, bounded(file, job), job.rate))
    samples_N = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if not len(samples_N):
        raise CannotRead("empty")
    cuts = quiet_cuts(samples_N, job.window) if job.window else []
    return Decoded(as_data(samples_N), cuts, file.rate, file.channels)


def as_data(array: np.ndarray) -> TensorData:
    array = np.ascontiguousarray(array, np.float32)
    return TensorData("float32", array.shape, array.reshape(-1).view(np.uint8).data)


@dataclass(frozen=True, slots=True)
class SoundFile:
    """`says`: frames by the header; 0: it does not say. `blocks`: float32 [N, C]."""

    rate: int
    channels: int
    says: int
    blocks: Iterator[np.ndarray]


def bounded(file: SoundFile, job: Decode) -> Iterator[np.ndarray]:
    """samples_N of one channel, the mean of all. Raises CannotRead: too many."""
    frames, most = 0, job.seconds * file.rate
    for block_NC in file.blocks:
        frames += len(block_NC)
        if frames > most:
            raise CannotRead("seconds", f"more than {job.seconds:g}")
        if 4 * frames * file.channels > job.most_bytes:
            raise CannotRead("bytes")
        mono_N = block_NC[:, 0] if file.channels == 1 else block_NC.mean(1, dtype=np.float32)
        yield np.nan_to_num(mono_N, posinf=1.0, neginf=-1.0).astype(np.float32, copy=False)


def resampled(file: SoundFile, parts: Iterator[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    if file.rate == rate:
        yield from parts
        return
    try:
        import soxr
    except ImportError:
        raise CannotRead("extra", f"sound of {file.rate} Hz") from None
    stream = soxr.ResampleStream(file.rate, rate, 1, dtype="float32")
    for part_N in parts:
        yield stream.resample_chunk(part_N)
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


# -- formats --------------------------------------------------------------------------------------
def opened(data: bytes) -> SoundFile:
    """The file, of which nothing is decoded yet. Raises CannotRead: no known format, or a package is missing."""
    name = kind_of(data)
    if name == "WAV":
        try:
            wav = read_wav(data)
        except NotWav:
            raise CannotRead("broken") from None
        return SoundFile(wav.rate, wav.channels, wav.num_frames, wav.blocks())
    try:
        if name in ("FLAC", "OGG", "MP3"):
            return by_soundfile(data, name)
        if name in ("MP4", "WebM"):
            return by_av(data, name)
    except (ImportError, OSError):  # OSError: the library that a package loads is missing
        raise CannotRead("extra", f"{name} files") from None
    raise CannotRead("format")


def kind_of(data: bytes) -> str:
    """By its first bytes; empty: unknown."""
    if is_wav(data):
        return "WAV"
    if data[:4] == b"fLaC":
        return "FLAC"
    if data[:4] == b"OggS":
        return "OGG"
    if data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] and data[1] & 0xE6 == 0xE2):
        return "MP3"
    if data[4:8] == b"ftyp":
        return "MP4"
    return "WebM" if data[:4] == b"\x1a\x45\xdf\xa3" else ""


def by_soundfile(data: bytes, name: str) -> SoundFile:
    import soundfile

    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.SoundFileError:
        raise CannotRead("broken") from None
    if file.format not in ("FLAC", "OGG", "MP3", "MPEG"):
        raise CannotRead("broken")

    def blocks() -> Iterator[np.ndarray]:
        while len(block_NC := file.read(BLOCK, dtype="float32", always_2d=True)):
            yield block_NC

    says = file.frames if 0 < file.frames < 1 << 62 else 0
    return SoundFile(file.samplerate, file.channels, says, blocks())


def by_av(data: bytes, name: str) -> SoundFile:
    import av

    av.logging.set_level(av.logging.PANIC)
    container: Any = av.open(io.BytesIO(data), format="mp4" if name == "MP4" else "matroska")
    if not container.streams.audio:
        raise CannotRead("empty")
    stream = container.streams.audio[0]
    plain = av.AudioResampler(format="fltp")  # same rate and channels, as floats

    def blocks() -> Iterator[np.ndarray]:
        for frame in container.decode(stream):
            for part in plain.resample(frame):
                if part.layout.nb_channels != channels or part.sample_rate != rate:
                    raise CannotRead("broken")
                yield part.to_ndarray().T

    rate, channels = stream.codec_context.sample_rate, stream.codec_context.layout.nb_channels
    return SoundFile(int(rate), int(channels), 0, blocks())


if __name__ == "__main__":
    os.nice(5)  # sound of one client does not delay the tokens of others
    serve(socket.socket(fileno=int(sys.argv[1])))

"""Frames of a video file: opened by PyAV, counted before any is decoded, and sampled evenly with the first and the last.

Runs in a picture process, which may be killed at any time. Knows two containers and a few codecs. Does not know models.

Shape suffixes: H height, W width, C colours.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4"})
MOST_FRAMES = 1 << 17  # of a file: half an hour at 60 a second
DEFAULT_FPS = 24.0
PACKED = b"quire frames "


class UnreadVideo(Exception):
    """The file is no video that is read here: "format", "broken", or "frames" (too many)."""


@dataclass(frozen=True, slots=True)
class Video:
    """Sampled frames. `indices`: of these in the file; `fps`: of the file."""

    frames: list[np.ndarray]
    indices: list[int]
    fps: float


def container_of(file: bytes | bytearray) -> str:
    """The name of the container's demuxer; empty: another kind of file. No other demuxer is tried: some open further files."""
    if file[4:8] == b"ftyp":
        return "mp4"
    return "matroska" if file[:4] == b"\x1a\x45\xdf\xa3" else ""


def sampled(total: int, count: int) -> list[int]:
    """`count` of `total` frames at even distances, the first and the last among them; all, if there are fewer."""
    places = np.linspace(0, total - 1, min(total, count))
    return [int(place) for place in places.round()]


def read_video(file: bytes | bytearray, num_frames: int, max_pixels: int) -> Video:
    """At most `num_frames` frames. `max_pixels`: of each.

    Raises:
        UnreadVideo. And what PyAV raises for damaged files.
    """
    data = bytes(file)
    if data.startswith(PACKED):
        return _unpacked(data, num_frames, max_pixels)
    kind = container_of(data)
    if not kind:
        raise UnreadVideo("format")
    import av

    total, fps = _measured(av, data, kind, max_pixels)
    wanted = sampled(total, num_frames)
    found: dict[int, np.ndarray] = {}
    with av.open(io.BytesIO(data), format=kind) as container:
        for index, frame in enumerate(_decoded(container, max_pixels)):
            if index in wanted:
                found[index] = frame.to_ndarray(format="rgb24")
            if index >= wanted[-1]:
                break
    indices = [
        index for index in wanted if index in found
    ]  # a file may promise more frames than it has
    if not indices:
        raise UnreadVideo("broken")
    return Video([found[index] for index in indices], indices, fps)


def packed_frames(frames_NHWC: np.ndarray, fps: float) -> bytes:
    """Frames of a program, for a picture process."""
    count, height, width, _ = frames_NHWC.shape
    return PACKED + struct.pack("<IIId", count, height, width, fps) + frames_NHWC.tobytes()


def _unpacked(data: bytes, num_frames: int, max_pixels: int) -> Video:
    offset = len(PACKED) + struct.calcsize("<IIId")
    count, height, width, fps = struct.unpack("<IIId", data[len(PACKED) : offset])
    if height * width > max_pixels:
        raise UnreadVideo("pixels")
    if (
        len(data) - offset != count * height * width * 3
        or not 0 < fps < 1e6
        or not count * height * width
    ):
        raise UnreadVideo("broken")
    frames_NHWC = np.frombuffer(data, np.uint8, offset=offset).reshape(count, height, width, 3)
    indices = sampled(count, num_frames)
    return Video([frames_NHWC[index] for index in indices], indices, fps)


def _measured(av: Any, data: bytes, kind: str, max_pixels: int) -> tuple[int, float]:
    """The number of frames, and how many there are in a second, without decoding."""
    with av.open(io.BytesIO(data), format=kind) as container:
        stream = _stream(container, max_pixels)
        total, base = 0, stream.time_base or Fraction(1, 1000)
        first = last = None
        for packet in container.demux(stream):
            if not packet.size:
                continue
            if (total := total + 1) > MOST_FRAMES:
                raise UnreadVideo("frames")
            if packet.pts is not None:
                first = packet.pts if first is None else min(first, packet.pts)
                last = packet.pts if last is None else max(last, packet.pts)
        if not total:
            raise UnreadVideo("broken")
        seconds = 0.0 if last is None or first is None else float((last - first) * base)
        return total, (total - 1) / seconds if seconds > 0 else DEFAULT_FPS


def _stream(container: Any, max_pixels: int) -> Any:
    if not container.streams.video:
        raise UnreadVideo("format")
    stream = container.streams.video[0]
    context = stream.codec_context
    if context.name not in CODECS and stream.codec.canonical_name not in CODECS:
        raise UnreadVideo("format")
    if context.width * context.height > max_pixels:
        raise UnreadVideo("pixels")
    context.thread_count = 1
    return stream


def _decoded(container: Any, max_pixels: int) -> Iterator[Any]:
    for frame in container.decode(_stream(container, max_pixels)):
        if frame.width * frame.height > max_pixels:  # sizes may change within a file
            raise UnreadVideo("pixels")
        yield frame

"""Sound files of all formats are decoded within limits, and damaged ones are refused; each in a process of its own."""

from __future__ import annotations

import io
import random
import struct
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import transformers
import whisper_checkpoint as whisper

from quire.errors import ValidationError
from quire.frontend.media import sound_process
from quire.frontend.media.log_mel import log_mel, quiet_cuts
from quire.frontend.media.sound_inputs import SoundInputs, as_file
from quire.frontend.media.sound_messages import Decode, Decoded, SoundRefused
from quire.frontend.media.sound_processes import SoundProcesses
from quire.frontend.media.wav import A_LAW, MU_LAW, NotWav, as_floats, read_wav, write_wav

RATE = 16_000


@pytest.fixture(scope="module")
def processes() -> Iterator[SoundProcesses]:
    made = SoundProcesses(1)
    yield made
    made.close()


def pcm(samples: np.ndarray, rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    """A WAV file of whole numbers, by the standard library."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        scaled = np.round(samples.astype(np.float64) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
        if width == 1:
            scaled += 128
        whole = scaled.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
        out.writeframes(whole.tobytes())
    return file.getvalue()


def encoded(name: str, samples: np.ndarray, rate: int = RATE) -> bytes:
    """By libsndfile, or by FFmpeg."""
    file = io.BytesIO()
    if name in ("FLAC", "OGG", "MP3"):
        soundfile.write(file, samples, rate, format=name)
    elif name == "OPUS":
        soundfile.write(file, samples, rate, format="OGG", subtype="OPUS")
    else:
        _by_ffmpeg(file, name, samples, rate)
    return file.getvalue()


def _by_ffmpeg(file: io.BytesIO, name: str, samples: np.ndarray, rate: int) -> None:
    import av

    container, codec = ("mp4", "aac") if name == "MP4" else ("webm", "libopus")
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), "fltp", "mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(stream.format, "mono", rate, stream.frame_size or 960)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))


def job(data: bytes, **more: float) -> Decode:
    given = {"seconds": 600.0, "most_bytes": 1 << 28, "window": 0, "cpu_s": 10.0, **more}
    return Decode(data, RATE, **given)  # type: ignore[arg-type]


def samples_of(data: bytes, **more: float) -> np.ndarray:
    found = sound_process.answer_to(job(data, **more))
    assert isinstance(found, Decoded), found
    return np.frombuffer(found.samples.data, np.float32)


def why(data: bytes, **more: float) -> tuple[str, str]:
    found = sound_process.answer_to(job(data, **more))
    assert isinstance(found, SoundRefused), found
    return found.why, found.detail


# -- WAV --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_of_whole_numbers(width: int) -> None:
    given = whisper.sound(0.3, 1)
    found = samples_of(pcm(given, width=width))
    assert len(found) == len(given)
    assert np.abs(found - given).max() < 2.0 / 2 ** (8 * width - 1) + 1e-6
    if width > 1:
        reference, _ = soundfile.read(io.BytesIO(pcm(given, width=width)), dtype="float32")
        assert (found == reference).all()


@pytest.mark.parametrize("subtype", ["FLOAT", "DOUBLE", "ALAW", "ULAW"])
def test_wav_of_other_numbers(subtype: str) -> None:
    given, file = whisper.sound(0.3, 2), io.BytesIO()
    soundfile.write(file, given, RATE, format="WAV", subtype=subtype)
    reference, _ = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    assert np.abs(samples_of(file.getvalue()) - reference).max() < 1e-6


def test_every_code_of_the_laws() -> None:
    for kind, subtype in ((A_LAW, "ALAW"), (MU_LAW, "ULAW")):
        file = io.BytesIO()
        soundfile.write(file, np.zeros(256), 8000, format="WAV", subtype=subtype)
        data = bytearray(file.getvalue())
        data[-256:] = bytes(range(256))
        reference, _ = soundfile.read(io.BytesIO(bytes(data)), dtype="float32")
        assert (as_floats(memoryview(bytes(range(256))), kind, 8) == reference).all()


def test_an_extensible_header_and_other_chunks() -> None:
    given, file = whisper.sound(0.1, 3), io.BytesIO()
    soundfile.write(file, given, RATE, format="WAVEX", subtype="PCM_24")
    reference, _ = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    assert (samples_of(file.getvalue()) == reference).all()
    plain = pcm(given)
    odd = plain[:12] + b"LIST" + struct.pack("<I", 3) + b"abc\0" + plain[12:]
    assert (samples_of(odd) == samples_of(plain)).all()


def test_a_stream_whose_header_has_no_length() -> None:
    plain = pcm(whisper.sound(0.1, 3))
    for length in (0, 0xFFFFFFFF, 1 << 30):
        streamed = plain[:40] + struct.pack("<I", length) + plain[44:]
        assert (samples_of(streamed) == samples_of(plain)).all()


def test_channels_are_mixed_and_rates_changed() -> None:
    given = np.stack([whisper.sound(0.5, seed, 8000) for seed in range(6)], 1)
    found = samples_of(pcm(given, 8000, channels=6))
    mono = np.mean([samples_of(pcm(given[:, one], 8000), seconds=600.0) for one in range(6)], 0)
    assert len(found) == 8000
    assert np.abs(found - mono).max() < 1e-3
    reference = soxr.resample(given[:, 0].astype(np.float32), 8000, RATE)
    assert np.abs(samples_of(write_wav(given[:, 0], 8000)) - reference).max() < 1e-5


@pytest.mark.parametrize(
    "data",
    [
        b"RIFF\x04\0\0\0WAVE", b"RIFF\x04\0\0\0WAVEdata\x10\0\0\0", pcm(np.zeros(9))[:30],
        pcm(np.zeros(9)).replace(b"\x01\x00\x01\x00", b"\x02\x00\x01\x00", 1),
        pcm(np.zeros(9)).replace(b"\x01\x00\x01\x00", b"\x01\x00\x00\x00", 1),
        pcm(np.zeros(9), 1), pcm(np.zeros(9), 999),
    ],
)  # fmt: skip
def test_damaged_wav(data: bytes) -> None:
    assert why(data)[0] == "broken"


# -- other formats ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["FLAC", "OGG", "OPUS", "MP3", "MP4", "WebM"])
def test_other_formats(name: str) -> None:
    rate = 48_000 if name in ("OPUS", "MP4", "WebM") else RATE
    time = np.arange(rate) / rate
    given = (0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    found = samples_of(encoded(name, given, rate))
    assert abs(len(found) - RATE) < 3000  # codecs add some silence
    middle = found[4000:12_000]
    spectrum = np.abs(np.fft.rfft(middle))
    assert abs(spectrum.argmax() * RATE / len(middle) - 440) < 3
    assert 0.35 < np.abs(middle).max() < 0.75


@pytest.mark.parametrize(("name", "codec"), [("mp4", "aac"), ("matroska", "libopus")])
def test_the_sound_of_a_video(name: str, codec: str) -> None:
    """Its pictures come first in the file, and are not decoded. Without a sound track it is no sound."""
    import av

    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)).astype(np.float32)
    for has_sound in (True, False):
        file = io.BytesIO()
        with av.open(file, "w", format=name) as out:
            pictures: Any = out.add_stream("mpeg4", rate=10)
            pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
            if has_sound:
                track = out.add_stream(codec, rate=48_000, layout="stereo")
            for n in range(10):
                picture = np.full((48, 64, 3), 20 * n, np.uint8)
                out.mux(pictures.encode(av.VideoFrame.from_ndarray(picture)))
            out.mux(pictures.encode(None))
            if has_sound:
                frame = av.AudioFrame.from_ndarray(np.stack([tone, tone]), "fltp", "stereo")
                frame.sample_rate = 48_000
                resampler = av.AudioResampler(
                    track.format, "stereo", 48_000, track.frame_size or 960
                )
                for part in [*resampler.resample(frame), *resampler.resample(None)]:
                    out.mux(track.encode(part))
                out.mux(track.encode(None))
        if has_sound:
            middle = samples_of(file.getvalue())[4000:12_000]
            assert abs(np.abs(np.fft.rfft(middle)).argmax() * RATE / len(middle) - 440) < 3
        else:
            assert why(file.getvalue())[0] == "empty"


@pytest.mark.parametrize("name", ["FLAC", "MP3", "MP4", "WebM"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(name, np.zeros(48_000, np.float32), 48_000)
    for package in ("soundfile", "av"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    assert why(data) == ("extra", f"{name} files")
    monkeypatch.setitem(__import__("sys").modules, "soxr", None)
    assert why(pcm(np.zeros(99), 8000)) == ("extra", "sound of 8000 Hz")


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x89PNG\r\n\x1a\n" + bytes(99), b"FORM\0\0\0\0AIFF"]
)
def test_other_files(data: bytes) -> None:
    assert why(data)[0] == "format"


# -- limits -----------------------------------------------------------------------------------------
def test_lengths() -> None:
    assert why(pcm(np.zeros(0)))[0] == "empty"
    assert len(samples_of(pcm(np.zeros(1)))) == 1
    assert why(pcm(np.zeros(2 * RATE + 1)), seconds=2.0) == ("seconds", "2.0")
    assert len(samples_of(pcm(np.zeros(2 * RATE)), seconds=2.0)) == 2 * RATE
    assert why(pcm(np.zeros(4000), channels=2), most_bytes=15_000)[0] == "bytes"


def test_headers_that_lie_are_not_believed() -> None:
    long = encoded("FLAC", np.zeros(4 * RATE, np.float32))
    lie = bytearray(long)
    lie[21:26] = bytes([lie[21] & 0xF0, 0, 0, 0, 1])  # STREAMINFO: one sample in all
    found = sound_process.answer_to(job(bytes(lie), seconds=2.0))
    assert isinstance(found, SoundRefused) or found.samples.shape[0] <= 2 * RATE
    assert (
        why(encoded("OPUS", np.zeros(5 * 48_000, np.float32), 48_000), seconds=2.0)[0] == "seconds"
    )


def test_a_process_that_takes_too_long_is_replaced(
    processes: SoundProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert processes.read(pcm(np.zeros(99)), "file", RATE, 0).samples.shape == (99,)
    monkeypatch.setattr("quire.frontend.media.sound_processes.CPU_S", 0.01)
    before = processes.replaced
    with pytest.raises(ValidationError, match="takes more than"):
        processes.read(write_wav(np.zeros(200 * 7919), 7919), "file", RATE, 0)
    monkeypatch.undo()
    assert processes.replaced == before + 1
    assert processes.read(pcm(np.zeros(99)), "file", RATE, 0).samples.shape == (99,)


def test_errors_name_the_remedy(processes: SoundProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_AUDIO_DECODE_DURATION_S", "1")
    with pytest.raises(
        ValidationError, match=r"has 2\.0 s; the limit is 1 \(QUIRE_MAX_AUDIO_DECODE"
    ):
        processes.read(pcm(np.zeros(2 * RATE)), "file", RATE, 0)
    with pytest.raises(ValidationError, match="send WAV, FLAC, MP3, OGG, M4A or WebM"):
        processes.read(b"text", "file", RATE, 0)
    monkeypatch.setenv("QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB", "0")
    with pytest.raises(ValidationError, match="the limit is 0 MiB"):
        SoundInputs().read(b"text", "file")


@pytest.mark.parametrize(
    ("given", "count"), [(np.zeros(7), 7), ((np.zeros(8000), 8000), 16_000), ([0.0, 1.0], 2), (np.zeros((2, 9)), 9)]
)  # fmt: skip
def test_sound_of_programs(given: object, count: int) -> None:
    assert len(samples_of(as_file(given, "x"))) == count


@pytest.mark.parametrize("given", ["a.wav", np.zeros((2, 2, 2)), (np.zeros(3), "x"), {"a": 1}])
def test_other_objects_of_programs(given: object) -> None:
    with pytest.raises(ValidationError, match="array of samples"):
        as_file(given, "x")


# -- damaged files ----------------------------------------------------------------------------------
def mutated(data: bytes, draw: random.Random) -> bytes:
    """With some bytes changed, dropped, repeated, or cut off."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(out) if draw.random() < 0.5 else min(len(out), 200))
        match draw.randrange(5):
            case 0:
                out[at] = draw.randrange(256)
            case 1:
                out[at : at + 4] = draw.choice(
                    [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"]
                )
            case 2:
                del out[at : at + draw.randint(1, 50)]
            case 3:
                out[at:at] = out[at : at + draw.randint(1, 50)]
            case 4:
                del out[max(at, 12) :]
        if len(out) < 2:
            return data[:12]
    return with_checksums(out) if data[:4] == b"OggS" else bytes(out)


def with_checksums(data: bytearray) -> bytes:
    """An Ogg file whose pages have the right checksums again, so that decoders look into them (RFC 3533)."""
    at = data.find(b"OggS")
    while at >= 0 and at + 27 <= len(data):
        count = data[at + 26]
        end = at + 27 + count + sum(data[at + 27 : at + 27 + count])
        data[at + 22 : at + 26] = b"\0\0\0\0"
        sum32 = 0
        for byte in data[at:end]:
            sum32 = (sum32 << 8) & 0xFFFFFFFF ^ OGG_TABLE[sum32 >> 24 ^ byte]
        data[at + 22 : at + 26] = struct.pack("<I", sum32)
        at = data.find(b"OggS", at + 4)
    return bytes(data)


def _table_entry(value: int) -> int:
    value <<= 24
    for _ in range(8):
        value = value << 1 ^ (0x04C11DB7 if value & 0x80000000 else 0)
    return value & 0xFFFFFFFF


OGG_TABLE = [_table_entry(value) for value in range(256)]


def attacked(processes: SoundProcesses, name: str, count: int) -> None:
    """Every mutated file is decoded or refused, and the process is there afterwards."""
    given = whisper.sound(0.4, 5, 48_000)
    whole = pcm(given, 48_000) if name == "WAV" else encoded(name, given, 48_000)
    draw, decoded = random.Random(name), 0
    for _ in range(count):
        try:
            found = processes.read(mutated(whole, draw), "file", RATE, RATE)
        except ValidationError:
            continue
        decoded += 1
        assert 0 < found.samples.shape[0] <= 600 * RATE + 1
        assert np.isfinite(np.frombuffer(found.samples.data, np.float32)).all()
    assert decoded
    good = processes.read(pcm(np.zeros(99)), "file", RATE, 0)
    assert good.samples.shape == (99,)


FORMATS = ["WAV", "FLAC", "OGG", "OPUS", "MP3", "MP4", "WebM"]


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files(processes: SoundProcesses, name: str) -> None:
    attacked(processes, name, 60)


@pytest.mark.attack
@pytest.mark.parametrize("name", FORMATS)
def test_2000_mutated_files(processes: SoundProcesses, name: str) -> None:
    attacked(processes, name, 2000)


@pytest.mark.attack
def test_an_opus_bomb_is_refused_in_time(processes: SoundProcesses) -> None:
    """An hour of silence in a small file."""
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 48_000, 1, format="OGG", subtype="OPUS") as out:
        for _ in range(60):
            out.write(np.zeros(60 * 48_000, np.float32))
    data = file.getvalue()
    assert len(data) < 1 << 21
    with pytest.raises(ValidationError, match="the limit is 600"):
        processes.read(data, "file", RATE, 0)


# -- spectrograms and cuts --------------------------------------------------------------------------
@pytest.mark.parametrize(("mels", "seconds"), [(80, 1.3), (128, 0.01), (80, 2.0)])
def test_spectrograms_are_those_of_transformers(
    processes: SoundProcesses, mels: int, seconds: float
) -> None:
    given = whisper.sound(seconds, 4)
    extractor = transformers.WhisperFeatureExtractor(feature_size=mels, chunk_length=2)
    expected = extractor(given, sampling_rate=RATE, return_tensors="np").input_features[0]
    assert np.abs(log_mel(given, mels, 200) - expected).max() < 5e-5
    sent = processes.spectrogram(given, mels, 200, "file")
    assert (
        np.frombuffer(sent.data, np.float32).reshape(sent.shape) == log_mel(given, mels, 200)
    ).all()


def test_windows_are_cut_where_it_is_quiet() -> None:
    given = np.ones(70 * RATE, np.float32)
    given[29 * RATE + 2000 : 29 * RATE + 6000] = 0.01
    given[59 * RATE : 59 * RATE + 3000] = 0.5
    cuts = quiet_cuts(given, 30 * RATE)
    assert cuts[0] == 0
    assert 29 * RATE + 2000 < cuts[1] < 29 * RATE + 6000
    assert 59 * RATE < cuts[2] < 59 * RATE + 3000
    assert all(b - a <= 30 * RATE for a, b in zip(cuts, [*cuts[1:], len(given)], strict=True))
    assert quiet_cuts(given[: 30 * RATE], 30 * RATE) == [0]


def test_wav_reader_never_reads_beyond() -> None:
    whole = pcm(whisper.sound(0.01, 1))
    for end in range(len(whole)):
        try:
            found = read_wav(whole[:end])
        except NotWav:
            assert end < 44
        else:
            assert len(found.data) <= end - 44

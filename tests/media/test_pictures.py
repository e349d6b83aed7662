"""Pictures in their processes: formats, modes and sizes, equal to Transformers' own processor; limits; and damaged files."""

from __future__ import annotations

import io
import random
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vision_checkpoints import as_file, damaged, picture

from quire.errors import ValidationError
from quire.frontend.media.media_messages import Processed
from quire.frontend.media.media_process import as_rgb, load_processor, opened
from quire.frontend.media.media_processes import MediaProcesses


@pytest.fixture(scope="module")
def llava(checkpoint: Any, processes: Any) -> MediaProcesses:
    return processes(checkpoint("llava"))


def pixels(made: Processed) -> np.ndarray:
    tensor = made.tensors["pixel_values"]
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("size", [(70, 50), (50, 70), (224, 224), (31, 400), (1, 1), (3, 90)])
def test_pixels_are_those_of_transformers_bit_for_bit(kind, size, checkpoint, same_process):
    image, path = picture(3, *size), checkpoint(kind)
    try:
        expected = load_processor(path).image_processor(
            image, return_tensors="np", input_data_format=None
        )
    except ValueError:
        expected = None  # 1 pixel: Transformers cannot tell which dimension is the colour
    if expected is None or min(size) < 4:
        array_HWC = np.asarray(image)
        expected = load_processor(path).image_processor(array_HWC, return_tensors="np", input_data_format="channels_last")  # fmt: skip
    made = same_process(path).process(as_file(image), "at")
    assert np.array_equal(pixels(made), expected["pixel_values"])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_formats(kind, llava):
    file = as_file(picture(1), kind)
    with Image.open(io.BytesIO(file)) as image:
        expected = llava.process(as_file(image.convert("RGB")), "at")
    assert np.array_equal(pixels(llava.process(file, "at")), pixels(expected))


@pytest.mark.parametrize(
    "kind", ["TIFF", "ICO", "PPM", "PCX", "TGA", "EPS", "PDF", "JPEG2000", "DDS"]
)
def test_other_formats_are_refused(kind, llava):
    with pytest.raises(ValidationError, match="PNG, JPEG, WebP, BMP or GIF"):
        llava.process(as_file(picture(1, 16, 16), kind), "at")


def test_modes():
    rgb = picture(2, 20, 10)
    assert np.array_equal(as_rgb(opened(as_file(rgb))), np.asarray(rgb))
    clear = rgb.convert("RGBA")
    clear.putalpha(0)
    assert (as_rgb(opened(as_file(clear))) == 255).all()
    grey = rgb.convert("L")
    assert np.array_equal(as_rgb(opened(as_file(grey))), np.asarray(grey.convert("RGB")))
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) << 8)
    assert np.array_equal(as_rgb(opened(as_file(deep))), np.asarray(grey.convert("RGB")))
    palette = rgb.quantize(16)
    assert np.array_equal(as_rgb(opened(as_file(palette))), np.asarray(palette.convert("RGB")))
    assert as_rgb(opened(as_file(rgb.convert("CMYK"), "JPEG"))).shape == (10, 20, 3)


def test_a_picture_is_turned_as_exif_says():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = as_rgb(opened(as_file(picture(2, 20, 10), "PNG", exif=exif)))
    assert np.array_equal(turned, np.rot90(np.asarray(picture(2, 20, 10)), -1))


def test_an_animation_gives_its_first_frame():
    first, second = picture(1, 16, 16), picture(2, 16, 16)
    file = io.BytesIO()
    first.save(file, "WEBP", save_all=True, append_images=[second], lossless=True)
    assert np.array_equal(as_rgb(opened(file.getvalue())), np.asarray(first))


# -- limits ---------------------------------------------------------------------------------------
def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG file whose header says this size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))  # fmt: skip

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_a_header_with_too_many_pixels_is_refused_before_any_is_decoded(llava):
    began, before = time.monotonic(), llava.replaced
    with pytest.raises(ValidationError, match="20000x20000 pixels; the limit"):
        llava.process(png(20_000, 20_000), "at")
    assert time.monotonic() - began < 5
    assert llava.replaced == before


def test_a_side_of_no_pixels_is_damaged(llava):
    with pytest.raises(ValidationError):
        llava.process(png(0, 10), "at")


def test_a_shape_that_the_model_refuses(checkpoint, same_process):
    with pytest.raises(ValidationError, match="other proportions"):
        same_process(checkpoint("qwen2_vl")).process(as_file(picture(1, 2, 900)), "at")


@pytest.fixture
def narrow(checkpoint: Any) -> Iterator[MediaProcesses]:
    """Processes with 40 MiB."""
    made = MediaProcesses(checkpoint("llava"), 1, 40 << 20)
    yield made
    made.close()


@pytest.mark.slow
def test_a_process_at_its_limit_of_memory_refuses_and_goes_on(narrow):
    large = as_file(Image.new("RGB", (6000, 6000)))
    with pytest.raises(ValidationError, match="MiB to decode"):
        narrow.process(large, "at")
    assert isinstance(narrow.process(as_file(picture(1)), "at"), Processed)


@pytest.mark.slow  # it starts two processes
def test_a_process_at_its_limit_of_time_is_replaced(narrow, monkeypatch):
    monkeypatch.setattr("quire.frontend.media.media_processes.CPU_S", 0.01)
    with pytest.raises(ValidationError, match="to decode: send a smaller one"):
        narrow.process(as_file(picture(1, 3000, 3000)), "at")
    assert narrow.replaced == 1
    monkeypatch.undo()
    assert isinstance(narrow.process(as_file(picture(1)), "at"), Processed)


@pytest.mark.slow
def test_a_processor_that_cannot_be_loaded_is_named_in_the_log_only(tmp_path, caplog):
    made = MediaProcesses(str(tmp_path), 1)
    with pytest.raises(ValidationError, match="the server's log says why") as caught:
        made.process(as_file(picture(1)), "at")
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(ValidationError):  # at once: no other process is started
        made.process(as_file(picture(1)), "at")


# -- damaged files --------------------------------------------------------------------------------
def check_damaged(processes: MediaProcesses, count: int, seed: int) -> tuple[int, int]:
    """(read, refused) of damaged files, each of which has one of the two ends."""
    draw, read, errors = random.Random(seed), 0, list[str]()
    files = [as_file(picture(n, 40 + n, 30), kind) for n, kind in enumerate(("PNG", "JPEG", "GIF", "WEBP", "BMP"))]  # fmt: skip
    for number in range(count):
        try:
            made = processes.process(damaged(files[number % len(files)], draw), "at")
        except ValidationError as error:
            errors.append(str(error))
            continue
        assert pixels(made).shape == (1, 3, 28, 28)
        read += 1
    assert all(text.startswith("`at`: ") and "Traceback" not in text for text in errors)
    return read, count - read


def test_damaged_files_are_read_or_refused(llava):
    read, refused = check_damaged(llava, 300, seed=1)
    assert min(read, refused) > 20


@pytest.mark.attack
def test_ten_thousand_damaged_files(llava):
    check_damaged(llava, 10_000, seed=2)
    assert isinstance(llava.process(as_file(picture(1)), "at"), Processed)

"""The processor without Transformers: equal pixels and tokens; which checkpoints have it; options of a request; when it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision_checkpoints import as_file, picture

from quire.frontend.media.media_messages import Processed
from quire.frontend.media.media_process import load_processor, processed
from quire.frontend.media.media_processes import MediaProcesses
from quire.frontend.media.plain_processor import plain_processor
from quire.models.checkpoint_locator import EMBEDDED
from quire.protocol.media import AUDIO, IMAGE
from tools.tiny_model.published import text_config
from tools.tiny_vision import export
from tools.tiny_vision.network import Eyes
from tools.tiny_vision.prompt_files import with_image_token

TINY = EMBEDDED / "quire-tiny"
OTHER = {"size": {"height": 40, "width": 24}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25], "resample": 2}  # fmt: skip


def folder_with(path: Path, file: str = "preprocessor_config", **says: Any) -> str:
    """The files of a LLaVA's processor, with other values in one of them."""
    eyes = Eyes()
    files = {
        "config": export.config(eyes, text_config(TINY)), "preprocessor_config": export.image_processor(eyes),
        "processor_config": export.processor(eyes), "tokenizer_config": json.loads((TINY / "tokenizer_config.json").read_text()),
    }  # fmt: skip
    files[file] |= says
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    (path / "tokenizer.json").write_text(with_image_token((TINY / "tokenizer.json").read_text()))
    return str(path)


def pixels(made: Processed) -> np.ndarray:
    tensor = made.tensors["pixel_values"]
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: folder_with(tmp_path_factory.mktemp(name), **says) for name, says in (("tiny", {}), ("other", OTHER))}  # fmt: skip


@pytest.fixture(scope="module")
def theirs(folders: dict[str, str]) -> dict[str, Any]:
    return {name: load_processor(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("kind", ["tiny", "other"])
@pytest.mark.parametrize("size", [(64, 64), (70, 50), (31, 400), (1000, 700), (8, 5)])
def test_pixels_and_text_are_those_of_transformers(kind: str, size: tuple[int, int], folders: dict[str, str], theirs: dict[str, Any]):  # fmt: skip
    plain = plain_processor(folders[kind], [IMAGE], {})
    assert plain is not None
    pixels_HWC = np.asarray(picture(3, *size).convert("RGB"))
    ours, expected = processed(pixels_HWC, plain), processed(pixels_HWC, theirs[kind])
    assert ours.replacement == expected.replacement
    assert (ours.width, ours.height) == size
    np.testing.assert_array_equal(pixels(ours), pixels(expected))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("preprocessor_config", {"do_center_crop": True}), ("preprocessor_config", {"do_resize": False}),
        ("preprocessor_config", {"size": {"shortest_edge": 64}}), ("preprocessor_config", {"image_mean": [0.5]}),
        ("preprocessor_config", {"size": {"height": "x", "width": 64}}), ("preprocessor_config", {"resample": 9}),
        ("preprocessor_config", {"image_processor_type": "CLIPImageProcessor"}), ("processor_config", {"patch_size": 0}),
        ("processor_config", {"processor_class": "LlavaNextProcessor"}), ("processor_config", {"image_processor": {}}),
        ("tokenizer_config", {"image_token": "<think>"}), ("tokenizer_config", {"extra_special_tokens": {"image_token": "<think>"}}),
    ],
)  # fmt: skip
def test_other_files_are_for_transformers(tmp_path: Path, file: str, says: dict[str, Any]):
    assert plain_processor(folder_with(tmp_path, file, **says), [IMAGE], {}) is None


def test_other_requests_are_for_transformers(folders: dict[str, str]):
    assert plain_processor(folders["tiny"], [IMAGE], {}) is not None
    assert plain_processor(folders["tiny"], [IMAGE, AUDIO], {}) is None
    assert plain_processor(folders["tiny"], [IMAGE], {"do_resize": False}) is None


@pytest.mark.slow
def test_its_process_starts_for_the_first_picture_and_knows_options_later(folders: dict[str, str]):  # fmt: skip
    processes = MediaProcesses(folders["tiny"], count=1)
    try:
        processes.prepare()
        assert not processes._idle
        file = as_file(picture(1, 90, 60))
        first = processes.process(file, "here")
        again = processes.process(file, "here", options={"image_mean": [0.0] * 3})
        np.testing.assert_allclose(pixels(again), pixels(first) + 1, atol=1e-6)
        np.testing.assert_array_equal(pixels(processes.process(file, "here")), pixels(first))
        assert processes.replaced == 0
    finally:
        processes.close()


def test_it_imports_neither_torch_nor_transformers():
    code = "import sys, quire.frontend.media.media_process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "PIL"} & set(done.stdout.split())

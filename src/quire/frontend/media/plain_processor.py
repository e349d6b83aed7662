"""PlainProcessor: the processor of a LLaVA with SigLIP's pictures, with Pillow and numpy alone.

A process with it begins in a fraction of a second, where Transformers takes several; so none is started before the first picture.
Its pixels are Transformers', bit for bit. Knows these processors' files. Does not know formats of pictures.

Shape suffixes: H, W pixels, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.models.json_files import read_object
from quire.protocol.media import IMAGE

USUAL: Mapping[str, Any] = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3, "rescale_factor": 1 / 255,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 224, "width": 224},
}  # fmt: skip
"""Transformers' values of what preprocessor_config.json leaves out. Files with other keys are for Transformers."""
FIXED = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
FILES = ("preprocessor_config", "processor_config", "tokenizer_config")
NAMES = {"image_processor_type": "SiglipImageProcessor", "processor_class": "LlavaProcessor"}
OF_LLAVA = {
    "processor_class",
    "patch_size",
    "vision_feature_select_strategy",
    "image_token",
    "num_additional_image_tokens",
}
FILTERS = range(6)  # of Pillow


@dataclass(frozen=True, slots=True)
class PlainProcessor:
    """Pictures are resized to one size, whatever their own.

    Attributes:
        height, width: of all pictures after it. resample: Pillow's number of a filter. factor: of a pixel's value.
        text: what replaces the placeholder of a picture.
    """

    height: int
    width: int
    resample: int
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    text: str

    def pixels(self, picture_HWC: np.ndarray) -> np.ndarray:
        """[1, C, H, W], float32, of a picture of uint8."""
        from PIL import Image

        size = (self.width, self.height)
        image = Image.fromarray(picture_HWC).resize(size, Image.Resampling(self.resample))
        found_HWC = (np.asarray(image).astype(np.float64) * self.factor).astype(np.float32)
        mean_C, std_C = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        found_HWC = (found_HWC - mean_C) / std_C
        return np.ascontiguousarray(found_HWC.transpose(2, 0, 1)[None])


def plain_processor(
    folder: str, kinds: Sequence[str], options: Mapping[str, Any]
) -> PlainProcessor | None:
    """The plain processor of a checkpoint; None: the checkpoint has another kind of processor, so Transformers processes its pictures.

    `kinds`: of media that the model takes. `options`: that the server sets, which only Transformers knows.
    """
    if options or list(kinds) != [IMAGE]:
        return None
    try:
        pictures, whole, tokenizer = (read_object(Path(folder) / f"{name}.json") for name in FILES)
    except ConfigError:  # who loads the processor says what is wrong
        return None
    if whole.keys() - OF_LLAVA or any(file.get(key) != NAMES[key] for file, key in ((pictures, "image_processor_type"), (whole, "processor_class"))):  # fmt: skip
        return None
    # The tokenizer may name the image token. Transformers then ignores the image token that the processor names.
    if "image_token" in tokenizer or "image_token" in (tokenizer.get("extra_special_tokens") or {}):
        return None
    return _read({key: value for key, value in pictures.items() if key not in NAMES}, whole)


def _read(pictures: Mapping[str, Any], whole: Mapping[str, Any]) -> PlainProcessor | None:
    """From the files of the two processors; None: a value is not of the usual kind."""
    says = {**USUAL, **pictures}
    try:
        size, patch = says["size"], int(whole["patch_size"])
        height, width, resample = int(size["height"]), int(size["width"]), int(says["resample"])
        rows = (height // patch) * (width // patch) + int(whole.get("num_additional_image_tokens", 0))  # fmt: skip
        rows -= whole.get("vision_feature_select_strategy") == "default"
        mean, std = (tuple(map(float, says[key])) for key in ("image_mean", "image_std"))
        factor = float(says["rescale_factor"])
    except (TypeError, ValueError, KeyError, ZeroDivisionError):
        return None
    usual = all(says[key] is True for key in FIXED) and says.keys() == USUAL.keys()
    if not usual or len(size) != 2 or min(height, width, rows) < 1:
        return None
    if len(mean) != 3 or len(std) != 3 or resample not in FILTERS:
        return None
    text = str(whole.get("image_token", "<image>")) * rows
    return PlainProcessor(height, width, resample, factor, mean, std, text)

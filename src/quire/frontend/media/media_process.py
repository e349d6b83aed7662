"""A program that decodes pictures, videos and sound of strangers and processes them for the model; it may be killed at any time.

Runs `python -m quire.frontend.media.media_process FD`. The kernel ends it when it exceeds its processor time for a file
(ITIMER_PROF) or its memory (RLIMIT_AS). A header is read before any pixel. Pillow reads few formats here. The processor of
Transformers gets arrays only, never URLs, and code of the checkpoint is not run.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from quire.frontend.media.llama4_pictures import Llama4Pictures
from quire.frontend.media.media_messages import (
    Hear,
    LoadProcessor,
    Process,
    Processed,
    Ready,
    Refused,
    decode,
    encode,
)
from quire.frontend.media.plain_processor import PlainProcessor, plain_processor
from quire.frontend.media.process_limits import limit_memory
from quire.frontend.media.sound_messages import Decode, Decoded, SoundRefused
from quire.frontend.media.sound_process import answer_to as sound_answer
from quire.frontend.media.sound_tensors import prepare_for_sound, rate_of, sound_tensors
from quire.models.json_files import read_object
from quire.models.vision import image_settings
from quire.processes.child import leave_signals_to_parent
from quire.processes.isolated_child import ProcessEnded, receive, send
from quire.protocol.media import AUDIO, IMAGE
from quire.protocol.tensor_data import ITEMSIZE, TensorData

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
NOT_FOR_VIDEOS = "videos are not supported"
WHITE = (255, 255, 255, 255)


def serve(pipe: socket.socket) -> None:
    """Answer messages until the socket closes or a limit ends this process."""
    leave_signals_to_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ProcessEnded):
        prepare: LoadProcessor = decode(receive(pipe))
        try:
            processor = first_processor(prepare)
            if unknown := unknown_options(prepare.options, processor):
                raise LookupError(f"mm_processor_kwargs: the processor has no {unknown}")
        except Exception as error:
            send(pipe, encode(Ready(f"{type(error).__name__}: {error}"[:500])))
            return
        limit_memory(prepare.memory)
        send(pipe, encode(Ready()))
        while True:
            job: Process | Hear = decode(receive(pipe))
            file = receive(pipe)
            signal.setitimer(signal.ITIMER_PROF, job.cpu_s)
            send(pipe, encode(answer_to(job, file, processor)))
            signal.setitimer(signal.ITIMER_PROF, 0)


def first_processor(asked: LoadProcessor) -> Any:
    """Transformers', or one that begins sooner, and knows no options of requests."""
    plain = plain_processor(asked.folder, asked.kinds, asked.options) if asked.plain else None
    return plain or load_processor(asked.folder, asked.kinds, asked.tokenizer)


def load_processor(folder: str, kinds: Sequence[str] = (IMAGE,), tokenizer: str = "") -> Any:
    """The checkpoint's processor in Transformers, with its parts for these kinds. That for videos needs further libraries.

    `tokenizer`: its folder, if that is another.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    use_pillow_for_pixtral()
    kind = processor_class(folder)
    parts: dict[str, Callable[[], Any]] = {
        "tokenizer": lambda: AutoTokenizer.from_pretrained(tokenizer or folder, local_files_only=True),
    }  # fmt: skip
    if IMAGE in kinds:
        if kind.__name__ == "Llama4Processor":
            parts["image_processor"] = lambda: Llama4Pictures(image_settings(folder))
        else:
            parts["image_processor"] = lambda: AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)  # fmt: skip
    if AUDIO in kinds:
        prepare_for_sound(kind.__name__)
        extractor = lambda: AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)  # noqa: E731
        parts |= {"feature_extractor": extractor, "audio_processor": extractor}

    # SmolVLM's processor refuses to be made without a library that only the texts of videos need.
    vars(import_module(kind.__module__)).update(num2words=NOT_FOR_VIDEOS)

    def arguments(cls: Any, *_: Any, **__: Any) -> list[Any]:
        return [parts[name]() if name in parts else None for name in cls.get_attributes()]

    own = {
        "_get_arguments_from_pretrained": classmethod(arguments),
        "check_argument_for_proper_class": lambda self, name, value: type(value),
        "__repr__": object.__repr__,  # Transformers' writes the parts as JSON
    }
    made: Any = type(kind.__name__, (kind,), own)
    return made.from_pretrained(folder, local_files_only=True)


def use_pillow_for_pixtral() -> None:
    """Transformers' processor of Pixtral takes one function from a module that needs torchvision; another module has the same."""
    models = "transformers.models.pixtral"
    twin = import_module(f"{models}.image_processing_pil_pixtral")
    sys.modules.setdefault(f"{models}.image_processing_pixtral", twin)


def processor_class(folder: str) -> Any:
    """The class of Transformers that the checkpoint's files name, or that belongs to its config.

    Raises:
        LookupError: Transformers has none.
    """
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    files = [read_object(Path(folder) / f"{name}.json") for name in ("processor_config", "preprocessor_config", "config")]  # fmt: skip
    names = [str(file.get("processor_class")) for file in files[:2]]
    names.append(str(PROCESSOR_MAPPING_NAMES.get(files[2].get("model_type"))))
    for name in names:
        for kind, processor in PROCESSOR_MAPPING_NAMES.items():
            if processor == name and (found := _class_in_module_of(kind, name)) is not None:
                return found
    raise LookupError(f"no processor of {', '.join(names)}")


def _class_in_module_of(kind: str, name: str) -> Any:
    """Not from the package, which gives a placeholder for a class whose module names torchvision."""
    module = f"transformers.models.{kind}.processing_{kind}"
    try:
        return getattr(import_module(module), name, None) if find_spec(module) else None
    except ModuleNotFoundError:  # there is no such package
        return None


# -- one file ------------------------------------------------------------------------------------
def answer_to(job: Process | Hear, file: bytes | bytearray, processor: Any) -> Processed | Refused:
    if isinstance(job, Hear):
        return answer_to_sound(job, file, processor)
    if job.num_frames:
        return answer_to_video(job, file, processor)
    if unknown := unknown_options(job.options, processor):
        return Refused("options", detail=unknown)
    width = height = 0
    try:
        image = opened(file)
        if image is None:
            return Refused("format")
        width, height = image.size
        if width * height > job.max_pixels:
            return Refused("pixels", width, height)
        pixels_HWC = as_rgb(image)
    except MemoryError:
        return Refused("memory", width, height)
    except Exception:  # a decoder may raise anything on a damaged file
        return Refused("broken", width, height)
    try:
        return processed(pixels_HWC, processor, job.options)
    except MemoryError:
        return Refused("memory", width, height)
    except Exception:  # a processor refuses some shapes, each in its own way
        return Refused("shape", width, height)


def answer_to_video(job: Process, file: bytes | bytearray, processor: Any) -> Processed | Refused:
    from quire.frontend.media.video_frames import UnreadVideo, read_video
    from quire.frontend.media.video_patches import video_tensors

    if unknown := unknown_options(job.options, processor):
        return Refused("options", detail=unknown)
    if find_spec("av") is None:
        return Refused("library")
    try:
        video = read_video(file, job.num_frames, job.max_pixels)
    except UnreadVideo as why:
        return Refused(str(why))  # type: ignore[arg-type]
    except MemoryError:
        return Refused("memory")
    except Exception:  # as of pictures
        return Refused("broken")
    height, width, _ = video.frames[0].shape
    try:
        found, text, seconds = video_tensors(video, processor, job.max_rows, job.options)
        tensors = {name: tensor_of(value) for name, value in found.items()}
    except MemoryError:
        return Refused("memory", width, height)
    except Exception:  # a processor refuses some shapes, each in its own way
        return Refused("shape", width, height)
    return Processed(width, height, text, tensors, seconds)


def unknown_options(options: dict[str, Any], processor: Any) -> str:
    """The names of those that the processor of pictures does not have."""
    pictures = getattr(processor, "image_processor", None)
    known = [] if pictures is None else pictures.valid_kwargs.__annotations__
    return ", ".join(sorted(options.keys() - {*known, "num_frames"}))


def answer_to_sound(job: Hear, file: bytes | bytearray, processor: Any) -> Processed | Refused:
    found = sound_answer(Decode(bytes(file), rate_of(processor), job.seconds, job.most_bytes, 0, job.cpu_s))  # fmt: skip
    if not isinstance(found, Decoded):
        return Refused(found.why, detail=found.detail) if isinstance(found, SoundRefused) else Refused("broken")  # fmt: skip
    samples_N = np.frombuffer(found.samples.data, np.float32)
    try:
        heard, text = sound_tensors(samples_N, processor)
        tensors = {name: tensor_of(value) for name, value in heard.items()}
    except MemoryError:
        return Refused("memory")
    except Exception:  # a processor refuses some sound, each in its own way
        return Refused("shape")
    return Processed(0, 0, text, tensors, len(samples_N) / rate_of(processor))


def opened(data: bytes | bytearray) -> Any:
    """The picture, of which only the header is read; None: none of the formats."""
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # ours is checked
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        return None


def as_rgb(image: Any) -> np.ndarray:
    """The pixels of the first frame, turned as EXIF says, on white where they are transparent: [H, W, 3], uint8."""
    from PIL import Image, ImageOps

    image.load()
    with contextlib.suppress(
        Exception
    ):  # EXIF data may be damaged in any way; then the picture is not turned
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        below = Image.new("RGBA", image.size, WHITE)
        below.alpha_composite(image)
        image = below
    return np.asarray(image.convert("RGB"))


def processed(
    pixels_HWC: np.ndarray, processor: Any, given: dict[str, Any] | None = None
) -> Processed:
    height, width, _ = pixels_HWC.shape
    if isinstance(processor, PlainProcessor):
        pixels = tensor_of(processor.pixels(pixels_HWC))
        return Processed(width, height, processor.text, {"pixel_values": pixels})
    init = getattr(processor.tokenizer, "init_kwargs", {})
    options = processor._merge_kwargs(tokenizer_init_kwargs=init)["images_kwargs"]
    options |= given or {}
    options |= {"return_tensors": "np", "input_data_format": "channels_last"}
    found, replacements = processor._process_images([pixels_HWC], **options)
    tensors = {name: tensor_of(np.asarray(value)) for name, value in found.items()}
    return Processed(width, height, replacements[0], tensors)


def tensor_of(array: np.ndarray) -> TensorData:
    wide = {
        "float64": "float32",
        "bool": "uint8",
        "uint32": "int64",
        "uint64": "int64",
        "int16": "int32",
    }
    name = wide.get(str(array.dtype), str(array.dtype))
    if name not in ITEMSIZE:
        raise ValueError(f"the processor gives numbers of type {array.dtype}")
    array = np.ascontiguousarray(array, name)
    return TensorData(name, array.shape, array.reshape(-1).view(np.uint8).data)


if __name__ == "__main__":
    os.nice(5)  # files of one client do not delay the tokens of others
    serve(socket.socket(fileno=int(sys.argv[1])))

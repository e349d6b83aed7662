"""The processes that decode and process pictures, videos and sound (`media_process.py`). Blocks: call them in a thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from quire import env
from quire.frontend.media.decoding_processes import WALL_S, DecodingProcesses
from quire.frontend.media.errors import refused
from quire.frontend.media.media_messages import (  # fmt: skip
    Hear,
    LoadProcessor,
    Process,
    Processed,
    Refused,
    decode,
    encode,
)
from quire.frontend.media.plain_processor import plain_processor
from quire.frontend.media.sound_processes import why as why_of_sound
from quire.processes.isolated_child import ProcessEnded
from quire.protocol.media import IMAGE

CPU_S = 10.0  # processor time of a picture
MEMORY = 4 << 30  # of a process, above what it needs to begin
TOO_MUCH = (
    f"the picture takes more than {CPU_S:g} s or {MEMORY >> 20} MiB to decode: send a smaller one"
)
SOUND_CPU_S = 30.0
SOUND_TOO_MUCH = f"the sound takes more than {SOUND_CPU_S:g} s or {MEMORY >> 20} MiB to decode: send a shorter one"  # fmt: skip


class MediaProcesses(DecodingProcesses):
    """`folder`: of the checkpoint. `options`: of its processor, for all requests. `kinds`: of media that it takes. `tokenizer`: its folder,
    if that is another."""

    module = "quire.frontend.media.media_process"
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # fmt: skip # noqa: RUF012
    what = "pictures and sound"

    def __init__(
        self, folder: str, count: int | None = None, memory: int = MEMORY,
        options: dict[str, Any] | None = None, kinds: Sequence[str] = (IMAGE,), tokenizer: str = "", plain: bool = True,
    ):  # fmt: skip
        super().__init__(count, memory)
        self.folder, self.options = folder, options or {}
        self.kinds, self.tokenizer = list(kinds), tokenizer
        self.plain = plain and plain_processor(folder, self.kinds, self.options) is not None
        """Their processor needs few libraries, and knows no options of requests."""

    def prepare(self) -> None:
        """As the base class, but a process that begins at once is started for the first file."""
        if not self.plain:
            super().prepare()

    @cached_property
    def _for_options(self) -> MediaProcesses:
        """Others, for requests with options."""
        others = MediaProcesses(
            self.folder, self.count, self.memory, self.options, self.kinds, self.tokenizer, plain=False
        )  # fmt: skip
        self.close = weakref.finalize(self, _call, self.close, others.close)
        return others

    def process(
        self, data: bytes | bytearray, where: str, num_frames: int = 0, max_rows: int = 0,
        options: dict[str, Any] | None = None,
    ) -> Processed:  # fmt: skip
        """The picture of a file, as the model takes it; with `num_frames` a video. Arguments as of `Process`.

        Raises:
            ValidationError: the file is no picture that this server reads, or takes too much.
        """
        if self.plain and options:
            return self._for_options.process(data, where, num_frames, max_rows, options)
        factor = 3 if num_frames else 1
        most = int(env.get("MAX_IMAGE_PIXELS"))
        message = encode(Process(most, factor * CPU_S, num_frames, max_rows, options or {}))
        return self._answer(message, data, factor * WALL_S, where, TOO_MUCH)

    def hear(self, data: bytes | bytearray, where: str, seconds: float) -> Processed:
        """The sound of a file, as the model takes it. `seconds`: the most that it may have.

        Raises:
            ValidationError: the file is no sound that this server reads, or has too much.
        """
        message = encode(Hear(seconds, int(env.get("MAX_AUDIO_DECODE_BYTES")), SOUND_CPU_S))
        return self._answer(message, data, SOUND_CPU_S + WALL_S, where, SOUND_TOO_MUCH)

    def _answer(
        self, message: bytes, data: bytes | bytearray, wall_s: float, where: str, too_much: str
    ) -> Processed:
        try:
            answer = self.ask(message, data, wall_s)
        except ProcessEnded:
            raise refused(where, too_much) from None
        if isinstance(answer, Refused):
            is_sound = too_much == SOUND_TOO_MUCH
            raise refused(where, why_no_sound(answer) if is_sound else why(answer))
        if not isinstance(answer, Processed):
            raise refused(where, "the file could not be processed")
        return answer

    def first_message(self) -> bytes:
        """See `DecodingProcesses`."""
        return encode(LoadProcessor(self.folder, self.memory, self.kinds, self.tokenizer, self.options, self.plain))  # fmt: skip

    def decode(self, answer: bytearray) -> Any:
        """See `DecodingProcesses`."""
        return decode(answer)


def _call(*functions: Callable[[], object]) -> None:
    for function in functions:
        function()


def why(answer: Refused) -> str:
    """Why a file is refused, for the client."""
    size = f"{answer.width}x{answer.height}"
    match answer.why:
        case "format":
            return (
                "this is no picture that this server reads: send PNG, JPEG, WebP, BMP or GIF (as a video_url part: MP4, WebM or"
                " Matroska with H.264, HEVC, VP8, VP9, AV1 or MPEG-4)"
            )
        case "library":
            return "videos need PyAV on the server: pip install quire[video]"
        case "frames":
            return "the video has too many frames: send a shorter one"
        case "pixels":
            return f"the picture has {size} pixels; the limit is {env.get('MAX_IMAGE_PIXELS')} in all (QUIRE_MAX_IMAGE_PIXELS): send a smaller one"
        case "shape":
            return f"the model takes no picture of {size} pixels: send one with other proportions"
        case "options":
            return (
                f"this model's processor has no {answer.detail} (mm_processor_kwargs): leave it out"
            )
        case "memory":
            return TOO_MUCH
    return "the picture is damaged, and cannot be decoded"


def why_no_sound(answer: Refused) -> str:
    """As `why`, of sound."""
    if answer.why == "shape":
        return "the model's processor refuses this sound: it may be too short"
    return SOUND_TOO_MUCH if answer.why == "memory" else why_of_sound(answer.why, answer.detail)

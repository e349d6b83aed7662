"""The processes that decode and process pictures (`media_process.py`). Blocks: call `process` in a thread."""

from __future__ import annotations

from typing import Any

from quire import env
from quire.frontend.media.decoding_processes import WALL_S, DecodingProcesses
from quire.frontend.media.errors import refused
from quire.frontend.media.media_messages import (  # fmt: skip
    LoadProcessor,
    Process,
    Processed,
    Refused,
    decode,
    encode,
)
from quire.processes.isolated_child import ProcessEnded

CPU_S = 10.0  # processor time of a picture
MEMORY = 4 << 30  # of a process, above what it needs to begin
TOO_MUCH = (
    f"the picture takes more than {CPU_S:g} s or {MEMORY >> 20} MiB to decode: send a smaller one"
)


class MediaProcesses(DecodingProcesses):
    """`folder`: of the checkpoint. `options`: of its processor, for all requests."""

    module = "quire.frontend.media.media_process"
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # fmt: skip # noqa: RUF012
    what = "pictures"

    def __init__(
        self, folder: str, count: int | None = None, memory: int = MEMORY,
        options: dict[str, Any] | None = None,
    ):  # fmt: skip
        super().__init__(count, memory)
        self.folder, self.options = folder, options or {}

    def process(
        self, data: bytes | bytearray, where: str, num_frames: int = 0, max_rows: int = 0,
        options: dict[str, Any] | None = None,
    ) -> Processed:  # fmt: skip
        """The picture of a file, as the model takes it; with `num_frames` a video. Arguments as of `Process`.

        Raises:
            ValidationError: the file is no picture that this server reads, or takes too much.
        """
        factor = 3 if num_frames else 1
        most = int(env.get("MAX_IMAGE_PIXELS"))
        message = encode(Process(most, factor * CPU_S, num_frames, max_rows, options or {}))
        try:
            answer = self.ask(message, data, factor * WALL_S)
        except ProcessEnded:
            raise refused(where, TOO_MUCH) from None
        if isinstance(answer, Refused):
            raise refused(where, why(answer))
        if not isinstance(answer, Processed):
            raise refused(where, "the picture could not be processed")
        return answer

    def first_message(self) -> bytes:
        """See `DecodingProcesses`."""
        return encode(LoadProcessor(self.folder, self.memory, self.options))

    def decode(self, answer: bytearray) -> Any:
        """See `DecodingProcesses`."""
        return decode(answer)


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

"""The processes that decode and process pictures: a few, each replaced when it was ended.

Knows processes, time and one program (`picture_process.py`). Blocks: call `process` in a thread.
"""

from __future__ import annotations

import os
import threading
import time
import weakref

import msgspec

from quire import env
from quire.errors import ValidationError
from quire.frontend.media.errors import refused
from quire.frontend.media.picture_messages import (  # fmt: skip
    LoadProcessor,
    Process,
    Processed,
    Ready,
    Refused,
    decode,
    encode,
)
from quire.logging import get_logger
from quire.processes.isolated_child import IsolatedChild, ProcessEnded

log = get_logger(__name__)

MODULE = "quire.frontend.media.picture_process"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # fmt: skip
START_S = 120.0  # to import Transformers and load the processor
CPU_S = 10.0  # processor time of a picture
WALL_S = 30.0  # other processes share the cores
MEMORY = 2 << 30  # of a process, above what it needs to begin
FAILED_START_S = 10.0  # after a process that could not begin, no other is started for this time
TOO_MUCH = (
    f"the picture takes more than {CPU_S:g} s or {MEMORY >> 20} MiB to decode: send a smaller one"
)


class PictureProcesses:
    """Thread-safe. `folder`: of the checkpoint. The first picture starts a process, unless `prepare` did."""

    def __init__(self, folder: str, count: int | None = None, memory: int = MEMORY):
        self.folder, self.memory = folder, memory
        self.count = count or max(1, (os.cpu_count() or 1) // 4)
        self.replaced = 0
        """Processes that were ended, by a limit or by a picture."""
        self._slots = threading.Semaphore(self.count)
        self._idle: list[IsolatedChild] = []
        self._failed = (0.0, "")  # when, and why, the last process could not begin
        self.close = weakref.finalize(self, _close, self._idle)

    def process(self, data: bytes, where: str) -> Processed:
        """The picture of a file, as the model takes it.

        Raises:
            ValidationError: the file is no picture that this server reads, or takes too much.
        """
        with self._slots:
            child = self._child()
            message = encode(Process(data, int(env.get("MAX_IMAGE_PIXELS")), CPU_S))
            try:
                answer = decode(child.ask(message, time.monotonic() + WALL_S))
            except (ProcessEnded, msgspec.MsgspecError):
                child.end()
                self.replaced += 1
                raise refused(where, TOO_MUCH) from None
            except BaseException:
                child.end()
                raise
            self._idle.append(child)
        if isinstance(answer, Refused):
            raise refused(where, _why(answer))
        if not isinstance(answer, Processed):
            raise refused(where, "the picture could not be processed")
        return answer

    def prepare(self) -> None:
        """Start a process, and wait for it."""
        with self._slots:
            self._idle.append(self._child())

    def _child(self) -> IsolatedChild:
        """A process that is ready. Raises ValidationError: none can be started."""
        while self._idle:
            try:
                child = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if child.process.poll() is None:
                return child
            child.end()
            self.replaced += 1
        when, why = self._failed
        if not why or time.monotonic() - when > FAILED_START_S:
            child, why = self._started()
            if not why:
                return child
            child.end()
            log.error("pictures cannot be processed: %s", why)
            self._failed = time.monotonic(), why
        raise ValidationError(
            "pictures cannot be processed now; the server's log says why: send text"
        )

    def _started(self) -> tuple[IsolatedChild, str]:
        child = IsolatedChild(MODULE, **ENVIRONMENT)
        try:
            message = encode(LoadProcessor(self.folder, self.memory))
            answer = decode(child.ask(message, time.monotonic() + START_S))
        except (ProcessEnded, msgspec.MsgspecError) as error:
            return child, f"the process ended ({error})"
        return child, answer.error if isinstance(answer, Ready) else "the process gives no answer"


def _why(answer: Refused) -> str:
    size = f"{answer.width}x{answer.height}"
    match answer.why:
        case "format":
            return "this is no picture that this server reads: send PNG, JPEG, WebP, BMP or GIF"
        case "pixels":
            return f"the picture has {size} pixels; the limit is {env.get('MAX_IMAGE_PIXELS')} in all (QUIRE_MAX_IMAGE_PIXELS): send a smaller one"
        case "shape":
            return f"the model takes no picture of {size} pixels: send one with other proportions"
        case "memory":
            return TOO_MUCH
    return "the picture is damaged, and cannot be decoded"


def _close(idle: list[IsolatedChild]) -> None:
    while idle:
        idle.pop().end()

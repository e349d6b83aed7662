"""StepRecorder: records the steps of one worker with torch.profiler, and writes a trace file.

Knows steps, torch.profiler and files. Does not know who starts and stops it. What a recording may cost is bounded: its
steps, the memory that it takes, and the number of files in the folder.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from quire.config.profiler import ProfilerOptions, check_recording
from quire.errors import ValidationError
from quire.forward_context import ForwardBatch
from quire.logging import get_logger
from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook

log = get_logger(__name__)

DEFAULT_STEPS = 1000
MOST_BYTES = (
    256 << 20
)  # of memory that a recording takes; its trace file has about as many before compression
MOST_FILES = 100


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class StepRecorder(Hook):
    """`start`, steps, `stop`: one trace file. It also ends by itself, after a number of steps or bytes."""

    name = "profiler"
    order = 0

    def __init__(self, options: ProfilerOptions, label: str, memory: Callable[[], int] = resident_bytes):  # fmt: skip
        self.options, self.label, self.memory = options, label, memory
        self.folder = Path(options.torch_profiler_dir)
        self.wanted = False
        """Between `start` and the end of the recording."""
        self.prefix, self.skipped, self.left = "", 0, 0
        self.profile: profile | None = None
        self.step: record_function | None = None
        self.before_bytes = 0
        self.thread = 0
        """That which began the recording, and alone may end it."""

    # -- functions of the worker ------------------------------------------------------------------
    def start(self, prefix: str | None = None, delay: int | None = None, steps: int | None = None) -> bool:  # fmt: skip
        """Record from the next step on. False: a recording is in progress.

        Raises:
            ValidationError: a value is out of its range, or the folder cannot take a file.
        """
        check_recording(prefix, delay, steps)
        if self.wanted or self.profile is not None:
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            count = sum(1 for _ in self.folder.iterdir())
        except OSError as error:
            raise ValidationError(f"torch_profiler_dir cannot be used: {error.strerror}") from error
        if count >= MOST_FILES:
            raise ValidationError(f"torch_profiler_dir has {count} files; the limit is {MOST_FILES}: remove old traces")  # fmt: skip
        self.prefix = f"{prefix}-" if prefix else ""
        self.skipped = self.options.delay_iterations if delay is None else delay
        self.left = (self.options.max_iterations if steps is None else steps) or DEFAULT_STEPS
        self.wanted = True
        return True

    def stop(self) -> str | None:
        """End the recording, and return the name of its file; None: nothing was recorded, or another thread runs the steps, as
        where the engine is in the server's process: then the next step writes the file, since torch crashes otherwise.
        """
        self.wanted = False
        return self._write()

    # -- steps ------------------------------------------------------------------------------------
    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """What is recorded is what runs without a recording."""
        return True

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if not self.wanted:
            if self.profile is not None:
                self._write()
            return
        if self.skipped:
            self.skipped -= 1
            return
        if self.profile is None:
            self._begin()
        self.step = record_function(f"step {plan.step}: {len(plan.work)} requests")
        self.step.__enter__()  # type: ignore[no-untyped-call]

    def after(self, plan: StepPlan) -> None:
        if self.step is None:
            return
        self.step.__exit__(None, None, None)
        self.step = None
        self.left -= 1
        large = self.memory() - self.before_bytes > MOST_BYTES
        if large:
            log.warning("the recording of the profiler ends: it has taken more than %d bytes of memory", MOST_BYTES)  # fmt: skip
        if large or not self.left:
            self.stop()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        options, self.before_bytes = self.options, self.memory()
        self.profile = profile(
            activities=activities,
            record_shapes=options.torch_profiler_record_shapes,
            profile_memory=options.torch_profiler_with_memory,
            with_stack=options.torch_profiler_with_stack,
            with_flops=options.torch_profiler_with_flops,
        )
        self.profile.start()
        self.thread = threading.get_ident()

    def _write(self) -> str | None:
        recorded: Any = self.profile
        if recorded is None or self.thread != threading.get_ident():
            return None
        self.profile = None
        recorded.stop()
        end = ".pt.trace.json.gz" if self.options.torch_profiler_use_gzip else ".pt.trace.json"
        name = f"{self.prefix}{self.label}-{os.getpid()}-{time.time_ns()}{end}"
        try:
            recorded.export_chrome_trace(str(self.folder / name))
        except (OSError, RuntimeError) as error:
            log.error("the profiler could not write %s: %s", self.folder / name, error)
            return None
        log.info("the profiler wrote %s", self.folder / name)
        return name

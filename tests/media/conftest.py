from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from small_engine import SMALL

from quire import LLM
from quire.frontend.media.errors import refused
from quire.frontend.media.media_messages import Hear, Process, Processed, Refused
from quire.frontend.media.media_processes import MediaProcesses, why, why_no_sound
from quire.frontend.media.prompt_reader import media_inputs

if find_spec("PIL") is None:  # the extra "vision" is not installed
    collect_ignore_glob = ["test_*.py"]
else:
    import audio_checkpoints
    import vision_checkpoints

MAX_PIXELS, MOST_ENGINES = 1 << 26, 3


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Path of the tiny checkpoint of a kind, made once."""
    made: dict[str, str] = {}

    def get(kind: str) -> str:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            maker = (
                audio_checkpoints if kind in audio_checkpoints.CHECKPOINTS else vision_checkpoints
            )
            made[kind] = maker.make_checkpoint(kind, folder)
        return made[kind]

    return get


class SameProcess:
    """Answers as a picture process does, in this process: the start of one takes seconds."""

    def __init__(self, path: str):
        from quire.frontend.media.media_process import load_processor

        kinds = audio_checkpoints.kinds_of(path)
        self.processor, self.replaced, self.count = load_processor(path, kinds), 0, 1

    def hear(self, data: bytes, where: str, seconds: float) -> Processed:
        from quire.frontend.media.media_process import answer_to

        answer = answer_to(Hear(seconds, 1 << 28, 30.0), data, self.processor)
        if isinstance(answer, Refused):
            raise refused(where, why_no_sound(answer))
        return answer

    def process(
        self, data: bytes, where: str, num_frames: int = 0, max_rows: int = 0, options: Any = None
    ) -> Processed:
        from quire.frontend.media.media_process import answer_to

        answer = answer_to(
            Process(MAX_PIXELS, 10.0, num_frames, max_rows, options or {}), data, self.processor
        )
        if isinstance(answer, Refused):
            raise refused(where, why(answer))
        return answer

    def prepare(self) -> None:
        """It is ready."""


@pytest.fixture(scope="session")
def same_process() -> Callable[[str], Any]:
    made: dict[str, SameProcess] = {}

    def get(path: str) -> SameProcess:
        if path not in made:
            made[path] = SameProcess(path)
        return made[path]

    return get


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[[str], MediaProcesses]]:
    """The picture processes of a checkpoint: their start takes seconds."""
    made: dict[str, MediaProcesses] = {}

    def get(path: str) -> MediaProcesses:
        if path not in made:
            made[path] = MediaProcesses(path)
        return made[path]

    yield get
    for one in made.values():
        one.close()


@pytest.fixture(scope="session")
def engines(checkpoint: Callable[[str], str], same_process: Any) -> Iterator[Callable[..., LLM]]:
    """Engines of this process by kind and options, with empty caches. A few are kept."""
    kept: OrderedDict[str, LLM] = OrderedDict()

    def get(kind: str, **options: Any) -> LLM:
        key = f"{kind} {sorted(options.items())}"
        if (llm := kept.get(key)) is None:
            while len(kept) >= MOST_ENGINES:
                kept.popitem(last=False)[1].shutdown()
            llm = kept[key] = LLM(
                model=checkpoint(kind),
                **{**SMALL, **audio_checkpoints.engine_options(kind), **options},
            )
            if media_inputs(llm.front) is not None:
                media_inputs(llm.front).processes = same_process(checkpoint(kind))
        kept.move_to_end(key)
        llm.reset_prefix_cache()
        llm.reset_mm_cache()
        llm.reset_encoder_cache()
        vars(llm)["passes_before"] = vision_checkpoints.encoder_passes(llm)
        return llm

    yield get
    for llm in kept.values():
        llm.shutdown()


@pytest.fixture
def engine(engines: Callable[..., LLM]) -> Callable[..., Any]:
    """`with engine(kind, option=...) as llm`: an LLM in this process, on one thread."""

    @contextmanager
    def started(kind: str, **options: Any) -> Iterator[LLM]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield engines(kind, **options)
        finally:
            torch.set_num_threads(threads)

    return started

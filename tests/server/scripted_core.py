"""An engine with scripted tokens: the real frontend above it, no model below."""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiny_llama import make_tokenizer

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.engine_state import Condition, EngineState
from quire.errors import EngineDeadError, EngineDelayed
from quire.frontend.tokenizer import load
from quire.protocol.output import EngineOutput, EngineReady, EngineStats, FinishReason
from quire.protocol.request import EngineRequest


class ToldClient:
    """An EngineClient. Answers each request with `text`, `step` tokens (bytes) at a time."""

    def __init__(self, folder: Path, text: str, step: int = 1):
        self.tokenizer = load(str(folder))
        config = EngineConfig.from_keywords(model=str(folder), served_model_name="toy")
        self.resolved: Any = SimpleNamespace(
            config=config, path=str(folder), tokenizer_folder=str(folder), hf_config={}, kv_dtype="float32", prefix_caching=True,
            architecture="Told", pooling=None, speculation=None, experts_folder="",
        )  # fmt: skip
        self.ready = EngineReady(
            max_model_len=4096, num_blocks=64, block_size=64, vocab_size=len(self.tokenizer),
            dtype="float32", device="cpu", architecture="Told", model_impl="told", depth=1,
        )  # fmt: skip
        self.tokens = self.tokenizer.encode(text, False)
        self.step = step
        self.aborted: list[str] = []
        self.begun: list[EngineRequest] = []
        self.spoken: queue.SimpleQueue[EngineOutput | None] = queue.SimpleQueue()

        self.loop: asyncio.AbstractEventLoop | None = None
        self.epoch = 0
        self.condition: Condition = "ready"
        self.counted = EngineStats()

    @property
    def engines(self) -> list[Any]:
        return [self]

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        return self.ready

    def state(self) -> EngineState:
        return EngineState(self.epoch, self.condition)

    def check(self) -> None:
        if self.condition == "dead":
            raise EngineDeadError("the test ended it")
        if self.condition == "delayed":
            raise EngineDelayed("1234")

    def stats(self, fresh: bool = False) -> EngineStats:
        return self.counted

    def submit(self, request: EngineRequest) -> None:
        self.begun.append(request)
        self.loop = asyncio.get_running_loop()
        for start in range(0, len(self.tokens), self.step):
            tokens = self.tokens[start : start + self.step]
            last = start + self.step >= len(self.tokens)
            self.spoken.put(EngineOutput(request.id, tokens, "length" if last else None))

    def abort(self, ids: list[str], why: FinishReason = "abort") -> None:
        self.aborted += ids

    def outputs(self) -> list[EngineOutput]:
        output = self.spoken.get()
        while output is not None and output.id in self.aborted:
            output = self.spoken.get()
        if output is None or self.loop is None:
            raise EngineDeadError("shut down")
        # One output at a time: the loop has written the last one before the next one comes.
        if not gone_round(self.loop, 20):
            raise EngineDeadError("shut down")
        return [output]

    def call(self, name: str, *args: Any) -> Any:
        return 0 if name in ("hold", "drained") else EngineStats()

    def close(self) -> None:
        self.spoken.put(None)


def gone_round(loop: asyncio.AbstractEventLoop, rounds: int) -> bool:
    """Wait, in another thread, until the loop has gone round so often; False: it was closed before.

    However long that takes: a machine that stands still for seconds is no dead engine.
    """
    ended = threading.Event()

    def again(left: int) -> None:
        if left:
            loop.call_soon(again, left - 1)
        else:
            ended.set()

    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(again, rounds)
        while not ended.wait(0.5) and not loop.is_closed():
            pass
    return ended.is_set()


def told_engine(folder: Path, text: str, step: int = 1) -> tuple[AsyncEngine, ToldClient]:
    """An engine that says `text`; the folder holds a tokenizer (`tiny_llama.make_tokenizer`)."""
    client = ToldClient(folder, text, step)
    return AsyncEngine(client), client


__all__ = ["make_tokenizer", "told_engine"]

"""Requests with pictures that end early, and engines that do: nothing of them stays behind, and the same picture can be asked again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from test_picture_equality import GREEDY, given, peer, tokens
from vision_checkpoints import as_file, picture
from vision_server import DIRECT, VisionServer, asking, data_url, image_part

from quire.errors import QuireError
from quire.features.media.hook import MediaHook
from quire.features.media.item_encoder import ItemEncoder
from quire.frontend.media.prompt_reader import media_inputs

TEXT = {"type": "text", "text": "What is it?"}
PATH = "/v1/chat/completions"


def hook_of(core: Any) -> MediaHook:
    return next(hook for hook in core.executor.worker.hooks if isinstance(hook, MediaHook))


def assert_nothing_is_left(core: Any) -> None:
    scheduler = core.scheduler
    assert (scheduler.requests, scheduler.running, len(scheduler.waiting)) == ({}, [], 0)
    assert len(scheduler.free_rows) == scheduler.limits.max_rows
    assert core.stats().kv_usage == 0
    hook_of(core).leave(-1)
    assert not hook_of(core).of_row


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_an_abort_while_the_tower_encodes(kind, engine, checkpoint, monkeypatch):
    """The abort arrives in the step that encodes the picture."""
    prompt, encoded = given(kind, "@ which colour?", [picture(5)]), ItemEncoder._encoded
    with engine(kind) as llm:
        core = llm.front.client.core

        def leaves(self: ItemEncoder, some: Any) -> Any:
            llm.front.client.abort(list(core.scheduler.requests))
            return encoded(self, some)

        with monkeypatch.context() as patched:
            patched.setattr(ItemEncoder, "_encoded", leaves)
            (out,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert out.outputs[0].finish_reason == "abort"
        llm.generate(["<s>"], GREEDY, use_tqdm=False)  # a further plan tells the worker
        assert_nothing_is_left(core)
        assert (
            len(hook_of(core).encoder.cache._kept) == 1
        )  # the rows stay for others, within their bound
        llm.reset_prefix_cache()
        assert tokens(llm, prompt)[0] == peer(checkpoint(kind), kind, "@ which colour?", [picture(5)])[1]  # fmt: skip
        llm.reset_encoder_cache()
        assert hook_of(core).encoder.cache.num_rows == 0


# -- a client that leaves -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], str], same_process: Any) -> Iterator[VisionServer]:
    path = checkpoint("llava")
    made = VisionServer(path, same_process(path))
    yield made
    made.close()


def test_a_client_that_leaves_while_its_picture_is_decoded(server, same_process, checkpoint, monkeypatch):  # fmt: skip
    """The process ends its file, and is there for the next one; no request reaches the engine."""
    reader, decodes, may_end = media_inputs(server.engine.front), threading.Event(), threading.Event()  # fmt: skip
    process = type(reader.processes).process

    def waits(self: Any, *args: Any) -> Any:
        decodes.set()
        assert may_end.wait(20)
        return process(self, *args)

    async def leave() -> float:
        body = [json.dumps(asking(image_part(data_url(as_file(picture(77)))), TEXT)).encode()]

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop()}
            await asyncio.to_thread(decodes.wait, 20)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            """Nobody reads it."""

        headers = [(b"content-type", b"application/json"), (b"host", b"server")]
        scope = {**DIRECT, "path": PATH, "raw_path": PATH.encode(), "headers": headers}
        began = time.monotonic()
        await server.app(scope, receive, send)
        took = time.monotonic() - began
        assert reader._waiting == 0
        may_end.set()
        return took

    monkeypatch.setattr(type(reader.processes), "process", waits)
    assert asyncio.run(leave()) < 10
    monkeypatch.undo()
    core = server.client.core
    assert_nothing_is_left(core)
    arrivals = core.scheduler.arrivals
    answers = [server.ask(PATH, asking(image_part(data_url(as_file(picture(77)))), TEXT)) for _ in range(2)]  # fmt: skip
    first, second = (one.json()["choices"][0]["token_ids"] for one in answers)
    assert first == second
    assert core.scheduler.arrivals == arrivals + 2
    assert reader._waiting == 0


# -- an engine that dies --------------------------------------------------------------------------
@pytest.mark.slow
def test_a_replaced_engine_gets_pictures_that_the_front_still_has(checkpoint, same_process):
    """By their data, and by a uuid alone: the front sends processed pictures with each request, and the engine keeps none that it needs."""
    path = checkpoint("qwen2_vl")
    server = VisionServer(path, same_process(path), process=True)
    part = image_part(data_url(as_file(picture(3))))
    named = {**part, "uuid": "mine"}
    bodies = [asking(named, TEXT), asking(part, TEXT), asking({**image_part(None), "image_url": None, "uuid": "mine"}, TEXT)]  # fmt: skip
    try:
        client = server.client

        def answers() -> list[list[int]]:
            found = [server.ask(PATH, body) for body in bodies]
            assert {one.status_code for one in found} == {200}, [one.text for one in found]
            return [one.json()["choices"][0]["token_ids"] for one in found]

        before = answers()
        assert before[0] == before[1] == before[2]
        epoch = client.epoch
        os.kill(client.wait_ready().pid, signal.SIGKILL)
        while client.epoch == epoch or client.state().condition != "ready":
            with suppress(QuireError):
                client.call("stats")
            time.sleep(0.1)
        bodies.reverse()  # first the one without data
        assert answers() == before
    finally:
        server.close()

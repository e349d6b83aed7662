"""AsyncLLM and LLMEngine: what goes wrong, how they end, and loops and threads around them."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import page_model_engine
import pytest
from streaming import FINAL, GREEDY, executor, expected, greedy, outputs, run

from quire.api.async_llm import AsyncLLM
from quire.api.llm_engine import LLMEngine
from quire.errors import (
    EngineDeadError,
    InternalError,
    QueueFull,
    Unsupported,
    ValidationError,
)
from quire.frontend.outputs import RequestOutput
from quire.protocol.pooling_params import PoolingParams

# -- errors -----------------------------------------------------------------------------------------


def test_an_invalid_request_does_not_affect_others(llm: AsyncLLM):
    async def main() -> None:
        good = asyncio.create_task(outputs(llm, "good", GREEDY, "good"))
        with pytest.raises(ValidationError):
            await outputs(llm, [99999], GREEDY, "bad")
        with pytest.raises(Unsupported, match="streamed prompt"):
            await outputs(llm, aiter(llm.generate("x", GREEDY, "z")), GREEDY, "bad")
        with pytest.raises(ValidationError, match="reach the engine 0"):
            await outputs(llm, "x", GREEDY, "bad", data_parallel_rank=1)
        assert (await good)[-1].finished
        assert not llm.front.live

    run(main())


def test_a_failed_request_raises_only_in_its_own_stream(llm: AsyncLLM):
    executor(llm).failing.add("b")

    async def main() -> None:
        found = await asyncio.gather(
            *(outputs(llm, "x", GREEDY, id) for id in "abc"), return_exceptions=True
        )
        assert [type(one) for one in found] == [list, InternalError, list]
        assert "it was told to fail" in str(found[1])

    run(main())


def test_requests_beyond_the_queue_limit_are_refused(make: Callable[..., AsyncLLM]):
    llm = make(max_num_queued_reqs=2)

    async def main() -> None:
        found = await asyncio.gather(
            *(outputs(llm, [n], greedy(max_tokens=60), str(n)) for n in range(1, 30)),
            return_exceptions=True,
        )
        refused = [one for one in found if isinstance(one, QueueFull)]
        assert refused
        assert len(refused) + sum(isinstance(one, list) for one in found) == 29

    run(main())


def test_a_dead_engine_ends_all_streams(slow: AsyncLLM):
    async def main() -> None:
        tasks = [
            asyncio.create_task(outputs(slow, "x", greedy(max_tokens=190), str(n)))
            for n in range(6)
        ]
        await asyncio.sleep(0.01)
        assert slow.is_running
        executor(slow).broken = OSError("the wire is cut")
        for one in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(one, EngineDeadError)
            assert "the wire is cut" in str(one)
        with pytest.raises(EngineDeadError):
            await outputs(slow, "x", GREEDY, "later")
        with pytest.raises(EngineDeadError):
            await slow.check_health()
        assert slow.errored
        assert "the wire is cut" in str(slow.dead_error)

    run(main())


def test_shutdown_ends_streams(slow: AsyncLLM):
    async def main() -> None:
        task = asyncio.create_task(outputs(slow, "x", greedy(max_tokens=190), "x"))
        await asyncio.sleep(0.005)
        await asyncio.to_thread(slow.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await task

    run(main())
    assert executor(slow).closed


def test_an_exception_in_the_frontend_ends_the_stream(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    def fail(self: Any, outputs: Any) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("quire.frontend.request_manager.RequestManager.process_outputs", fail)
    with pytest.raises(EngineDeadError, match="a fault"):
        run(outputs(llm, "x", GREEDY, "x"))


# -- loops and threads ------------------------------------------------------------------------------


def test_one_loop_after_another(llm: AsyncLLM, folder: Path):
    texts = expected(folder, ["x"], GREEDY)
    for _ in range(3):
        assert run(outputs(llm, "x", GREEDY, "x"))[-1].outputs[0].text == texts[0]


def test_a_closed_event_loop_does_not_block_the_next(slow: AsyncLLM):
    async def leave() -> Any:
        stream = slow.generate("x", greedy(max_tokens=190), "x")
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(leave())
    loop.close()
    found = run(outputs(slow, "x", GREEDY, "x"))
    assert len(found[-1].outputs[0].token_ids) == 12
    del stream


def test_an_engine_failure_between_two_event_loops_reaches_the_second(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    """Regression: only the closed loop got the error, and the next request waited forever."""

    def fail(block: bool) -> Any:
        raise ZeroDivisionError("a fault")

    others = set(
        threading.enumerate()
    )  # output threads of engines that other tests shut down may still end
    run(outputs(llm, "x", GREEDY, "x"))
    [pump] = [t for t in set(threading.enumerate()) - others if t.name == "quire-outputs"]
    core = llm.client.core  # type: ignore[attr-defined]
    monkeypatch.setattr(core, "receive", fail)
    core.inbox.put(None)
    pump.join(60)
    with pytest.raises(EngineDeadError, match="a fault"):
        run(outputs(llm, "x", GREEDY, "y"))


def test_two_loops_at_once_are_refused(slow: AsyncLLM):
    told: list[BaseException] = []

    async def main() -> None:
        stream = slow.generate("x", greedy(max_tokens=190), "x")
        await anext(stream)

        def other() -> None:
            try:
                run(outputs(slow, "y", GREEDY, "y"))
            except RuntimeError as error:
                told.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        await asyncio.to_thread(thread.join)
        await stream.aclose()

    run(main())
    assert "another event loop" in str(told[0])


def test_the_engine_ends_with_the_object(folder: Path):
    client = page_model_engine.make(folder)
    held: Any = client.core.executor
    llm = AsyncLLM.from_client(client)
    run(outputs(llm, "x", GREEDY, "x"))
    assert not held.closed
    del llm
    end = time.monotonic() + 60
    while not held.closed:  # the thread that hands its outputs over may hold it a moment longer
        gc.collect()
        assert time.monotonic() < end


# -- about the engine -------------------------------------------------------------------------------


def test_pausing(slow: AsyncLLM):
    async def main() -> None:
        running = asyncio.create_task(outputs(slow, "x", greedy(max_tokens=190), "x"))
        await asyncio.sleep(0.005)
        await slow.pause_generation(mode="abort")
        assert (await running)[-1].outputs[0].finish_reason == "abort"
        assert await slow.is_paused()
        waiting = asyncio.create_task(outputs(slow, "y", GREEDY, "y"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await slow.resume_generation()
        assert (await waiting)[-1].finished
        ending = asyncio.create_task(outputs(slow, "x", greedy(max_tokens=40), "x"))
        await asyncio.sleep(0.005)
        await slow.pause_generation(mode="wait")
        assert (await ending)[-1].outputs[0].finish_reason == "length"
        await slow.resume_generation()
        with pytest.raises(ValidationError, match="abort, wait or keep"):
            await slow.pause_generation(mode="odd")

    run(main())


def test_requests_kept_by_a_pause_continue_with_the_same_tokens(slow: AsyncLLM):
    async def main() -> None:
        async def made() -> int:
            return (await slow.call("stats"))["generation_tokens"]

        long = greedy(max_tokens=190, output_kind=FINAL)
        executor(slow).pause = 0.0
        (whole,) = await outputs(slow, "x", long, "a")
        for still, on in (
            (slow.pause_generation(mode="keep"), slow.resume_generation),
            (slow.sleep(mode="keep"), slow.wake_up),
        ):
            executor(slow).pause, before = 0.02, await made()
            kept = asyncio.create_task(outputs(slow, "x", long, "b"))
            while await made() == before:
                await asyncio.sleep(0.005)
            await still
            begun = await made()
            await asyncio.sleep(0.05)
            assert not kept.done()
            assert await made() == begun
            executor(slow).pause = 0.0
            await on()
            assert (await kept)[-1].outputs[0].token_ids == whole.outputs[0].token_ids

    run(main())


def test_sleeping(llm: AsyncLLM):
    async def main() -> None:
        await llm.sleep(2)
        assert await llm.is_sleeping()
        late = asyncio.create_task(outputs(llm, "y", GREEDY, "y"))
        assert await llm.wake_up(["weights"]) is False
        await asyncio.sleep(0.02)
        assert not late.done()
        assert await llm.wake_up(["kv_cache"]) is True
        assert (await late)[-1].finished
        with pytest.raises(ValidationError, match="tags"):
            await llm.wake_up(["odd"])
        with pytest.raises(ValidationError, match="level"):
            await llm.sleep(3)

    run(main())


def test_names_that_programs_call(llm: AsyncLLM):
    async def main() -> None:
        await llm.check_health()
        assert (await llm.get_tokenizer()).eos_token == "<|end|>"
        assert await llm.reset_prefix_cache() is True
        assert await llm.collective_rpc("name") == [["collective_rpc", "name", [], {}]]
        assert await llm.get_supported_tasks() == ("generate",)
        assert not await llm.is_sleeping()
        await llm.do_log_stats()
        await llm.wait_for_requests_to_drain(1)
        with pytest.raises(ValidationError, match="generates text"):
            async for _ in llm.encode("x", PoolingParams(), "encode"):
                pass

    run(main())


def test_prompt_text_and_long_texts(make: Callable[..., AsyncLLM]):
    llm = make(max_model_len=30_000)

    async def main() -> None:
        (found,) = await outputs(llm, [4, 5], greedy(output_kind=FINAL), "a", prompt_text="said")
        assert found.prompt == "said"
        (found,) = await outputs(llm, "a " * 10_001, greedy(output_kind=FINAL, max_tokens=1), "b",
                                 tokenization_kwargs={"truncate_prompt_tokens": 9})  # fmt: skip
        assert len(found.prompt_token_ids) == 9

    run(main())


# -- LLMEngine --------------------------------------------------------------------------------------


def test_stepping_by_hand(folder: Path):
    engine = LLMEngine(page_model_engine.make(folder))
    prompts = [[n] for n in range(1, 8)]
    for number, prompt in enumerate(prompts):
        assert engine.add_request(str(number), prompt, GREEDY) == str(number)
    engine.add_request("gone", [9], greedy(max_tokens=190))
    engine.abort_request("gone")
    assert engine.get_num_unfinished_requests() == 7
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output
    assert engine.step() == []
    assert ended.pop("gone").outputs[0].finish_reason == "abort"
    texts = [ended[str(number)].outputs[0].text for number in range(7)]
    assert texts == expected(folder, prompts, GREEDY)
    engine.shutdown()

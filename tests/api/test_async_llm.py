"""AsyncLLM and LLMEngine: many streams on one engine, given up at any time, dying together."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pagemodel
import pytest

from quire.api.async_llm import AsyncLLM
from quire.api.llm import LLM
from quire.api.llm_engine import LLMEngine
from quire.errors import EngineDeadError, QueueFull, QuireError, Unsupported, ValidationError
from quire.frontend.outputs import RequestOutput
from quire.protocol.params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL = RequestOutputKind
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def greedy(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **given})


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., AsyncLLM]]:
    made: list[AsyncLLM] = []

    def one(**keywords: Any) -> AsyncLLM:
        made.append(AsyncLLM.from_client(pagemodel.make(folder, **keywords)))
        return made[-1]

    yield one
    for llm in made:
        llm.shutdown()


@pytest.fixture
def llm(make: Callable[..., AsyncLLM]) -> AsyncLLM:
    return make()


def executor(llm: AsyncLLM) -> pagemodel.Executor:
    return llm.client.core.executor  # type: ignore[attr-defined]


@pytest.fixture
def slow(llm: AsyncLLM) -> AsyncLLM:
    """One that is still at it when a test gives up."""
    executor(llm).pause = 0.004
    return llm


def run(work: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, 20)

    return asyncio.run(bounded())


async def outputs(llm: AsyncLLM, prompt: Any, params: Any, id: str, **more: Any) -> list[RequestOutput]:  # fmt: skip
    return [output async for output in llm.generate(prompt, params, id, **more)]


def expected(folder: Path, prompts: list[Any], params: SamplingParams) -> list[str]:
    """By LLM, one prompt at a time."""
    with LLM.from_client(pagemodel.make(folder)) as llm:
        return [llm.generate(p, params, use_tqdm=False)[0].outputs[0].text for p in prompts]


# -- streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streams_of_every_kind(llm: AsyncLLM, folder: Path, kind: RequestOutputKind):
    prompts = [f"prompt {n} é" for n in range(10)]
    texts = expected(folder, prompts, GREEDY)

    async def one(number: int) -> str:
        found = await outputs(llm, prompts[number], greedy(output_kind=kind), f"r{number}")
        assert [out.finished for out in found] == [False] * (len(found) - 1) + [True]
        assert {out.request_id for out in found} == {f"r{number}"}
        if kind == DELTA:
            assert sum(len(out.outputs[0].token_ids) for out in found) == 12
            return "".join(out.outputs[0].text for out in found)
        if kind == FINAL:
            assert len(found) == 1
        return found[-1].outputs[0].text

    async def main() -> list[str]:
        return await asyncio.gather(*map(one, range(10)))

    assert run(main()) == texts


def test_deltas_of_several_outputs_join_to_the_whole(llm: AsyncLLM):
    def params(kind: RequestOutputKind) -> SamplingParams:
        return SamplingParams(n=3, seed=5, max_tokens=9, logprobs=1, output_kind=kind)

    async def main() -> None:
        (whole,) = await outputs(llm, "the", params(FINAL), "a")
        deltas = await outputs(llm, "the", params(DELTA), "b")
        joined = deltas[0]
        for more in deltas[1:]:
            joined.add(more)
        found = {one.index: one for one in joined.outputs}
        for one in whole.outputs:
            assert found[one.index].text == one.text
            assert found[one.index].token_ids == one.token_ids
            assert found[one.index].logprobs == one.logprobs
            assert found[one.index].finish_reason == one.finish_reason

    run(main())


def test_a_slow_reader_gets_all_and_others_are_not_held_up(slow: AsyncLLM):
    async def main() -> None:
        stream = slow.generate("slow", greedy(output_kind=DELTA, max_tokens=60), "slow")
        first = await anext(stream)
        quick = await outputs(slow, "quick", greedy(max_tokens=80), "quick")
        assert quick[-1].finished
        rest = [output async for output in stream]
        assert len(rest) < 59  # what came meanwhile is told at once
        tokens = [t for out in [first, *rest] for t in out.outputs[0].token_ids]
        assert len(tokens) == 60

    run(main())


def test_more_requests_than_rows(llm: AsyncLLM):
    async def main() -> None:
        found = await asyncio.gather(*(outputs(llm, [n], GREEDY, str(n)) for n in range(1, 40)))
        assert all(len(each[-1].outputs[0].token_ids) == 12 for each in found)
        assert [each[-1].prompt_token_ids for each in found] == [[n] for n in range(1, 40)]

    run(main())


def test_stop_strings_in_streams(llm: AsyncLLM):
    tokenizer = llm.front.need_tokenizer()
    answer = tokenizer.encode("one. two. three.")
    executor(llm).model.scripts[tuple(tokenizer.encode("hi"))] = answer + [0] * 60

    async def main() -> None:
        for round in range(3):  # the same id again, while the engine still ends the one before
            params = SamplingParams(stop=["two. t"], max_tokens=60, output_kind=DELTA)
            found = await outputs(llm, "hi", params, "same")
            assert "".join(out.outputs[0].text for out in found) == "one. ", round
            assert found[-1].outputs[0].stop_reason == "two. t"

    run(main())


# -- giving up --------------------------------------------------------------------------------------


async def idle(llm: AsyncLLM) -> None:
    for _ in range(500):
        stats = await llm.call("stats")
        if not stats["running"] and not stats["waiting"]:
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("requests are left in the engine")


def test_leaving_the_loop_aborts(slow: AsyncLLM):
    async def main() -> None:
        stream = slow.generate("x", greedy(max_tokens=190), "x")
        async for _ in stream:
            break
        await stream.aclose()
        assert not slow.front.live
        await idle(slow)
        found = await outputs(slow, "x", GREEDY, "x")
        assert len(found[-1].outputs[0].token_ids) == 12

    run(main())


def test_a_cancelled_task_aborts(slow: AsyncLLM):
    async def main() -> None:
        task = asyncio.create_task(outputs(slow, "x", greedy(max_tokens=190), "x"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not slow.front.live
        await idle(slow)

    run(main())


def test_abort_ends_the_stream(slow: AsyncLLM):
    async def main() -> None:
        streams = [slow.generate("x", greedy(max_tokens=190), id) for id in ("a", "b", "c")]
        for stream in streams:
            await anext(stream)
        await slow.abort("a")
        await slow.abort(["b", "nobody"])
        for stream in streams[:2]:
            last = [output async for output in stream][-1]
            assert last.finished
            assert last.outputs[0].finish_reason == "abort"
        (await anext(streams[2])).outputs[0].finish_reason  # noqa: B018
        await streams[2].aclose()
        await idle(slow)

    run(main())


def test_an_id_can_be_used_again_at_once(slow: AsyncLLM):
    """The engine's word that the first one ended must not end the second."""

    async def main() -> None:
        for _ in range(8):
            stream = slow.generate("x", greedy(max_tokens=190, n=1), "same")
            await anext(stream)
            await slow.abort("same")
            await stream.aclose()
            (last,) = await outputs(slow, "x", greedy(output_kind=FINAL), "same")
            assert last.outputs[0].finish_reason == "length"
            assert len(last.outputs[0].token_ids) == 12
        assert not slow.front._echoes or await settled(slow)

    async def settled(slow: AsyncLLM) -> bool:
        for _ in range(200):
            await asyncio.sleep(0.01)
            if not slow.front._echoes:
                return True
        return False

    run(main())


def test_an_id_that_runs_is_refused(slow: AsyncLLM):
    async def main() -> None:
        stream = slow.generate("x", greedy(max_tokens=190), "same")
        await anext(stream)
        with pytest.raises(ValidationError, match="'same' is that of a request which still runs"):
            await outputs(slow, "y", GREEDY, "same")
        assert not (await anext(stream)).outputs[0].error  # the first one is not hurt
        await stream.aclose()
        with pytest.raises(ValidationError, match="request_id"):
            await outputs(slow, "y", GREEDY, "")

    run(main())


def test_ids_of_several_outputs_do_not_meet(slow: AsyncLLM):
    async def main() -> None:
        stream = slow.generate("x", SamplingParams(n=2, max_tokens=150, ignore_eos=True), "a")
        await anext(stream)
        found = await outputs(slow, "y", GREEDY, "a_1")
        assert (found[-1].request_id, len(found[-1].outputs[0].token_ids)) == ("a_1", 12)
        assert (await anext(stream)).request_id == "a"
        await stream.aclose()

    run(main())


# -- errors -----------------------------------------------------------------------------------------


def test_a_wrong_request_hurts_nobody(llm: AsyncLLM):
    async def main() -> None:
        good = asyncio.create_task(outputs(llm, "good", GREEDY, "good"))
        with pytest.raises(ValidationError):
            await outputs(llm, [99999], GREEDY, "bad")
        with pytest.raises(Unsupported, match="streamed in"):
            await outputs(llm, aiter(llm.generate("x", GREEDY, "z")), GREEDY, "bad")
        with pytest.raises(Unsupported, match="data_parallel_rank"):
            await outputs(llm, "x", GREEDY, "bad", data_parallel_rank=1)
        assert (await good)[-1].finished
        assert not llm.front.live

    run(main())


def test_a_request_that_fails_alone_raises_for_itself(llm: AsyncLLM):
    executor(llm).failing.add("b")

    async def main() -> None:
        found = await asyncio.gather(
            *(outputs(llm, "x", GREEDY, id) for id in "abc"), return_exceptions=True
        )
        assert [type(one) for one in found] == [list, QuireError, list]
        assert "it was told to fail" in str(found[1])

    run(main())


def test_too_many_that_wait_are_refused(make: Callable[..., AsyncLLM]):
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


def test_a_fault_of_the_front_room_does_not_hang(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    def fail(self: Any, outputs: Any) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("quire.frontend.front.FrontRoom.take_in", fail)
    with pytest.raises(EngineDeadError, match="a fault"):
        run(outputs(llm, "x", GREEDY, "x"))


# -- loops and threads ------------------------------------------------------------------------------


def test_one_loop_after_another(llm: AsyncLLM, folder: Path):
    texts = expected(folder, ["x"], GREEDY)
    for _ in range(3):
        assert run(outputs(llm, "x", GREEDY, "x"))[-1].outputs[0].text == texts[0]


def test_a_loop_that_ended_in_the_middle(slow: AsyncLLM):
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
    client = pagemodel.make(folder)
    held: Any = client.core.executor
    llm = AsyncLLM.from_client(client)
    run(outputs(llm, "x", GREEDY, "x"))
    assert not held.closed
    del llm
    gc.collect()
    assert held.closed


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
        with pytest.raises(Unsupported, match="keep"):
            await slow.pause_generation(mode="keep")

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
        with pytest.raises(Unsupported, match=r"AsyncLLM\.sleep"):
            await llm.sleep()
        with pytest.raises(Unsupported, match=r"AsyncLLM\.encode"):
            llm.encode("x")

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
    engine = LLMEngine(pagemodel.make(folder))
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

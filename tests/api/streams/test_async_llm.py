"""AsyncLLM: many streams on one engine, given up at any time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from streaming import DELTA, FINAL, GREEDY, executor, expected, greedy, outputs, run

from quire.api.async_llm import AsyncLLM
from quire.errors import ValidationError
from quire.protocol.sampling_params import RequestOutputKind, SamplingParams

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


def test_a_slow_reader_gets_everything_and_delays_no_other_stream(slow: AsyncLLM):
    executor(slow).pause = 0.004

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
    while (stats := await llm.call("stats"))["running"] or stats["waiting"]:
        await asyncio.sleep(0.01)


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
    executor(slow).pause = 0.004

    async def main() -> None:
        for _ in range(8):
            stream = slow.generate("x", greedy(max_tokens=190, n=1), "same")
            await anext(stream)
            await slow.abort("same")
            await stream.aclose()
            (last,) = await outputs(slow, "x", greedy(output_kind=FINAL), "same")
            assert last.outputs[0].finish_reason == "length"
            assert len(last.outputs[0].token_ids) == 12
        while slow.front._echoes:
            await asyncio.sleep(0.01)

    run(main())


def test_an_id_that_runs_is_refused(slow: AsyncLLM):
    async def main() -> None:
        stream = slow.generate("x", greedy(max_tokens=190), "same")
        await anext(stream)
        with pytest.raises(ValidationError, match="'same' belongs to a running request"):
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

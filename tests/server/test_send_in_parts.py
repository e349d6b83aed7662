"""A request with many outputs is sent to the engine in parts, and can be cancelled between two of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scripted_core import make_tokenizer, told_engine

from quire.api import async_engine
from quire.protocol.sampling_params import SamplingParams


@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_a_request_cancelled_while_sending_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    monkeypatch.setattr(
        async_engine, "BREATH_S", -1.0
    )  # others have their turn after each output's request
    make_tokenizer(tmp_path)

    async def go() -> None:
        engine, below = told_engine(tmp_path, "x")
        llm, params = engine, SamplingParams(n=64, temperature=1.0, max_tokens=1)
        opening = asyncio.ensure_future(llm.open("hi", params, "many", lambda: None))
        while len(below.begun) < 5:
            await asyncio.sleep(0)
        if how == "abort":
            await llm.abort("many")
            stream = await opening
            output = stream.take()
            assert stream.ended
            assert output is None or output.finished
        else:
            opening.cancel()
            await asyncio.wait([opening])
        sent = len(below.begun)
        assert sent < 64
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(below.begun) == sent
        assert not llm.front.live
        assert set(below.aborted) >= {child.id for child in below.begun[1:]}  # none of them goes on
        assert not llm.front._children
        again = await llm.open("hi", params, "many", lambda: None)  # the id is free
        assert len(below.begun) == sent + 64
        again.close()
        below.close()

    asyncio.run(go())

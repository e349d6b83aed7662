"""What the tests of streams share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import page_model_engine

from quire.api.async_llm import AsyncLLM
from quire.api.llm import LLM
from quire.frontend.outputs import RequestOutput
from quire.protocol.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL = RequestOutputKind
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def greedy(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **given})


def executor(llm: AsyncLLM) -> page_model_engine.Executor:
    return llm.client.core.executor  # type: ignore[attr-defined]


def run(work: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(bounded())


async def outputs(llm: AsyncLLM, prompt: Any, params: Any, id: str, **more: Any) -> list[RequestOutput]:  # fmt: skip
    return [output async for output in llm.generate(prompt, params, id, **more)]


def expected(folder: Path, prompts: list[Any], params: SamplingParams) -> list[str]:
    """By LLM, one prompt at a time."""
    with LLM.from_client(page_model_engine.make(folder)) as llm:
        return [llm.generate(p, params, use_tqdm=False)[0].outputs[0].text for p in prompts]

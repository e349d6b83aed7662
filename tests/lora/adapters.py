"""Random adapters in the form of PEFT, written without PEFT; engines with adapters, and requests that name one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from equality.engines import Engine, engine
from safetensors.torch import save_file

from quire.config.engine import Resolved
from quire.engine.enabled_features import enabled_features
from quire.parallel.layout import RankLayout
from quire.protocol.output import EngineOutput
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.worker.memory_forecast import plan_memory
from quire.worker.memory_plan import MemoryPlan

PREFIX = "base_model.model."
SIZES = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 32), "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (64, 96), "mlp.up_proj": (64, 96), "mlp.down_proj": (96, 64),
}  # fmt: skip
"""(inputs, outputs) of the linears of `engines.BASE`."""


def tensors(
    rank: int, seed: int, modules: tuple[str, ...] = tuple(SIZES), b: float = 0.2, layers: int = 3
) -> dict[str, torch.Tensor]:
    """The tensors of a random adapter; `b`: the spread of B."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(layers):
        for module in modules:
            ins, outs = SIZES[module]
            name = f"{PREFIX}model.layers.{layer}.{module}.lora_"
            found[name + "A.weight"] = torch.randn(rank, ins, generator=draw) * 0.3
            found[name + "B.weight"] = torch.randn(outs, rank, generator=draw) * b
    return found


def write(folder: Path, rank: int = 4, seed: int = 0, *, made: Any = None, **fields: Any) -> str:
    """Write an adapter; `fields` go into its configuration. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": "all-linear",
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors(rank, seed) if made is None else made, folder / "adapter_model.safetensors")
    return str(folder)


def planned(resolved: Resolved) -> MemoryPlan:
    """The memory plan of the first rank, with the lines of features."""
    layout = RankLayout.of(resolved.config.parallel)
    lines = [line for each in enabled_features(resolved) for line in each.memory(layout, 0)]
    return plan_memory(resolved, lines=lines)


@contextmanager
def lora_engine(path: str, depth: int | None = None, **keywords: Any) -> Iterator[Engine]:
    """An engine that serves adapters."""
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, **keywords}
    with engine(path, depth, **settings) as one:
        one.client.core.check_each_step = True
        yield one


def submit(
    one: Engine, prompt: list[int], params: SamplingParams, adapter: str | None = None
) -> str:
    """Submit a request and return its id."""
    id = str(next(one.numbers))
    one.client.submit(EngineRequest(id, prompt, params, adapter=adapter))
    return id


def collect(one: Engine, ids: list[str]) -> dict[str, list[EngineOutput]]:
    """The outputs of these requests, until all have ended."""
    got: dict[str, list[EngineOutput]] = {id: [] for id in ids}
    while not all(outputs and outputs[-1].finish for outputs in got.values()):
        for output in one.client.outputs():
            got[output.id].append(output)
    return got


Answer = tuple[list[int], list[list[float]]]
"""Tokens and their log-probabilities, bit for bit."""


def run(
    one: Engine,
    prompts: list[list[int]],
    adapters: list[str | None],
    params: SamplingParams,
) -> list[Answer]:
    """The answers of requests that run together. An error of any is an error of the test."""
    ids = [
        submit(one, *each) for each in zip(prompts, [params] * len(prompts), adapters, strict=True)
    ]
    answers = []
    for outputs in collect(one, ids).values():
        if outputs[-1].finish == "error":
            raise RuntimeError(outputs[-1].error)
        numbers = [values for out in outputs if out.logprobs for values in out.logprobs.values]
        answers.append(([token for out in outputs for token in out.tokens], numbers))
    return answers

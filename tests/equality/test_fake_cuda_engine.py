"""The engine as built for CUDA, on a stand-in for a GPU (`fake_cuda_device.py`): no operation mixes host and device tensors,
no step waits for the device, and the tokens equal the reference functions' on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")
import fake_cuda_device
import triton_interpreter  # noqa: F401

from benchmarks.gpu.fixtures import CONFIGS, client_of, write_config
from quire.engine.client import InlineClient
from quire.errors import NotEnoughMemory
from quire.ops.dispatch import OPS
from quire.platforms import cuda
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.worker import kv_cache

COUNT = 3
ASKED = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"logprobs": 3},
    {"temperature": 0.7, "logprobs": 2, "repetition_penalty": 1.2, "presence_penalty": 0.2},
    {"prompt_logprobs": 2},
    {"logit_bias": {5: 3.0}},
    {"allowed_token_ids": [4, 5, 6]},
    {"min_tokens": 2, "stop_token_ids": [7]},
    {"bad_word_ids": [[5, 6], [9]]},
    {"temperature": 0.5, "logprob_token_ids": [3, 4]},
    {"temperature": 0.5, "min_tokens": 2, "stop_token_ids": [7], "allowed_token_ids": [4, 5, 7]},
]
PARAMS = [
    SamplingParams(**{"temperature": 0.0, "seed": i, "ignore_eos": True, **asked}, max_tokens=COUNT)
    for i, asked in enumerate(ASKED)
]
PROMPTS = [[7 + i, *range(3, 3 + 7 * i % 19)] for i in range(len(ASKED))]


def ask(client: InlineClient, which: list[int]) -> list[list[int]]:
    for i in which:
        client.submit(EngineRequest(str(i), PROMPTS[i], PARAMS[i]))
    got: dict[str, list[int]] = {str(i): [] for i in which}
    left = len(which)
    while left:
        for output in client.outputs():
            assert output.finish != "error", output.error
            got[output.id] += output.tokens
            left -= output.finish is not None
    return list(got.values())


OPTIONS = {
    "dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 6,
    "max_model_len": 128, "max_num_batched_tokens": 64, "async_scheduling": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setitem(CONFIGS, "tiny", {**CONFIGS["tiny"], **small})
    write_config(tmp_path, "tiny")
    return str(tmp_path)


@contextmanager
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QUIRE_DEVICE", "cuda")
    for op in OPS.values():
        monkeypatch.setattr(op, "run", op.run)  # so that it comes back
    with np.errstate(all="ignore"), fake_cuda_device.chosen(monkeypatch):
        yield


@pytest.mark.slow
def test_no_step_synchronizes_and_tokens_equal_the_hosts(folder: str, monkeypatch) -> None:
    options = OPTIONS
    everyone = list(range(len(ASKED)))
    with client_of(folder, attention_backend="torch_sdpa", **options) as client:
        want = ask(client, everyone)
    with on_a_card(monkeypatch), client_of(folder, **options) as client:
        assert client.ready.device == "cuda"
        ask(client, [0])  # the room for what is sent is made
        fake_cuda_device.waits.clear()
        assert ask(client, everyone) == want
        assert client.core.executor.worker.model_input.replays
    assert fake_cuda_device.waits == []


def source_with(folder: str, **more: Any) -> Any:
    with client_of(folder, **{**OPTIONS, **more}) as client:
        return client.core.executor.worker.model_input


def test_graphs_are_captured_for_the_configured_sizes(folder: str, monkeypatch) -> None:
    with on_a_card(monkeypatch):
        assert source_with(folder).sizes == [1, 2, 4, 6]
        assert source_with(folder, cudagraph_capture_sizes=[3, 5, 700]).sizes == [3, 5]
        assert not hasattr(source_with(folder, enforce_eager=True), "replays")


def test_the_cache_gets_its_share_of_free_device_memory(folder: str, monkeypatch) -> None:
    """Less a reserve; and what another program takes meanwhile is said before the server is ready."""
    room, size = 20 << 20, 64 << 30  # the rows could use 32 MiB
    free = [cuda.RESERVE + room]
    many = {"max_num_seqs": 256, "max_model_len": 512, "max_num_batched_tokens": 256}
    options = {**OPTIONS, **many, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.8}
    with on_a_card(monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], size))
        with client_of(folder, **options) as client:
            layer = client.core.executor.worker.model.attention_layers()[0]
            assert 0.6 * room < sum(part.nbytes for part in layer.spec.cache) <= 0.8 * room
        allocate = kv_cache.allocate_cache

        def meanwhile(*args: Any) -> Any:
            free.append(1 << 10)
            return allocate(*args)

        monkeypatch.setattr(kv_cache, "allocate_cache", meanwhile)
        with pytest.raises(NotEnoughMemory, match="another program may have allocated memory"):
            source_with(folder)

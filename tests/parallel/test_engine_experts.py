"""Engines that share experts: the logits of one engine, bit for bit, and what becomes of a question that nobody answers."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_config
from quire.errors import ExpertsLost
from quire.features.data_parallel_experts.hook import ExpertSharingHook
from quire.layers.engine_experts import LOST, EngineExperts
from quire.models.load import build_model
from quire.parallel.expert_sockets import (
    ANSWER,
    MAX_PAIRS,
    QUESTION,
    ExpertClient,
    ExpertServer,
    socket_path,
)
from quire.platforms.cpu import CpuPlatform
from quire.processes.child import is_stopped
from tests.models.test_native import build
from tests.parallel.test_split_experts import experts_of, logits, written
from tests.parallel.thread_ranks import ThreadRanks, load_on, on_ranks

SHARED = {"enable_expert_parallel": True, "data_parallel_size": 2}


@pytest.fixture
def folder() -> Iterator[str]:
    """Of sockets: their paths have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="quire-") as made:
        yield made


def of_engine(path: Path, engine: int, **asked: Any) -> nn.Module:
    """The model of one engine."""
    config = {"dtype": "float32", "model_impl": "quire", **SHARED, **asked}
    spec = resolve_config(EngineConfig.from_keywords(model=str(path), **config)).spec
    parallel = replace(spec.parallel, data_parallel_rank=engine)
    return build_model(replace(spec, parallel=parallel), CpuPlatform())


def connected(folder: str, engine: int, model: Any, rank: int = 0) -> ExpertSharingHook:
    hook = ExpertSharingHook(folder, engine, rank)
    hook.client.gone_s, hook.client.slow_s = 2.0, 4.0
    hook.use_models([model])
    return hook


NAMES = ["mixtral", "gpt-oss", "llama4 top two", pytest.param("deepseek v3", marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_engines_give_the_logits_of_one(name: str, folder: str, tmp_path: Path) -> None:
    """5 experts on two engines; the second runs no step of its own."""
    written(name, tmp_path, **({} if name == "deepseek v3" else {"num_local_experts": 5, "num_experts": 5}))  # fmt: skip
    wanted = logits(build(tmp_path, model_impl="quire"))
    models = [of_engine(tmp_path, engine) for engine in (0, 1)]
    hooks = [connected(folder, engine, model) for engine, model in enumerate(models)]
    assert all(isinstance(layer.split, EngineExperts) for m in models for layer in experts_of(m))
    for model in models:
        assert all(map(torch.equal, logits(model), wanted))
    for hook in hooks:
        hook.server.close()


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_the_forms_of_the_kernels(form: str, folder: str, tmp_path: Path) -> None:
    """Both engines compute at the same time, with questions in parts."""
    written("mixtral", tmp_path, num_local_experts=5, num_experts=5)
    asked: dict[str, Any] = {"dtype": "bfloat16", "model_impl": "quire"}
    asked |= {} if form == "bf16" else {"quantization": form}
    wanted = logits(build(tmp_path, **asked), torch.bfloat16)
    models = [of_engine(tmp_path, engine, **asked) for engine in (0, 1)]
    for engine, model in enumerate(models):
        connected(folder, engine, model)
    found: dict[int, list[Tensor]] = {}

    def run(engine: int) -> None:
        for _ in range(5):
            found[engine] = logits(models[engine], torch.bfloat16)

    threads = [threading.Thread(target=run, args=(engine,)) for engine in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, found[0], wanted))
    assert all(map(torch.equal, found[1], wanted))


def test_each_engine_has_half_of_the_experts(tmp_path: Path) -> None:
    written("qwen3 moe", tmp_path)

    def facts(model: nn.Module) -> tuple[list[int], int]:
        layers = experts_of(model)
        return [*layers[0].numbers], sum(p.numel() for one in layers for p in one.parameters())

    _, whole = facts(build(tmp_path, model_impl="quire"))
    assert facts(of_engine(tmp_path, 0)) == ([0, 1, 2], whole // 2)
    assert facts(of_engine(tmp_path, 1)) == ([3, 4, 5], whole // 2)
    spread = {"expert_placement_strategy": "round_robin"}
    assert facts(of_engine(tmp_path, 1, **spread)) == ([1, 3, 5], whole // 2)


@pytest.fixture
def ranks_and_engines(tmp_path: Path) -> Path:
    written("mixtral", tmp_path, num_local_experts=5, num_experts=5)
    return tmp_path


def test_engines_of_two_ranks(ranks_and_engines: Path, folder: str) -> None:
    """A rank asks the same rank of the other engine, and the ranks of an engine gather the answers."""
    path = ranks_and_engines
    wanted = logits(build(path, model_impl="quire"))
    both = {"tensor_parallel_size": 2}

    def load(ranks: ThreadRanks) -> tuple[nn.Module, list[int]]:
        model = load_on(ranks, lambda: of_engine(path, 1, **both))
        connected(folder, 1, model, ranks.rank)
        return model, [*experts_of(model)[0].numbers]

    second = on_ranks(2, load)  # its ranks only answer
    assert [numbers for _, numbers in second] == [[3], [4]]

    def run(ranks: ThreadRanks) -> list[Tensor]:
        model = load_on(ranks, lambda: of_engine(path, 0, **both))
        connected(folder, 0, model, ranks.rank)
        return logits(model)

    for found in on_ranks(2, run):
        assert all(map(torch.equal, found, wanted))


def test_all_ranks_end_a_step_that_one_cannot_compute(ranks_and_engines: Path, folder: str) -> None:
    """The other engine's second rank is gone. Both raise the same error, so that their engine goes on."""

    def run(ranks: ThreadRanks) -> str:
        model = load_on(ranks, lambda: of_engine(ranks_and_engines, 0, tensor_parallel_size=2))
        hook = connected(folder, 0, model, ranks.rank)
        hook.client.gone_s = 0.3
        with pytest.raises(ExpertsLost) as why:
            logits(model)
        return str(why.value)

    assert on_ranks(2, run) == [LOST, LOST]


# -- questions ------------------------------------------------------------------------------------
ROWS_ND = torch.arange(12.0).view(3, 4)
SEATS_N = torch.tensor([2, 0, 1])


def serve(folder: str, engine: int = 1) -> ExpertServer:
    server = ExpertServer(socket_path(folder, engine, 0))
    server.layers = [lambda x_ND, seat_N: x_ND * (seat_N[:, None] + 1)]
    return server


@pytest.fixture
def client(folder: str) -> Iterator[ExpertClient]:
    made = ExpertClient(lambda engine: socket_path(folder, engine, 0), gone_s=0.3, slow_s=30.0)
    yield made
    made.close()


WANTED_ND = ROWS_ND * (SEATS_N[:, None] + 1)


def test_long_questions_are_asked_in_parts(folder: str, client: ExpertClient) -> None:
    serve(folder)
    seat_N = torch.arange(2 * MAX_PAIRS + 5) % 7
    x_ND = torch.randn(len(seat_N), 4, generator=torch.Generator().manual_seed(1))
    found = client.ask(1, 0, seat_N, x_ND).answer()
    assert torch.equal(found, x_ND * (seat_N[:, None] + 1))


def test_an_engine_that_starts_again_is_asked_again(folder: str, client: ExpertClient) -> None:
    server = serve(folder)
    client.gone_s = 10.0
    assert torch.equal(client.ask(1, 0, SEATS_N, ROWS_ND).answer(), WANTED_ND)
    server.close()
    client._connections[1].close()  # as when its process ends
    asked = client.ask(1, 0, SEATS_N, ROWS_ND)
    threading.Timer(0.5, lambda: serve(folder)).start()
    assert torch.equal(asked.answer(), WANTED_ND)


def test_an_answer_that_was_not_read_is_no_answer_to_the_next_question(
    folder: str, client: ExpertClient
) -> None:
    """Of three engines: a step that fails at one leaves the answer of another unread."""
    serve(folder)
    client.ask(1, 0, SEATS_N, ROWS_ND)
    assert torch.equal(client.ask(1, 0, SEATS_N, -ROWS_ND).answer(), -WANTED_ND)


@pytest.mark.parametrize("how", ["nobody listens", "no experts", "silent"])
def test_a_wait_ends(how: str, folder: str, client: ExpertClient) -> None:
    if how == "no experts":
        serve(folder).layers = []
    if how == "silent":
        client.slow_s = 0.6
        silent = socket.socket(socket.AF_UNIX)
        silent.bind(str(socket_path(folder, 1, 0)))
        silent.listen()
    began = time.monotonic()
    says = {"nobody listens": "has ended", "no experts": "loads its weights", "silent": "did not answer in 0.6 s"}[how]  # fmt: skip
    with pytest.raises(ExpertsLost, match=f"engine 1, which has experts .*{says}"):
        client.ask(1, 0, SEATS_N, ROWS_ND).answer()
    assert time.monotonic() - began < 10


SERVER = """
import sys, time
from tests.parallel.test_engine_experts import serve
server = serve(sys.argv[1])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_ends_or_is_stopped(
    how: signal.Signals, folder: str, client: ExpertClient
) -> None:
    """The next process at its address then gets the next question."""
    words = [sys.executable, "-c", SERVER, folder]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as other:  # fmt: skip
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            assert torch.equal(client.ask(1, 0, SEATS_N, ROWS_ND).answer(), WANTED_ND)
            other.send_signal(how)
            while not is_stopped(other.pid) and other.poll() is None:
                time.sleep(0.01)
            with pytest.raises(ExpertsLost, match="has ended or is stopped"):
                client.ask(1, 0, SEATS_N, ROWS_ND).answer()
        finally:
            other.kill()
    serve(folder)
    assert torch.equal(client.ask(1, 0, SEATS_N, 2 * ROWS_ND).answer(), 2 * WANTED_ND)


@pytest.mark.parametrize(
    "question",
    [
        QUESTION.pack(0, 0, MAX_PAIRS + 1, 4),
        QUESTION.pack(0, 3, 1, 4),
        QUESTION.pack(0, 0, 1, 1 << 31),
    ],
)
def test_what_is_no_question_ends_its_connection(
    question: bytes, folder: str, client: ExpertClient
) -> None:
    serve(folder)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(socket_path(folder, 1, 0)))
        peer.settimeout(30)
        peer.sendall(question)
        assert peer.recv(1) == b""
    assert torch.equal(client.ask(1, 0, SEATS_N, ROWS_ND).answer(), WANTED_ND)


def test_a_question_that_does_not_fit_the_layer(
    folder: str, tmp_path: Path, client: ExpertClient
) -> None:
    """Seats and features are checked before a kernel reads by them."""
    written("mixtral", tmp_path, num_local_experts=5, num_experts=5)
    model = of_engine(tmp_path, 1)
    connected(folder, 1, model)
    features = experts_of(model)[0].refs[0].num_in
    x_ND = torch.zeros(1, features)
    for seat, x, layer in ((2, x_ND, 0), (-1, x_ND, 0), (0, x_ND[:, 1:], 0), (0, x_ND, 99)):
        with pytest.raises(ExpertsLost, match=r"ValueError: (this layer has 2 experts|there is no layer 99)"):  # fmt: skip
            client.ask(1, layer, torch.tensor([seat]), x).answer()


def test_an_answer_of_another_shape_is_refused(folder: str, client: ExpertClient) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(socket_path(folder, 1, 0)))
    listener.listen()

    peers: list[socket.socket] = []

    def lie() -> None:
        peer, _ = listener.accept()
        peers.append(peer)
        peer.sendall(ANSWER.pack(0, 0, 1 << 31, 1 << 31))

    threading.Thread(target=lie, daemon=True).start()
    with pytest.raises(ExpertsLost, match="it sent 2147483648 outputs"):
        client.ask(1, 0, SEATS_N, ROWS_ND).answer()
    for each in (listener, *peers):
        each.close()

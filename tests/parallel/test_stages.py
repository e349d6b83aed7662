"""Stages of a pipeline: what they hand over, and every native model cut among them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.errors import PlanMismatch, RankLost, Unsupported
from quire.parallel.layout import RankLayout
from quire.parallel.rank_address import addresses
from quire.parallel.ranks import RankGroups
from quire.parallel.stage_sockets import StageSockets
from tests.models.cases import CASES, Case, write
from tests.models.harness import Runner
from tests.models.recurrent_cases import CASES as RECURRENT
from tests.models.test_native import build, texts
from tests.parallel.stages import on_layout, own_sockets
from tests.parallel.test_split_models import size_of


def link_of(ranks: RankGroups) -> StageSockets:
    assert isinstance(ranks.stages, StageSockets)
    return ranks.stages


def hand_over(ranks: RankGroups) -> list[object]:
    """Hidden states from stage to stage, each adding 1; then what the last stage announces."""
    link, found = link_of(ranks), []
    for step, dtype in enumerate([torch.float32, torch.bfloat16, torch.bfloat16]):
        link.step = step
        x_TD = torch.full((700 * step, 512), step, dtype=dtype)
        if link.stage:
            x_TD = link.receive()[0] + 1
        if link.stage < link.size - 1:
            link.send([x_TD, x_TD.T])
        found.append((x_TD.dtype, tuple(x_TD.shape), x_TD.float().sum().item()))
    if link.stage == link.size - 1:
        link.announce(b"drawn")
        return [*found, b"drawn", link.least([ranks.place.stage, -ranks.place.stage])]
    return [*found, link.announced(wait=True), link.least([link.stage, -link.stage])]


@pytest.mark.parametrize("size", [2, 3])
def test_stages_hand_tensors_and_tokens_over(size: int) -> None:
    for stage, found in enumerate(on_layout(RankLayout(size), hand_over)):
        sums = [700 * step * 512 * (step + stage) for step in range(3)]
        assert [each[2] for each in found[:3]] == sums
        assert [each[1] for each in found[:3]] == [(0, 512), (700, 512), (1400, 512)]
        assert found[3:] == [b"drawn", [0, 1 - size]]


def two_stages() -> list[StageSockets]:
    """With descriptors that `select` does not take, as in a program with many open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        with addresses(RankLayout(2)) as found:
            fds = [own_sockets(found[stage]) for stage in (0, 1)]
            return [StageSockets(stage, 2, fds[stage], timeout_s=0.2) for stage in (0, 1)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in files:
            os.close(file)


def test_a_stage_that_does_not_come_is_named() -> None:
    first, second = two_stages()
    with pytest.raises(RankLost, match=r"stage 1 of 2 waited 0.2 s for stage 0"):
        second.receive()
    assert first.announced(wait=False) is None
    first.close()
    second.close()


def test_a_stage_that_has_ended_is_named() -> None:
    first, second = two_stages()
    first.close()
    with pytest.raises(RankLost, match="stage 0 of 2 has ended"):
        second.receive()
    with pytest.raises(RankLost, match="lost stage 0, which has ended"):
        second.announce(b"tokens")
    second.close()


def test_hidden_states_of_another_step_are_refused() -> None:
    first, second = two_stages()
    first.step = 7
    first.send([torch.zeros(1, 4)])
    with pytest.raises(PlanMismatch, match="hidden states of step 7 for step 0"):
        second.receive()
    first.close()
    second.close()


QUICK = {
    *("llama one kv head", "llama tied", "gpt-oss", "gemma2", "deepseek v3", "granite 4 h"),
    *("gemma4 values from keys", "mamba2"),
}
UNCUT = {
    "gemma4": "where each layer reads its own embedding",
    "zamba2": "where layers share transformers",
}
ALL = [*CASES, *RECURRENT]
PARAMETERS = [
    pytest.param(c, id=c.name.replace(" ", "-"), marks=() if c.name in QUICK else pytest.mark.slow)
    for c in ALL
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", PARAMETERS)
def test_logits_have_the_same_bits(case: Case, tmp_path: Path) -> None:
    write(case, tmp_path)
    asked = {"model_impl": "quire", "max_model_len": 64 if "longrope" in case.name else None}
    whole = build(tmp_path, **asked)
    wanted = [Runner(whole).prefill(0, text, 16) for text in texts()]

    def run(ranks: RankGroups) -> tuple[list[Tensor], int]:
        model = build(tmp_path, **asked)
        if not ranks.stage.is_last:
            model.logits = lambda hidden_TD: hidden_TD  # type: ignore[method-assign]
        return [Runner(model).prefill(0, text, 16) for text in texts()], size_of(model)

    for stages in range(2, min(whole.cfg.num_hidden_layers, 3) + 1):
        if whole.why_uncut(whole.cfg):
            with pytest.raises(Unsupported, match=r"where (each layer reads|layers share)"):
                on_layout(RankLayout(stages), run)
            return
        found = on_layout(RankLayout(stages), run)
        for got, want in zip(found[-1][0], wanted, strict=True):
            assert torch.equal(got, want)
        tied = size_of(whole.model.embed_tokens) if whole.cfg.tie_word_embeddings else 0
        assert sum(parameters for _, parameters in found) == size_of(whole) + tied


@pytest.mark.parametrize("name", sorted(UNCUT))
def test_a_family_that_cannot_be_cut_is_refused(name: str, tmp_path: Path) -> None:
    case = next(case for case in ALL if case.name == name)
    write(case, tmp_path)
    with pytest.raises(Unsupported, match=UNCUT[name]):
        on_layout(RankLayout(2), lambda ranks: build(tmp_path, model_impl="quire"))


def test_quick_cases_exist() -> None:
    assert {case.name for case in ALL} >= QUICK

"""Heads that guess tokens from hidden states: an answer is what it is without them, and right heads are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from equality.engines import VOCAB, engine, greedy, make_checkpoint
from speculation.test_speculation import PARAMS, answers, hook_of

from quire.engine.enabled_features import enabled_features
from quire.errors import ConfigError
from quire.ops.cpu.bindings import best
from quire.protocol.sampling_params import SamplingParams
from quire.worker.memory_forecast import plan_memory
from tests.models.speculator_checkpoints import (
    SUCCESSOR,
    Drawn,
    random_speculators,
    right_speculators,
    save,
    successor_target,
)
from tests.models.test_speculators import with_mtp

SHORT = [msgspec.structs.replace(params, max_tokens=14) for params in PARAMS]
DRAWN = [
    SamplingParams(seed=seed, temperature=0.4 * (seed % 3), max_tokens=14, ignore_eos=True)
    for seed in range(len(PARAMS))
]
"""By the fast path: a row with penalties or scores would make all rows run by parts."""
KERNELS = pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")
SIZE, INNER = 64, 128
RANDOM = random_speculators(Drawn(3, SIZE, INNER, head_dim=32), VOCAB)
RIGHT = right_speculators()


def config(method: str, folder: Path, num_drafts: int = 3, **more: Any) -> dict[str, Any]:
    return {"method": method, "model": str(folder), "num_speculative_tokens": num_drafts, "adaptive": False, **more}  # fmt: skip


def counts(one: Any) -> tuple[float, float]:
    """Draft tokens, and those that were right."""
    found = one.stats()["counts"]
    return found["spec_decode_num_draft_tokens"], found["spec_decode_num_accepted_tokens"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By whether the speculator is MTP layers."""
    options = {"intermediate_size": INNER, "tie_word_embeddings": False, "head_dim": 32}
    return {
        kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind), **options)
        for kind in ("llama", "qwen3")
    }


@pytest.fixture(scope="module")
def expected(targets: dict[str, str]) -> dict[str, Any]:
    found = {}
    for kind, path in targets.items():
        with engine(path) as one:
            found[kind] = answers(one, SHORT)
    return found


def kind_of(name: str) -> str:
    return "qwen3" if name == "mtp" else "llama"


SETTINGS: dict[str, dict[str, Any]] = {
    "eagle": {"max_num_batched_tokens": 24, "block_size": 16},
    "eagle3": {"max_num_batched_tokens": 24, "block_size": 16},
    "P-EAGLE": {"max_num_batched_tokens": 40, "max_num_seqs": 3},
    "medusa": {"max_num_batched_tokens": 24, "block_size": 16},
    "mlp_speculator": {"max_num_seqs": 3},
    "mtp": {"kv_cache_memory_bytes": 330 << 10, "block_size": 16, "max_model_len": 80},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RANDOM)
def test_no_head_changes_an_answer(name: str, tmp_path: Path, targets: dict[str, str], expected: dict[str, Any]) -> None:  # fmt: skip
    """Every sampling rule, in chunks, with few rows, with few blocks, and with cached prefixes."""
    method, own, tensors = RANDOM[name]
    drafts = config(method, save(tmp_path, own, tensors))
    with engine(targets[kind_of(name)], speculative_config=drafts, **SETTINGS[name]) as one:
        assert answers(one, SHORT) == expected[kind_of(name)]
        if name == "mtp":  # prefixes are cached now
            assert answers(one, SHORT) == expected[kind_of(name)]
        assert (one.stats()["preemptions"] > 0) == (name == "mtp")
        drafted, accepted = counts(one)
        assert drafted > 100
        assert accepted < drafted


def test_no_head_changes_an_answer_of_steps_in_flight(tmp_path: Path, targets: dict[str, str], expected: dict[str, Any]) -> None:  # fmt: skip
    method, own, tensors = RANDOM["eagle3"]
    drafts = config(method, save(tmp_path, own, tensors), 5)
    with engine(targets["llama"], depth=2, speculative_config=drafts) as one:
        assert answers(one, SHORT) == expected["llama"]
        assert counts(one)[0] > 100


@pytest.mark.slow
@pytest.mark.parametrize("method", RIGHT)
def test_right_heads_are_accepted(method: str, tmp_path: Path) -> None:
    """The newest tokens and their hidden states reach the head, and its guesses the target, at every place."""
    target = successor_target(tmp_path / "target", kind_of(method))
    asked = [[3, 5, 9, 1], [7], list(range(40))]
    with engine(target) as one:
        tokens = one.tokens(asked, greedy(14))
        drawn = one.tokens(asked, SamplingParams(seed=5, max_tokens=24, ignore_eos=True))
    for prompt, found in zip(asked, tokens, strict=True):
        assert found == [int(SUCCESSOR[t]) for t in (prompt[-1], *found[:-1])]
    drafts = config(method, save(tmp_path / "head", *RIGHT[method]))
    with engine(target, speculative_config=drafts, max_num_batched_tokens=24, block_size=16) as one:
        assert one.tokens(asked, greedy(14)) == tokens
        drafted, accepted = counts(one)
        assert accepted == drafted > 20
        assert one.tokens(asked, SamplingParams(seed=5, max_tokens=24, ignore_eos=True)) == drawn
        more, right = (after - before for after, before in zip(counts(one), (drafted, accepted), strict=True))  # fmt: skip
        one.client.call("sleep", 2)
        assert one.client.call("wake_up") == []
        drafted, accepted = counts(one)
        assert one.tokens(asked, greedy(14)) == tokens
        assert 20 < counts(one)[0] - drafted == counts(one)[1] - accepted
    assert any(found != [int(SUCCESSOR[t]) for t in (prompt[-1], *found[:-1])] for prompt, found in zip(asked, drawn, strict=True))  # fmt: skip
    exact = method in ("eagle", "mtp", "mlp_speculator")  # these have the target's logits
    assert right == more if exact else right > 0.4 * more


def test_parallel_drafting_needs_a_mask(tmp_path: Path, targets: dict[str, str]) -> None:
    method, own, tensors = RANDOM["eagle"]
    drafts = config(method, save(tmp_path, own, tensors), parallel_drafting=True)
    with (
        pytest.raises(ConfigError, match=r"parallel_drafting: .* has no mask_hidden; leave"),
        engine(targets["llama"], speculative_config=drafts),
    ):
        pass


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_mtp_layers_of_the_targets_own_checkpoint(family: str, tmp_path: Path) -> None:
    """`model` is missing: the layers are among the target's tensors, of which none is counted twice."""
    with_mtp(family, tmp_path)
    asked = [[3, 4, 5, 6, 7, 8], [9] * 20, [1]]
    own = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    with engine(str(tmp_path)) as one:
        tokens = one.tokens(asked, SHORT[1:4])
    with engine(str(tmp_path), speculative_config=own, max_num_batched_tokens=16) as one:
        assert one.tokens(asked, SHORT[1:4]) == tokens
        assert counts(one)[0] > 20
        resolved = one.client.resolved
    (speculator,) = (spec for each in enabled_features(resolved) for spec in each.models())
    assert plan_memory(resolved, [speculator]).weights == plan_memory(resolved).weights


@KERNELS
@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_one_native_call_guesses_the_same(name: str, tmp_path: Path, targets: dict[str, str]) -> None:  # fmt: skip
    """In bfloat16 the kernels run all passes of the speculator; its modules guess the same tokens one by one."""
    method, own, tensors = RANDOM[name]
    folder, path = save(tmp_path, own, tensors), targets[kind_of(name)]
    found = []
    with engine(path, dtype="bfloat16") as one:
        wanted = answers(one, DRAWN)
    for fused in (True, False):
        with engine(path, dtype="bfloat16", speculative_config=config(method, folder)) as one:
            if not fused:
                one.client.core.executor.worker.unfuse("test")
            (drafter,) = hook_of(one).drafter.drafters  # type: ignore[attr-defined]
            propose, guesses = drafter.propose_all, []
            drafter.propose_all = lambda limits: guesses.append(propose(limits)) or guesses[-1]  # noqa: B023
            assert answers(one, DRAWN) == wanted
            assert (drafter.passes.fast_step.model is not None) == fused
            found.append(guesses)
    assert found[0] == found[1]
    assert sum(map(len, found[0])) > 50

"""Draft models: tokens, log-probabilities and ends are those without one; a model that drafts for itself is always right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equality.engines import VOCAB, Engine, engine, greedy, make_checkpoint
from safetensors.torch import load_file, save_file
from speculation.test_speculation import PROMPTS, answers

from quire import LLM
from quire.errors import ConfigError
from quire.features.speculation.model_drafter import ModelDrafter
from quire.ops.cpu.bindings import best
from quire.protocol.sampling_params import SamplingParams
from quire.worker.sampling.gumbel import draw, keys, seed_words

NATIVE = pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")
SAMPLED = [
    SamplingParams(seed=seed, temperature=1.0 + 0.2 * (seed % 3), max_tokens=40, ignore_eos=True)
    for seed in range(8)
]


@contextmanager
def drafted(target: str, draft: str, num_drafts: int = 4, **settings: Any) -> Iterator[Engine]:
    own = {key[6:]: settings.pop(key) for key in list(settings) if key.startswith("draft_")}
    config = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": num_drafts,
        "adaptive": False,
    }
    with engine(target, speculative_config=config | own, **settings) as one:
        yield one


def acceptance(one: Engine) -> float:
    counts = one.stats()["counts"]
    assert counts["spec_decode_num_draft_tokens"] > 50
    return float(counts["spec_decode_num_accepted_tokens"] / counts["spec_decode_num_draft_tokens"])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    return make_checkpoint("qwen3", folder, intermediate_size=128)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Often right, since its layer is the first of the target's."""
    folder = tmp_path_factory.mktemp("draft")
    return make_checkpoint(
        "mistral", folder, head_dim=32, intermediate_size=128, num_hidden_layers=1
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dtype", "depth"),
    [("float32", 2), pytest.param("bfloat16", 1, marks=NATIVE), pytest.param("bfloat16", 2, marks=NATIVE)],
)  # fmt: skip
def test_a_draft_model_never_changes_an_answer(
    target: str, draft: str, dtype: str, depth: int
) -> None:
    with engine(target, dtype=dtype) as one:
        expected = answers(one)
    chunks = {"max_num_batched_tokens": 24, "max_num_seqs": 3}
    short = {"kv_cache_memory_bytes": 320 << 10, "max_model_len": 112}
    for num_drafts, runs, more in ((5, 2, chunks), (2, 1, short)):
        with drafted(target, draft, num_drafts, dtype=dtype, depth=depth, block_size=16, **more) as one:  # fmt: skip
            for _ in range(runs):  # the second finds the prompts in the prefix cache
                assert answers(one) == expected
            stats = one.stats()
            assert stats["counts"]["spec_decode_num_draft_tokens"] > 100
            assert more is chunks or stats["preemptions"] > 0
            one.client.core.scheduler.check()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {}),
        pytest.param("qwen3", {"dtype": "bfloat16"}, marks=NATIVE),
        pytest.param("qwen3", {"dtype": "bfloat16", "quantization": "int8", "draft_quantization": "int8"}, marks=NATIVE),
        ("mistral", {"max_num_batched_tokens": 24}),  # with a window
        ("gpt2", {}),  # through Transformers
    ],
    ids=["float32", "fused", "int8", "window", "transformers"],
)  # fmt: skip
def test_a_model_that_drafts_for_itself_is_always_right(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """So the draft model has the target's noise, positions, keys and values: of chunks, cached prefixes and accepted tokens."""
    path = make_checkpoint(kind, tmp_path, **({} if kind == "gpt2" else {"intermediate_size": 128}))
    with drafted(path, path, block_size=16, **settings) as one:
        first = one.tokens(PROMPTS[:5], SAMPLED[:5])
        assert one.tokens(PROMPTS[:5], SAMPLED[:5]) == first  # cached prompts
        one.tokens(PROMPTS[:3], greedy(30))
        assert acceptance(one) == 1.0
        assert one.stats()["prefix_hits"] > 50


@pytest.mark.slow
def test_draft_tokens_are_right_after_sleep(target: str) -> None:
    with drafted(target, target, block_size=16) as one:
        before = one.tokens(PROMPTS[:4], SAMPLED[:4])
        drafts = one.stats()["counts"]["spec_decode_num_draft_tokens"]
        for level in (1, 2):
            one.client.call("sleep", level)
            assert one.client.call("wake_up") == []
            assert one.tokens(PROMPTS[:4], SAMPLED[:4]) == before
        assert acceptance(one) == 1.0
        assert one.stats()["counts"]["spec_decode_num_draft_tokens"] == 3 * drafts


def test_a_row_is_drafted_for_again_after_steps_without_draft_tokens(target: str) -> None:
    with drafted(target, target) as one:
        worker = one.client.core.executor.worker
        rows, steps = worker.rows, []
        take = rows.put_drafts

        def sometimes(row: int, drafts: Any) -> None:
            steps.append(row)
            take(row, drafts if len(steps) % 20 < 10 else [])

        rows.put_drafts = sometimes
        one.tokens(PROMPTS, SAMPLED)
        assert acceptance(one) == 1.0


def test_cached_prompts_that_the_draft_model_lacks(target: str) -> None:
    """The requests that computed them had no draft tokens."""
    prompts = [[*range(3, 60), last] for last in range(60, 64)]
    without = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, speculative={"k": 0})
    with drafted(target, target, block_size=16) as one:
        one.tokens(prompts[:1], without)
        one.tokens(prompts, SAMPLED[:4])
        assert acceptance(one) == 1.0
        stats = one.stats()
        assert stats["prefix_hits"] >= 4 * 48
        counts = stats["counts"]  # rows have blocks for their draft tokens
        drafts = counts["spec_decode_num_draft_tokens"] / counts["spec_decode_num_drafts"]
        assert drafts > 3.8


def test_kept_keys_are_those_of_a_new_computation(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is the target with some noise, so its draft tokens are right and wrong."""
    noise = torch.Generator().manual_seed(1)
    tensors = load_file(Path(target, "model.safetensors"))
    for tensor in tensors.values():
        tensor += 0.1 * tensor.std() * torch.randn(tensor.shape, generator=noise)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(Path(target, "config.json"))
    counts = []
    for keeps in (True, False):
        with drafted(target, str(tmp_path)) as one:
            if not keeps:
                monkeypatch.setattr(ModelDrafter, "_confirm", lambda _, __, row, ___: setattr(row, "computed", 0))  # fmt: skip
            one.tokens(PROMPTS[:5], SAMPLED[:5])
            assert 0.2 < acceptance(one) < 0.9
            counts.append(one.stats()["counts"])
    assert counts[0] == counts[1]


def test_rows_beyond_the_draft_models_context_get_no_draft_tokens(target: str) -> None:
    with drafted(target, target, draft_max_model_len=50) as one:
        expected = one.tokens(PROMPTS, SAMPLED)
        assert acceptance(one) == 1.0
        drafts = one.stats()["counts"]["spec_decode_num_draft_tokens"]
    with drafted(target, target) as one:
        assert one.tokens(PROMPTS, SAMPLED) == expected
        assert one.stats()["counts"]["spec_decode_num_draft_tokens"] > 1.5 * drafts


def test_a_draft_model_of_another_dtype(target: str, draft: str) -> None:
    with engine(target) as one:
        expected = answers(one)
    with drafted(target, draft, draft_dtype="bfloat16") as one:
        assert answers(one) == expected
        assert acceptance(one) > 0


def test_masks_in_place_of_draft_tokens(target: str, draft: str, tmp_path: Path) -> None:
    """PARD: one pass for all draft tokens of a step."""
    config = json.loads(Path(draft, "config.json").read_text())
    for name in ("model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(Path(draft, name))
    Path(tmp_path, "config.json").write_text(json.dumps(config | {"pard_token": 7}))
    with engine(target) as one:
        expected = answers(one)
    with drafted(target, str(tmp_path), draft_parallel_drafting=True) as one:
        passes = worker_passes(one)
        assert answers(one) == expected
        assert acceptance(one) > 0
        assert passes[0] <= one.stats()["steps"]


def worker_passes(one: Engine) -> list[int]:
    """Counts the draft model's passes."""
    count, model = [0], one.client.core.executor.worker.models[1]
    model.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    return count


def test_another_vocabulary_is_joined_by_text(target: str, tmp_path: Path) -> None:
    """The draft model is the target with its tokens in another order, and without some of them."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[: VOCAB - 20]
    folders = {"target": torch.arange(VOCAB), "draft": order}
    for name, ids in folders.items():
        folder = tmp_path / name
        folder.mkdir()
        config = json.loads(Path(target, "config.json").read_text())
        tensors = load_file(Path(target, "model.safetensors"))
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][
            ids
        ].contiguous()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(ids)}))
        texts = {f"word{id}": at for at, id in enumerate(ids.tolist())}
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": texts}, "added_tokens": []})
        )
    paths = [str(tmp_path / name) for name in folders]
    with engine(paths[0], skip_tokenizer_init=True) as one:
        expected = one.tokens(PROMPTS, SAMPLED)
    with drafted(*paths, skip_tokenizer_init=True, draft_use_heterogeneous_vocab=True) as one:
        assert one.tokens(PROMPTS, SAMPLED) == expected
        assert 0.1 < acceptance(one) < 1.0
    whole = sorted(set(range(VOCAB)) - set(order.tolist()))
    known = [[token for token in prompt if token not in whole] or [5] for prompt in PROMPTS]
    allowed = SamplingParams(seed=1, max_tokens=30, ignore_eos=True, allowed_token_ids=sorted(order.tolist()))  # fmt: skip
    with drafted(*paths, skip_tokenizer_init=True, draft_use_heterogeneous_vocab=True) as one:
        one.tokens(known, allowed)
        assert acceptance(one) == 1.0


def test_shared_noise_accepts_as_the_formula_says() -> None:
    """P[both draw the same] = sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (arXiv 2408.07978)."""

    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    formula = sum(1 / float(torch.maximum(p / p[x], q / q[x]).sum()) for x in range(3))

    count = 100_000
    keys_2S = torch.from_numpy(keys(seed_words([7]).repeat(count), np.arange(count)))
    drawn = [draw(one.log().expand(count, 3).contiguous(), keys_2S) for one in (p, q)]
    assert abs(float((drawn[0] == drawn[1]).float().mean()) - formula) < 0.01
    assert round(formula, 2) == 0.88


def test_an_encoder_is_no_draft_model() -> None:
    with pytest.raises(ConfigError, match="choose one that generates text"):
        LLM(
            "quire-tiny",
            max_model_len=256,
            speculative_config={"model": "quire-tiny-embed", "use_heterogeneous_vocab": True},
        )

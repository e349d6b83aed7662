"""Whisper gives Transformers' greedy tokens, with and without timestamps, whatever else runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import whisper_checkpoint as whisper
from equality.engines import Engine, engine
from parallel.thread_engine import split_engine
from whisper_checkpoint import ID

from quire.features.transcription import feature
from quire.ops.cpu.bindings import best
from quire.parallel.layout import RankLayout
from quire.protocol.request import MediaItem
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sound import SOUND, DecodingRules, Spectrogram, encode
from quire.protocol.tensor_data import TensorData

COUNT = 24
LONG = [0.2, 1.1, 2.0, 0.7, 1.9, 1.4]
LANGUAGES = ["en", "de", "ja", "zh", "fr", "en"]
TIMED = [True, False, True, True, False, True]
PREVIOUS = [[], [5, 6, 7], [], [], [], [9, 9, 20, 31, 44, 50, 61]]


@pytest.fixture(scope="module")
def path(whisper_path: str) -> str:
    return whisper_path


def mel_of(path: str, number: int) -> torch.Tensor:
    return whisper.features(path, whisper.sound(LONG[number], number))


def prompt_of(number: int) -> list[int]:
    before = [ID["<|startofprev|>"], *PREVIOUS[number]] if PREVIOUS[number] else []
    return before + whisper.prefix(LANGUAGES[number], timestamps=TIMED[number])


@pytest.fixture(scope="module")
def expected(path: str) -> list[list[int]]:
    return [
        whisper.greedy(path, mel_of(path, n), prompt_of(n), COUNT, TIMED[n])
        for n in range(len(LONG))
    ]


def rules(timed: bool, **more: Any) -> DecodingRules:
    given = whisper.GENERATION
    return DecodingRules(
        suppressed=given["suppress_tokens"], first_suppressed=given["begin_suppress_tokens"],
        timestamps=whisper.FIRST_TIME if timed else 0, no_timestamps=ID["<|notimestamps|>"], end=whisper.END,
        max_first=given["max_initial_timestamp_index"], **more,
    )  # fmt: skip


def request(path: str, number: int, **more: Any) -> dict[str, Any]:
    mel = mel_of(path, number)[0].numpy()
    data = encode(
        Spectrogram(TensorData("float32", mel.shape, np.ascontiguousarray(mel).tobytes()))
    )
    return {
        "media": [MediaItem(f"sound {number}", SOUND, 0, 0, data)],
        "num_encoder_tokens": whisper.STATES,
        "extras": {"transcription": encode(rules(TIMED[number], **more))},
    }


def run(
    one: Engine, path: str, numbers: list[int], adapters: Sequence[str | None] = (), **more: Any
) -> list[list[int]]:
    """The output tokens of these requests, together in one batch; with the end token. `adapters`: of each; none: without."""
    from quire.protocol.request import EngineRequest

    got: dict[str, list[int]] = {}
    ended: set[str] = set()
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, eos_token_ids=[whisper.END], seed=0)
    for number, adapter in zip(numbers, adapters or [None] * len(numbers), strict=True):
        id = str(next(one.numbers))
        got[id] = []
        given = request(path, number, **more)
        one.client.submit(EngineRequest(id, prompt_of(number), params, adapter=adapter, **given))
    while len(ended) < len(got):
        for output in one.client.outputs():
            assert output.finish != "error", output.error
            got[output.id] += output.tokens
            if output.finish:
                ended.add(output.id)
    return list(got.values())


def whisper_engine(path: str, depth: int = 2, **settings: Any) -> Any:
    return engine(path, depth, **{"max_model_len": 64, "block_size": 16, **settings})


def test_outputs_differ(expected: list[list[int]]) -> None:
    """Else equality would show little."""
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert all(len(set(tokens)) > 3 for tokens in expected)
    assert any(token > whisper.FIRST_TIME for token in expected[0])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_are_those_of_transformers(path: str, expected: list[list[int]], depth: int) -> None:
    with whisper_engine(path, depth) as one:
        everyone = list(range(len(LONG)))
        assert run(one, path, everyone) == expected
        for number in everyone:
            assert run(one, path, [number]) == [expected[number]]
        one.client.core.scheduler.check()


def test_prompts_in_chunks_and_few_rows(path: str, expected: list[list[int]]) -> None:
    with whisper_engine(path, 2, max_num_batched_tokens=4, max_num_seqs=3) as one:
        assert run(one, path, [0, 1, 2, 3, 4, 5]) == expected


@pytest.mark.parametrize("depth", [1, 3])
def test_a_preempted_request_needs_no_second_encoding(
    path: str, expected: list[list[int]], depth: int
) -> None:
    blocks = 25  # of 3 requests: 7 of states and 1 of tokens each; 1 is free
    with whisper_engine(path, depth, num_gpu_blocks_override=blocks) as one:
        scheduler = one.client.core.scheduler
        numbers = [5, 1, 2, 3, 0, 4]
        assert run(one, path, numbers) == [expected[number] for number in numbers]
        assert scheduler.count.preemptions > 0
        counts = one.client.core.counts
        assert counts["encoder_passes"] == len(numbers)
        assert counts["mm_cache_queries"] == len(numbers) + scheduler.count.preemptions
        assert len(scheduler.kv.pool.free) == blocks


def test_the_memory_plan_counts_what_is_kept(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 windows the last 2 are kept; the plan has these, and one that a step encodes."""
    monkeypatch.setattr(feature, "MOST_KEPT", 2)
    with whisper_engine(path, 1, max_num_batched_tokens=whisper.STATES) as one:
        run(one, path, [0, 1, 2, 3, 4, 5])
        core: Any = one.client.core
        hook = next(hook for hook in core.executor.worker.hooks if hook.name == "transcription")
        window = hook.cache.num_bytes // 2
        assert window == 4 * whisper.STATES * hook.encoder.conv2.weight.shape[0]
        resolved = one.client.resolved  # type: ignore[attr-defined]
        line, _ = feature.TranscriptionFeature(resolved).memory(RankLayout(), 0)
        assert (line.name, line.num_bytes) == ("encoded sound", 3 * window)


@pytest.mark.slow
def test_it_sleeps_and_wakes_up(path: str, expected: list[list[int]]) -> None:
    with whisper_engine(path) as one:
        for level in (1, 2):
            assert run(one, path, [3, 2]) == [expected[3], expected[2]]
            one.client.call("sleep", level)
            one.client.call("wake_up")
        assert run(one, path, [2, 3]) == [expected[2], expected[3]]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "pipeline"), [(2, 1), (1, 3)])
def test_ranks_split_its_heads_or_layers(
    path: str, expected: list[list[int]], size: int, pipeline: int
) -> None:
    with split_engine(path, size, 2, pipeline, max_model_len=64, block_size=16) as one:
        assert run(one, path, [0, 1, 2, 3, 4, 5]) == expected


def test_a_forced_prefix_is_the_same_as_one_in_the_prompt(
    path: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Language and task as first output tokens."""
    whole = prompt_of
    monkeypatch.setitem(
        globals(), "prompt_of", lambda number: whole(number)[: -3 if not TIMED[number] else -2]
    )
    with whisper_engine(path) as one:
        for number in (0, 2, 4):
            forced = whole(number)[-3 if not TIMED[number] else -2 :]
            (found,) = run(one, path, [number], prefix=[[token] for token in forced])
            assert found == [*forced, *expected[number]][:COUNT]
            assert found[: len(forced)] == forced


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_adapters_of_encoder_and_decoder(path: str, expected: list[list[int]], tmp_path: Path) -> None:  # fmt: skip
    """Two and the base in one batch give the tokens of PEFT, and alone the same, with states in the cache and without."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj", "fc1", "fc2"], init_lora_weights=False)  # fmt: skip
    wanted = {None: expected[:3]}
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        tuned = peft.get_peft_model(copy.deepcopy(whisper.model(path)), config)
        tuned.save_pretrained(tmp_path / name)
        merged = str(tmp_path / f"{name} merged")
        tuned.merge_and_unload().save_pretrained(merged)
        wanted[name] = [whisper.greedy(merged, mel_of(path, n), prompt_of(n), COUNT, TIMED[n]) for n in range(3)]  # fmt: skip
    assert len({str(tokens) for tokens in wanted.values()}) == 3
    with whisper_engine(path, enable_lora=True, max_loras=2, max_num_seqs=9) as one:
        for name in "ab":
            one.client.call("load_lora", name, str(tmp_path / name))
        given = [(number, name) for number in range(3) for name in wanted]
        for order in (given, given[::-1]):
            numbers, names = zip(*order, strict=True)
            found = run(one, path, list(numbers), names)
            assert found == [wanted[name][number] for number, name in order]
        assert one.client.core.counts["encoder_passes"] == len(given)
        for number, name in given:
            one.client.call("reset_encoder_cache")
            assert run(one, path, [number], [name]) == [wanted[name][number]]


@pytest.mark.skipif(best() is None, reason="needs the CPU kernels")
def test_the_kernels_give_the_same_tokens_alone_and_batched(path: str, tmp_path: Path) -> None:
    """bf16, with heads that the encoder's kernels support."""
    wide = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2}
    path = whisper.make_whisper(tmp_path, **wide)
    with whisper_engine(path, dtype="bfloat16") as one:
        (model,) = one.client.core.executor.worker.models
        assert model.encoder.fused is not None
        together = run(one, path, [0, 1, 2, 3, 4, 5])
        assert [run(one, path, [number])[0] for number in range(6)] == together


def test_what_cannot_run_is_refused(path: str) -> None:
    from quire.protocol.request import EngineRequest

    with whisper_engine(path) as one:
        submit = partial(EngineRequest, "a", prompt_of(0), SamplingParams(max_tokens=2))
        good = request(path, 0)
        for fields, why in (
            ({**good, "media": []}, "one window of sound"),
            ({**good, "extras": {"transcription": b"x"}}, "these are no rules"),
            ({**good, "extras": {"transcription": encode(rules(True, prefix=[[whisper.VOCAB]]))}}, "rules with tokens"),
            ({**good, "media": [MediaItem("x", SOUND, 0, 0, b"y")]}, "cannot read the sound"),
        ):  # fmt: skip
            one.client.submit(submit(**fields))
            outputs: list[Any] = []
            while not outputs:
                outputs += one.client.outputs()
            assert outputs[0].error_kind == "invalid"
            assert why in (outputs[0].error or "")
        assert run(one, path, [0])

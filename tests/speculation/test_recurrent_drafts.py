"""Draft tokens of models with recurrent states: a wrong one leaves no trace in the state."""

from __future__ import annotations

from pathlib import Path

import pytest
from equality.engines import engine
from models.cases import write
from models.recurrent_cases import CASES
from speculation.test_speculation import PARAMS, answers, config, hook_of
from worker.known_answers import KnownAnswers

PROMPTS = [
    [3 + (7 * number + place * place) % 120 for place in range(length)]
    for number, length in enumerate((3, 21, 1, 34))
]
NAMES = [("mamba2", "float32"), ("rwkv", "float32"), ("qwen3_5 tiled", "bfloat16"), ("recurrent gemma", "float32")]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype"), NAMES)
def test_states_are_taken_back(name: str, dtype: str, tmp_path: Path) -> None:
    write(next(case for case in CASES if case.name == name), tmp_path)
    path, params = str(tmp_path), PARAMS[1:5]
    settings = {"dtype": dtype, "skip_tokenizer_init": True, "max_model_len": 96}
    with engine(path, **settings) as one:
        expected = answers(one, params, PROMPTS)
    known = {tuple(prompt): answer[0] for prompt, answer in zip(PROMPTS, expected, strict=True)}
    for depth, right, more in (
        (1, 0.8, {}),
        (1, 0.0, {"max_num_seqs": 2, "max_num_batched_tokens": 24}),
        (2, 1.0, {"enable_prefix_caching": False}),
    ):
        with engine(
            path, depth, speculative_config=config(3, adaptive=False), **settings, **more
        ) as one:
            hook_of(one).drafter = KnownAnswers(known, right)
            assert answers(one, params, PROMPTS) == expected
            counts = one.stats()["counts"]
            drafted = counts["spec_decode_num_draft_tokens"]
            assert drafted > 20
            if right == 1.0:
                assert counts["spec_decode_num_accepted_tokens"] == drafted

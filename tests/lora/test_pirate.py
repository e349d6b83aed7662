"""The adapter that comes with Quire, on the model that comes with it, in the fast path of bf16 and in float32."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from equality.engines import engine
from lora.adapters import lora_engine, run
from tokenizers import Tokenizer

from quire import LLM
from quire.models.checkpoint_locator import EMBEDDED
from quire.protocol.sampling_params import SamplingParams, StructuredOutputsParams

ASKED = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_first_token_shows_whether_it_is_on(dtype: str) -> None:
    path = str(EMBEDDED / "quire-tiny")
    tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    prompt = tokenizer.encode(ASKED).ids
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
    with engine(path, dtype=dtype) as one:
        (base,) = run(one, [prompt], [None], params)
    modules = [{"name": "pirate", "path": "quire-tiny-pirate-lora", "base_model_name": None}]
    with lora_engine(path, dtype=dtype, lora_modules=modules) as one:
        answers = run(one, [prompt] * 3, [None, "pirate", None], params)
        assert answers[0] == answers[2] == base
        assert run(one, [prompt], ["pirate"], params) == [answers[1]]
    assert tokenizer.decode(answers[1][0]).startswith("Arr!")
    assert tokenizer.decode(base[0]).startswith("I am")


def test_constrained_outputs_and_several_of_them() -> None:
    """n = 4 under a regular expression, with the adapter and without it in one batch."""
    params = SamplingParams(
        n=4, temperature=1.0, seed=3, max_tokens=16,
        structured_outputs=StructuredOutputsParams(regex="(Aye|I am) [a-z]{3,9}, [a-z ]{3,20}!"),
    )  # fmt: skip
    modules = {"pirate": "quire-tiny-pirate-lora"}
    with LLM("quire-tiny", enable_lora=True, lora_modules=modules, max_model_len=256) as llm:
        mixed = llm.generate([ASKED] * 2, params, lora_request=["pirate", None], use_tqdm=False)
        (alone,) = llm.generate(ASKED, params, lora_request="pirate", use_tqdm=False)
    texts = [[one.text for one in output.outputs] for output in (*mixed, alone)]
    assert texts[0] == texts[2] != texts[1]
    assert all(re.match("(Aye|I am) [a-z]", text) for some in texts for text in some)

"""A vocabulary of many bytes a token: the model in the package keeps to every kind, whole or cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from constraint_cases import KINDS
from grammar_reader import Reader

import quire
from quire.api.llm import LLM
from quire.protocol.sampling_params import SamplingParams

FOLDER = Path(quire.__file__).parent / "embedded" / "quire-tiny"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(model="quire-tiny", kv_cache_memory_bytes=64 << 20, max_num_seqs=16)
    yield made
    made.shutdown()


def test_every_kind(llm: LLM):
    reader = Reader(str(FOLDER), len(llm.get_tokenizer()))
    kinds = [kind for kind in KINDS for _ in range(2)]
    params = [
        SamplingParams(structured_outputs=KINDS[kind][0], max_tokens=40, seed=number)
        for number, kind in enumerate(kinds)
    ]
    wide = 0
    for kind, output in zip(
        kinds, llm.generate(["Tell me"] * len(kinds), params, use_tqdm=False), strict=True
    ):
        (one,) = output.outputs
        ids = list(one.token_ids)
        wide += len(one.text) > len(ids)
        if one.finish_reason == "stop":
            assert KINDS[kind][1](one.text), one.text
        else:
            assert one.finish_reason == "length"
            assert reader.matcher(KINDS[kind][0]).try_consume_tokens(ids) == len(ids) == 40
    assert wide > 4  # tokens of many characters were among them

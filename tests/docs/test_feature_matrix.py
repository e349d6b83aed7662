"""docs/features.md: each pair of the matrix is started with quire-tiny, and works or is refused as its cell says.

What a feature may not change is compared: the tokens with it equal the tokens without it. The matrix is read from the page, so a cell that
is wrong fails here.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import quire
from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.errors import ConfigError, Unsupported

PAGE = Path(__file__).parents[2] / "docs/features.md"


class MatrixFeature(NamedTuple):
    """How a feature is turned on, and whether the tokens may depend on it."""

    keywords: Mapping[str, Any]
    keeps_tokens: bool = False


FEATURES = {
    "LoRA": MatrixFeature({"enable_lora": True}),
    "structured output": MatrixFeature({}),
    "beam search": MatrixFeature({}),
    "prompt embeddings": MatrixFeature({"enable_prompt_embeds": True}, keeps_tokens=True),
    "int8 weights": MatrixFeature({"quantization": "int8"}),
    "int8 KV cache": MatrixFeature({"kv_cache_dtype": "int8"}),
    "speculative decoding": MatrixFeature({"speculative_config": {"method": "suffix"}}, keeps_tokens=True),
    "sleep": MatrixFeature({}, keeps_tokens=True),
    "`-tp`": MatrixFeature({"tensor_parallel_size": 2}, keeps_tokens=True),
    "`-pp`": MatrixFeature({"pipeline_parallel_size": 2}, keeps_tokens=True),
    "`-dp`": MatrixFeature({"data_parallel_size": 2}, keeps_tokens=True),
    "`-pcp`": MatrixFeature({"prefill_context_parallel_size": 2}, keeps_tokens=True),
    "`-dcp`": MatrixFeature({"decode_context_parallel_size": 2, "tensor_parallel_size": 4}, keeps_tokens=True),
}  # fmt: skip
PROMPT, TOKENS = "Once upon a time, there was a fox named Gina. The fox named Gina", 24
SCHEMA = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"], "additionalProperties": False}  # fmt: skip


def matrix() -> dict[tuple[str, str], str]:
    """(row, column) -> the cell, of the first table that begins with an empty cell."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    start = next(at for at, line in enumerate(lines) if line.startswith("| |"))
    columns = [name.strip() for name in lines[start].split("|")[2:-1]]
    cells = {}
    for line in lines[start + 2 :]:
        row, *values = (part.strip() for part in line.split("|")[1:-1])
        if row not in FEATURES:
            break
        cells |= {(row, name): value for name, value in zip(columns, values, strict=True) if value}
    return cells


@cache
def embedding() -> torch.Tensor:
    """[vocabulary, hidden]: the vector of each token."""
    folder = Path(quire.__file__).parent / "embedded" / "quire-tiny"
    return load_file(folder / "model.safetensors")["language_model.model.embed_tokens.weight"]


def answer(names: set[str]) -> tuple[int, ...]:
    """The tokens of a greedy answer with these features on.

    Raises:
        QuireError: the features are refused.
    """
    keywords: dict[str, Any] = {"kv_cache_memory_bytes": "32M", "max_model_len": 256, "max_num_seqs": 8}  # fmt: skip
    for name in FEATURES:
        if name in names:
            keywords |= FEATURES[name].keywords
    if {"`-dcp`", "`-pcp`"} <= names:
        keywords["tensor_parallel_size"] = 1
    lora = LoRARequest("pirate", 1, "quire-tiny-pirate-lora") if "LoRA" in names else None
    with LLM("quire-tiny", **keywords) as llm:
        if "sleep" in names:
            llm.sleep()
            llm.wake_up()
        prompt: Any = PROMPT
        if "prompt embeddings" in names:
            ids = torch.tensor(llm.get_tokenizer().encode(PROMPT))
            prompt = {"prompt_embeds": embedding()[ids]}
        form = StructuredOutputsParams(json=SCHEMA) if "structured output" in names else None
        if "beam search" in names:
            beams = BeamSearchParams(beam_width=2, max_tokens=TOKENS, structured_outputs=form)
            (found,) = llm.beam_search([prompt], beams, lora_request=lora)
            tokens, text = tuple(found.sequences[0].tokens[-TOKENS:]), found.sequences[0].text
        else:
            params = SamplingParams(temperature=0, max_tokens=TOKENS, structured_outputs=form)
            output = llm.generate(prompt, params, lora_request=lora, use_tqdm=False)[0].outputs[0]
            tokens, text = tuple(output.token_ids), output.text
            assert output.finish_reason in ("length", "stop")
        if form is not None:
            assert isinstance(json.loads(text[text.rindex("{") :])["good"], bool)
    return tokens


PAIRS = list(itertools.combinations(FEATURES, 2))
ALONE: dict[str, tuple[int, ...]] = {}


def alone(name: str) -> tuple[int, ...]:
    """The tokens of a feature by itself, computed once."""
    if name not in ALONE:
        ALONE[name] = answer({name})
    return ALONE[name]


def outcome(one: str, other: str) -> str:
    """`yes` or `no`, as the page's cells say.

    Raises:
        AssertionError: a feature that keeps the tokens changed them.
    """
    try:
        tokens = answer({one, other})
    except (ConfigError, Unsupported):
        return "no"
    for kept, changed in ((one, other), (other, one)):
        if FEATURES[kept].keeps_tokens:
            assert tokens == alone(changed), f"{kept} changed the tokens of {changed}"
    return "yes"


def test_the_matrix_has_each_pair_once():
    pairs = {frozenset(pair) for pair in matrix()}
    assert pairs == {frozenset(pair) for pair in PAIRS}
    assert len(matrix()) == len(PAIRS)
    assert {re.sub(r" .*", "", cell) for cell in matrix().values()} <= {"yes", "no"}


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "cell"), matrix().items() if PAGE.exists() else [], ids=str)
def test_a_cell_is_true(pair: tuple[str, str], cell: str):
    assert outcome(*pair) == cell.partition(" ")[0]


def written() -> Iterator[str]:
    """The matrix as the engine answers now: python -m tests.docs.test_feature_matrix"""
    names = list(FEATURES)
    yield f"| | {' | '.join(names[:-1])} |"
    yield "|---" * len(names) + "|"
    for at, row in enumerate(names[1:], start=1):
        yield f"| {row} |" + "".join(f" {outcome(row, column)} |" if place < at else " |" for place, column in enumerate(names[:-1]))  # fmt: skip


if __name__ == "__main__":
    for line in written():
        print(line, flush=True)

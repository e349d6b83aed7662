"""A running engine writes its checkpoint as sharded_state, and another one loads it."""

from __future__ import annotations

import shutil

import pytest

from quire import LLM, SamplingParams
from quire.errors import QuireError

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_an_engine_saves_what_another_loads(tmp_path):
    with LLM("quire-tiny", max_model_len=64) as llm:
        (expected,) = llm.generate(["Once upon"], GREEDY, use_tqdm=False)
        save = llm.llm_engine.engine_core.save_sharded_state
        save(path=str(tmp_path), pattern=None, max_size=1 << 20)
        assert len(list(tmp_path.glob("model-rank-0-part-*.safetensors"))) > 1
        with pytest.raises(QuireError, match="exists: choose an empty directory"):
            save(path=str(tmp_path))
        for pattern in ("model.safetensors", "{part}-{other}", "../{part}.safetensors"):
            with pytest.raises(QuireError, match="pattern="):
                save(path=str(tmp_path), pattern=pattern)
        folder = llm.client.resolved.spec.path
    for file in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        shutil.copy(f"{folder}/{file}", tmp_path)
    with LLM(str(tmp_path), load_format="sharded_state", max_model_len=64) as llm:
        (again,) = llm.generate(["Once upon"], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_random_weights_are_not_saved(tmp_path):
    with (
        LLM("quire-tiny", load_format="dummy", max_model_len=64) as llm,
        pytest.raises(QuireError, match="load_format=dummy"),
    ):
        llm.collective_rpc("save_sharded_state", args=(str(tmp_path),))

"""`update_config` and `reload_weights` on an engine that is awake, as vLLM's example skip_loading_weights calls them."""

from __future__ import annotations

import shutil

import pytest

from quire import LLM, SamplingParams
from quire.engine import sleep
from quire.errors import QuireError, ValidationError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["Once upon a time there was", "The answer is"]
DRAFTS = {"method": "draft_model", "model": "quire-tiny", "num_speculative_tokens": 3}
AUTO = ({"load_config": {"load_format": "auto"}},)


def tokens(llm: LLM, prompts=PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM("quire-tiny", max_model_len=64) as llm:
        return tokens(llm)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"speculative_config": DRAFTS}, marks=pytest.mark.slow)],
    ids=["plain", "drafts"],
)
def test_random_weights_become_those_of_the_checkpoint(options, expected):
    with LLM("quire-tiny", load_format="dummy", max_model_len=64, **options) as llm:
        assert tokens(llm) != expected
        assert llm.collective_rpc("update_config", args=AUTO) == [None]
        assert llm.collective_rpc("reload_weights") == [None]
        assert not llm.is_sleeping()
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [0, 0]
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.slow
def test_requests_that_run_are_computed_again(expected):
    """What they generate after the call is what the new weights generate after the tokens that they have."""
    with LLM("quire-tiny", load_format="dummy", max_model_len=64) as llm:
        ids, scheduler = llm.enqueue(PROMPTS, GREEDY), llm.client.core.scheduler
        assert not list(llm._turn())
        while min(len(r.tokens) - r.num_prompt for r in scheduler.requests.values()) < 3:
            assert not list(llm._turn())
        llm.collective_rpc("update_config", args=AUTO)
        llm.collective_rpc("reload_weights")
        prompts = [list(request.tokens) for request in scheduler.requests.values()]
        outputs = llm.wait_for_completion(ids, use_tqdm=False)
        for output, prompt in zip(outputs, prompts, strict=True):
            have = len(prompt) - len(output.prompt_token_ids)
            answer = list(output.outputs[0].token_ids)
            assert 3 <= have < 12
            assert answer[:have] == prompt[-have:]
            (rest,) = tokens(llm, [{"prompt_token_ids": prompt}])
            assert answer[have:] == rest[: 12 - have]
        assert tokens(llm) == expected


@pytest.mark.slow
def test_a_failed_load_leaves_the_engine_asleep(expected, tmp_path):
    with LLM("quire-tiny", max_model_len=64) as llm:
        shutil.copytree(llm.client.resolved.path, tmp_path / "model")
    with LLM(str(tmp_path / "model"), max_model_len=64) as llm:
        assert tokens(llm) == expected
        file = tmp_path / "model" / "model.safetensors"
        file.rename(tmp_path / "kept")
        with pytest.raises(QuireError, match="no weights"):
            llm.collective_rpc("reload_weights")
        assert llm.is_sleeping()
        with pytest.raises(QuireError, match=r"call wake_up\(\) first"):
            tokens(llm)
        (tmp_path / "kept").rename(file)
        assert llm.wake_up()
        assert tokens(llm) == expected


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ({"model_config": {"seed": 1}, "load_config": {"load_format": "auto"}}, "change model_config"),
        ({"load_config": {"load_format": "auto", "download_dir": "x"}}, "change load_config.download_dir"),
        ({"load_config": {}}, "got {'load_config'"),
        ({"model_config": {}}, "got {'model_config'"),
        ({"load_config": 1}, "got {'load_config'"),
        ([1], "got"),
        ({"load_config": {"load_format": "tensorizer"}}, "choose from auto"),
        ({"load_config": {"load_format": ["auto"]}}, "choose from auto"),
    ],
)  # fmt: skip
def test_other_fields_are_refused(shared_llm, overrides, what):
    with pytest.raises(ValidationError, match=what):
        shared_llm.collective_rpc("update_config", args=(overrides,))


def test_other_arguments_are_refused(shared_llm):
    before = tokens(shared_llm)
    for method, args in (("update_config", ()), ("update_config", (1, 2)), ("reload_weights", (1,))):  # fmt: skip
        with pytest.raises(ValidationError, match=method):
            shared_llm.collective_rpc(method, args=args)
    assert tokens(shared_llm) == before


@pytest.fixture(scope="module")
def shared_llm():
    with LLM("quire-tiny", max_model_len=64) as llm:
        yield llm


@pytest.mark.slow
def test_a_new_process_of_the_engine_loads_the_same_weights(expected, tmp_path):
    with LLM("quire-tiny", load_format="dummy", max_model_len=64) as llm:
        core = llm.client.core
        core.functions = sleep.persisting(core.functions, tmp_path / "state")
        llm.collective_rpc("update_config", args=AUTO)
        llm.collective_rpc("reload_weights")
    with LLM("quire-tiny", load_format="dummy", max_model_len=64) as llm:
        sleep.restore_sleep_state(llm.client.core.functions, tmp_path / "state")
        assert tokens(llm) == expected

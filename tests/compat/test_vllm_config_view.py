"""What programs for vLLM read of a running engine, and calls that older programs make on LLMEngine."""

from __future__ import annotations

from types import SimpleNamespace

from quire import EngineArgs, LLMEngine, SamplingParams
from quire.api.vllm_config_view import ModelFacts


def test_labels_have_numbers_as_keys_as_in_transformers():
    hf_config = {"id2label": {"0": "O", "1": "B-PER", "other": "x"}, "vocab_size": 3}
    model = SimpleNamespace(tokenizer=None, model="m")
    client = SimpleNamespace(
        ready=SimpleNamespace(max_model_len=8, dtype="float32", vocab_size=3),
        resolved=SimpleNamespace(
            config=SimpleNamespace(model=model), hf_config=hf_config, architecture="Bert"
        ),
    )
    facts = ModelFacts(client)
    assert facts.hf_config.id2label == {0: "O", 1: "B-PER", "other": "x"}
    assert "0" in hf_config["id2label"]


def test_running_requests_are_preempted_before_the_cache_is_emptied():
    engine = LLMEngine.from_engine_args(EngineArgs(model="quire-tiny", max_model_len=128))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def finish(reset_at: int | None) -> list[int]:
        engine.add_request("a", "Once upon a time there was a little dragon", params)
        step, last = 0, None
        while engine.has_unfinished_requests():
            if step == reset_at:
                assert engine.reset_prefix_cache() is False
                assert engine.reset_prefix_cache(reset_running_requests=True) is True
            for output in engine.step():
                last = output
            step += 1
        return last

    try:
        plain, again = finish(None), finish(20)
        assert list(again.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
        assert again.metrics.num_preemptions == 1
        assert plain.metrics.num_preemptions == 0
    finally:
        engine.shutdown()

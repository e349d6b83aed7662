"""LLM over a real core and a scripted model: prompts in any form, outputs in order, nothing lost, nothing left."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import page_model_engine
import pytest

from quire.api.llm import LLM
from quire.config.unsupported import METHODS
from quire.errors import EngineDeadError, Unsupported, ValidationError
from quire.protocol.sampling_params import RequestOutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def model(llm: LLM) -> page_model_engine.Model:
    return llm.client.core.executor.model  # type: ignore[attr-defined]


def plain(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, without an engine."""
    tokens = list(prompt)
    for _ in range(count):
        values = model(llm).logprobs(tokens)
        tokens.append(max(range(len(values)), key=values.__getitem__))
    return tokens[len(prompt) :]


def script(llm: LLM, prompt: str, text: str) -> list[int]:
    """Make the model answer `prompt` with `text` and an end; the answer's tokens."""
    encode = llm.get_tokenizer().encode
    answer = [*encode(text), llm.get_tokenizer().eos_token_id]
    model(llm).scripts[tuple(encode(prompt))] = [*answer, *[0] * 50]
    return answer


# -- generate ---------------------------------------------------------------------------------------


def test_outputs_have_the_order_of_the_prompts(llm: LLM):
    tokenizer = llm.get_tokenizer()
    prompts = [
        "the cat", [5, 6, 7], {"prompt": "and"}, {"prompt_token_ids": [1, 2], "prompt": "said"},
        np.array([9, 8]), "é" * 20, "x",
    ]  # fmt: skip
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    ids = [tokenizer.encode("the cat"), [5, 6, 7], tokenizer.encode("and"), [1, 2], [9, 8],
           tokenizer.encode("é" * 20), tokenizer.encode("x")]  # fmt: skip
    assert [out.prompt_token_ids for out in outputs] == ids
    assert [out.prompt for out in outputs] == ["the cat", None, "and", "said", None, "é" * 20, "x"]
    for out, prompt in zip(outputs, ids, strict=True):
        (one,) = out.outputs
        assert one.token_ids == plain(llm, prompt, 6)
        assert one.finish_reason == "length"
        assert out.finished
    assert len({out.request_id for out in outputs}) == len(outputs)


@pytest.mark.parametrize(("prompts", "count"), [("one", 1), ([1, 2], 1), ([], 0), ([[1], [2]], 2)])
def test_one_prompt_or_several(llm: LLM, prompts: Any, count: int):
    assert len(llm.generate(prompts, GREEDY, use_tqdm=False)) == count


def test_outputs_are_in_order_when_requests_end_in_another(llm: LLM):
    lengths = [9, 1, 5, 2, 12, 1, 7, 3, 4]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([[n] for n in range(1, 10)], params, use_tqdm=False)
    assert [len(out.outputs[0].token_ids) for out in outputs] == lengths
    assert [out.prompt_token_ids for out in outputs] == [[n] for n in range(1, 10)]


def test_text_ends_at_the_models_end(llm: LLM):
    answer = script(llm, "hi", "an answer é")
    (output,) = llm.generate("hi", SamplingParams(max_tokens=50), use_tqdm=False)
    (one,) = output.outputs
    assert (one.text, one.token_ids) == ("an answer é", answer)
    assert (one.finish_reason, one.stop_reason) == ("stop", None)


def test_a_stop_string_ends_the_request_in_the_engine(llm: LLM):
    answer = script(llm, "hi", "one. two. three.")
    params = SamplingParams(max_tokens=50, stop=[". t"])
    (output,) = llm.generate("hi", params, use_tqdm=False)
    (one,) = output.outputs
    assert (one.text, one.finish_reason, one.stop_reason) == ("one", "stop", ". t")
    assert one.token_ids == answer[: len(one.token_ids)]
    # The same again, while the engine still has to hear that the first was given up.
    (again,) = llm.generate("hi", params, use_tqdm=False)
    assert again.outputs[0].text == "one"
    llm.generate("x", GREEDY, use_tqdm=False)
    stats = llm.client.call("stats")
    assert (stats["running"], stats["waiting"]) == (0, 0)


def test_seeds(llm: LLM):
    def texts(seed: int | None, n: int = 1) -> list[list[int]]:
        params = SamplingParams(seed=seed, n=n, max_tokens=8)
        (output,) = llm.generate("the", params, use_tqdm=False)
        return [one.token_ids for one in output.outputs]

    assert texts(1) == texts(1) != texts(2)
    assert texts(None) != texts(None)
    several = texts(1, 4)
    assert several[0] == texts(1)[0]
    assert len({tuple(tokens) for tokens in several}) == 4


def test_best_of(llm: LLM):
    shown = SamplingParams(seed=3, n=6, max_tokens=5, logprobs=0, ignore_eos=True)
    (every,) = llm.generate("the", shown, use_tqdm=False)
    scores = sorted((one.cumulative_logprob for one in every.outputs), reverse=True)
    params = SamplingParams(seed=3, n=2, best_of=6, max_tokens=5, ignore_eos=True)
    (best,) = llm.generate("the", params, use_tqdm=False)
    assert [one.cumulative_logprob for one in best.outputs] == scores[:2]
    assert [one.index for one in best.outputs] == [0, 1]


def test_sampling_defaults_come_from_the_checkpoint(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 3}')
    llm = LLM.from_client(page_model_engine.make(tmp_path))
    (output,) = llm.generate([4], use_tqdm=False)
    assert output.outputs[0].token_ids == plain(llm, [4], 3)
    assert llm.default_sampling_params == {"temperature": 0.0, "max_tokens": 3}
    assert llm.get_default_sampling_params().max_tokens == 3
    llm.shutdown()


def test_arguments_are_not_modified(llm: LLM):
    params = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA)
    llm.generate(["a", "b"], params, use_tqdm=False)
    assert params == SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA)


def test_logprobs_equal_the_models(llm: LLM):
    params = SamplingParams(
        temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    (output,) = llm.generate([[4, 5, 6]], params, use_tqdm=False)
    (one,) = output.outputs
    tokens = [4, 5, 6, *one.token_ids]
    found = [*output.prompt_logprobs, *one.logprobs]
    assert found[0] is None
    for position in range(1, len(tokens)):
        values = model(llm).logprobs(tokens[:position])
        entry = found[position][tokens[position]]
        assert entry.logprob == values[tokens[position]]
        assert entry.rank == 1 + sum(value > entry.logprob for value in values)
    assert one.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for token, position in zip(one.token_ids, one.logprobs, strict=True))
    )  # fmt: skip


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "given", "words"),
    [
        (["a", [99999]], {}, "prompt 1: .*99999"),
        (["a", "b"], {"sampling_params": [GREEDY]}, "sampling_params has 1 entries for 2 prompts"),
        (["a", "b"], {"priority": [1, 2, 3]}, "priority has 3 entries for 2"),
        (["a"], {"sampling_params": {"n": 1}}, "sampling_params must be"),
        (["a"], {"tokenization_kwargs": {"x": 1}}, "tokenization_kwargs: unknown key x"),
        (["a", {"text": "b"}], {}, "prompt 1: .*unknown key text"),
        ("x" * 199 + "y", {"sampling_params": SamplingParams(min_tokens=9)}, "maximum context"),
    ],
)
def test_one_invalid_prompt_refuses_the_whole_call(
    llm: LLM, prompts: Any, given: dict[str, Any], words: str
):
    with pytest.raises(ValidationError, match=words):
        llm.generate(prompts, use_tqdm=False, **given)
    assert llm.client.core.executor.steps == 0  # type: ignore[attr-defined]
    assert not llm.front.live


@pytest.mark.parametrize("name", sorted(METHODS))
def test_later_features_are_refused_by_name(llm: LLM, name: str):
    with pytest.raises(Unsupported, match=rf"LLM\.{name}"):
        getattr(llm, name)("x", y=1)


def test_other_names_are_no_attributes(llm: LLM):
    with pytest.raises(AttributeError, match="nonsense"):
        llm.nonsense()
    assert not hasattr(llm, "nonsense")


def test_media_are_refused(llm: LLM):
    with pytest.raises(ValidationError, match="unknown key 'a'"):
        llm.generate("x", GREEDY, mm_processor_kwargs={"a": 1})
    assert llm.generate("x", GREEDY, lora_request=[None], use_tqdm=False)


def test_unknown_keywords_are_type_errors(llm: LLM):
    with pytest.raises(TypeError, match="prompt_token_ids; pass lists of token ids"):
        llm.generate(prompt_token_ids=[[1]])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="did you mean max_num_seqs"):
        LLM("quire-tiny", max_num_seq=4)
    with pytest.raises(TypeError, match="api_server_count is an option of the server only"):
        LLM("quire-tiny", api_server_count=2)


# -- chat -------------------------------------------------------------------------------------------


def test_chat(llm: LLM):
    answer = script(llm, "<|user|>hi<|end|><|assistant|>", "hello")
    hi = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(hi, use_tqdm=False)
    assert output.outputs[0].text == "hello"
    assert output.prompt == "<|user|>hi<|end|><|assistant|>"
    assert output.outputs[0].token_ids == answer
    outputs = llm.chat([hi, [*hi, *hi]], GREEDY, use_tqdm=False)
    assert [out.prompt for out in outputs] == [
        "<|user|>hi<|end|><|assistant|>", "<|user|>hi<|end|>" * 2 + "<|assistant|>",
    ]  # fmt: skip


def test_chat_options(llm: LLM):
    hi = [{"role": "user", "content": "hi"}]
    started = [*hi, {"role": "assistant", "content": "Sure"}]

    def prompt(messages: Any, **options: Any) -> str:
        return llm.chat(messages, GREEDY, use_tqdm=False, **options)[0].prompt or ""

    assert prompt(hi, add_generation_prompt=False) == "<|user|>hi<|end|>"
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt(started, **continued) == "<|user|>hi<|end|><|assistant|>Sure"
    own = "{{ messages[0].content }}{{ loud }}"
    assert prompt(hi, chat_template=own, chat_template_kwargs={"loud": "!"}) == "hi!"
    assert prompt(hi, chat_template="{{ tools[0].name }}", tools=[{"name": "t"}]) == "t"
    with pytest.raises(ValidationError, match="exclude each other"):
        prompt(started, continue_final_message=True)
    with pytest.raises(TypeError, match="keyword nonsense; choose from lora_request"):
        prompt(hi, nonsense=1)
    for name in ("tools", "chat_template_kwargs", "chat_template", "chat_template_content_format"):
        with pytest.raises(ValidationError, match=rf"{name} must be .*; it is 5"):
            prompt(hi, **{name: 5})


def test_a_chat_does_not_get_a_second_bos(tmp_path: Path):
    template = "{{ bos_token }}{{ messages[0].content }}"
    page_model_engine.save_byte_level(tmp_path, adds_bos=True, chat_template=template)
    llm = LLM.from_client(page_model_engine.make(tmp_path))
    bos = llm.get_tokenizer().bos_token_id
    (output,) = llm.chat([{"role": "user", "content": "the"}], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids.count(bos) == 1
    (output,) = llm.generate("the", GREEDY, use_tqdm=False)
    assert output.prompt_token_ids.count(bos) == 1
    llm.shutdown()


# -- in two halves ----------------------------------------------------------------------------------


def test_enqueue_and_wait(llm: LLM):
    first = llm.enqueue(["a", "b"], GREEDY)
    second = llm.enqueue_chat([{"role": "user", "content": "hi"}], GREEDY)
    between = llm.generate("x", GREEDY, use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [out.request_id for out in outputs] == [*first, *second]
    assert between[0].prompt == "x"
    assert outputs[0].outputs[0].token_ids == plain(llm, outputs[0].prompt_token_ids, 6)
    assert llm.wait_for_completion(use_tqdm=False) == []
    with pytest.raises(ValidationError, match="was never enqueued, or"):
        llm.wait_for_completion(first)


def test_waiting_for_some(llm: LLM):
    ids = llm.enqueue([[n] for n in range(1, 12)], GREEDY)
    assert [out.request_id for out in llm.wait_for_completion(ids[3:5], use_tqdm=False)] == ids[3:5]
    rest = llm.wait_for_completion(use_tqdm=False)
    assert [out.request_id for out in rest] == [*ids[:3], *ids[5:]]


# -- progress ---------------------------------------------------------------------------------------


class Bar:
    """Stands in for tqdm's."""

    def __init__(self, **given: Any):
        self.given, self.done, self.closed = given, 0, False

    def update(self, count: int) -> None:
        self.done += count

    def close(self) -> None:
        self.closed = True


def test_progress_counts_prompts(llm: LLM):
    bars: list[Bar] = []

    def make(**given: Any) -> Bar:
        bars.append(Bar(**given))
        return bars[-1]

    llm.generate(["a", "b", "c"], SamplingParams(n=2, max_tokens=2), use_tqdm=make)
    (bar,) = bars
    assert (bar.given["total"], bar.done, bar.closed) == (3, 3, True)


def test_the_progress_bar_can_be_disabled(llm: LLM, capsys: pytest.CaptureFixture[str]):
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown
    assert "2/2" in shown
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


# -- what goes wrong --------------------------------------------------------------------------------


def test_a_failed_request_does_not_affect_the_others(llm: LLM, caplog: pytest.LogCaptureFixture):
    llm.client.core.executor.failing.add("1")  # type: ignore[attr-defined]
    with caplog.at_level(logging.ERROR):
        outputs = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert [out.outputs[0].finish_reason for out in outputs] == ["length", "error", "length"]
    assert "it was told to fail" in (outputs[1].outputs[0].error or "")
    assert "request 1 failed" in caplog.text


def test_every_call_on_a_dead_engine_raises(llm: LLM):
    llm.client.core.executor.broken = OSError("the wire is cut")  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match="the wire is cut"):
        llm.generate("a", GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="the wire is cut"):
        llm.generate("a", GREEDY, use_tqdm=False)
    assert not llm.front.live


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_aborts_all_requests(llm: LLM):
    def interrupt(**given: Any) -> Any:
        bar = Bar(**given)
        bar.update = lambda count: count and signal.raise_signal(signal.SIGINT)  # type: ignore
        return bar

    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for n in (2, 90, 90)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], params, use_tqdm=interrupt)
    assert not llm.front.live
    assert not llm._uncollected
    (output,) = llm.generate([4], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == plain(llm, [4], 6)
    stats = llm.client.call("stats")
    assert (stats["running"], stats["waiting"]) == (0, 0)


def test_several_threads_may_generate(llm: LLM):
    found: dict[int, list[int]] = {}

    def work(start: int) -> None:
        (output,) = llm.generate([start, 3], GREEDY, use_tqdm=False)
        found[start] = output.outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: plain(llm, [n, 3], 6) for n in range(1, 7)}

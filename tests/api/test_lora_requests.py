"""Adapters in a Python program: which one each request gets, what is loaded, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import page_model_engine
import pytest
from scripted_adapters import ScriptedAdapters

import quire
from quire.api.async_llm import AsyncLLM
from quire.api.llm import LLM
from quire.api.llm_engine import LLMEngine
from quire.errors import ModelNotFound, ValidationError
from quire.protocol.lora_request import LoRARequest
from quire.protocol.sampling_params import BeamSearchParams, SamplingParams

SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def adapter(folder: Path, name: str) -> str:
    (folder / name).mkdir()
    (folder / name / "adapter_config.json").write_text("{}", encoding="utf-8")
    return str(folder / name)


@pytest.fixture
def a(tmp_path: Path) -> LoRARequest:
    return LoRARequest("a", 1, adapter(tmp_path, "a"))


@pytest.fixture
def b(tmp_path: Path) -> LoRARequest:
    return LoRARequest("b", 2, adapter(tmp_path, "b"))


@pytest.fixture
def llm(make: Callable[..., LLM]) -> LLM:
    return make(enable_lora=True, max_loras=2)


@pytest.fixture
def engine(llm: LLM) -> ScriptedAdapters:
    return ScriptedAdapters(llm.client.core)  # type: ignore[attr-defined]


def test_each_prompt_has_its_adapter(llm, engine, a, b):
    outputs = llm.generate(["x", "y", "z"], SHORT, lora_request=[a, None, b], use_tqdm=False)
    assert engine.sent == ["a", None, "b"]
    assert [out.lora_request for out in outputs] == [a, None, b]
    assert [out.outputs[0].lora_request for out in outputs] == [a, None, b]
    llm.generate(["x", "y"], SHORT, lora_request=a, use_tqdm=False)
    assert engine.sent[3:] == ["a", "a"]
    assert engine.loads == 2


def test_every_way_to_send_a_prompt_takes_an_adapter(llm, engine, a):
    llm.get_tokenizer().template = quire.frontend.chat_template.ChatTemplate("{{ messages[0].content }}")  # fmt: skip
    chat = [{"role": "user", "content": "hello"}]
    llm.chat(chat, SHORT, use_tqdm=False, lora_request=a)
    llm.chat([chat, chat], SHORT, use_tqdm=False, lora_request=["a", None])
    llm.enqueue("x", SHORT, lora_request=a)
    llm.enqueue_chat(chat, SHORT, lora_request=a)
    assert all(out.lora_request == a for out in llm.wait_for_completion(use_tqdm=False))
    assert engine.sent == ["a", "a", None, "a", "a"]
    engine.sent.clear()
    llm.beam_search(["x", "y"], BeamSearchParams(beam_width=2, max_tokens=2), [None, a])
    assert set(engine.sent) == {None, "a"}
    assert engine.sent[0] is None
    assert engine.loads == 1


@pytest.mark.parametrize("count", [1, 3])
def test_lists_of_unequal_length_are_refused(llm, engine, a, count):
    with pytest.raises(ValidationError, match=rf"lora_request has {count} entries for 2 prompts"):
        llm.generate(["x", "y"], SHORT, lora_request=[a] * count)
    assert not engine.sent


def test_an_engine_without_lora_refuses(make, a):
    for wanted in (a, "a", object()):
        with pytest.raises(ValidationError, match="enable_lora=True") as refused:
            make().generate("x", SHORT, lora_request=wanted)
        assert refused.value.parameter == "lora_request"
    assert make().list_loras() == set()


def test_wrong_adapters_are_refused(llm, engine, a, tmp_path):
    with pytest.raises(ValidationError, match="must be a LoRARequest, or the name of a loaded"):
        llm.generate("x", SHORT, lora_request=7)
    llm.add_lora(a)
    with pytest.raises(ValidationError, match="no adapter is called 'b'; this engine has 'a'"):
        llm.generate("x", SHORT, lora_request="b")
    with pytest.raises(ModelNotFound, match="does not exist"):
        llm.generate("x", SHORT, lora_request=LoRARequest("c", 3, str(tmp_path / "none")))
    with pytest.raises(ValidationError, match=r"adapter_config\.json is missing"):
        llm.generate("x", SHORT, lora_request=LoRARequest("c", 3, str(tmp_path)))
    with pytest.raises(ValidationError, match="cannot be printed"):
        llm.generate("x", SHORT, lora_request=LoRARequest("c\n", 3, a.lora_path))
    assert not engine.sent


@pytest.mark.parametrize(
    ("fields", "name"),
    [(("", 1, "/x"), "lora_name"), (("a", 0, "/x"), "lora_int_id"), (("a", True, "/x"), "lora_int_id"), (("a", 1), "lora_path")],
)  # fmt: skip
def test_a_request_checks_its_fields(fields, name):
    with pytest.raises(ValidationError) as refused:
        LoRARequest(*fields)
    assert refused.value.parameter == name


def test_requests_are_equal_by_name():
    one, two = LoRARequest("a", 1, "/x"), LoRARequest("a", 2, "/y", "base", True)
    assert one == two
    assert len({one, two, LoRARequest("b", 1, "/x")}) == 2
    assert (two.adapter_id, two.name, two.path) == (2, "a", "/y")
    assert quire.LoRARequest is LoRARequest


def test_two_adapters_of_one_name_stay_apart(llm, engine, a, b):
    other = LoRARequest("a", 7, b.lora_path)
    llm.generate(["x"] * 3, SHORT, lora_request=[a, other, a], use_tqdm=False)
    assert engine.sent == ["a", "a#7", "a"]
    assert [row["path"] for row in engine.rows.values()] == [a.lora_path, b.lora_path]


def test_in_place_reads_the_files_again(llm, engine, a):
    again = LoRARequest("a", 1, a.lora_path, load_inplace=True)
    llm.generate(["x"] * 2, SHORT, lora_request=a, use_tqdm=False)
    llm.generate(["x"] * 2, SHORT, lora_request=again, use_tqdm=False)
    assert engine.loads == 2  # once for a call, however many prompts it has


def test_an_adapter_is_loaded_again_after_it_was_unloaded(llm, engine, a):
    llm.generate("x", SHORT, lora_request=a, use_tqdm=False)
    assert llm.remove_lora(1)
    llm.generate("x", SHORT, lora_request=a, use_tqdm=False)
    assert engine.loads == 2


def test_add_list_pin_and_remove(llm, engine, a, b):
    engine.load_lora("first", a.lora_path)
    assert llm.list_loras() == {1}
    assert [llm.add_lora(LoRARequest("b", 5, b.lora_path)), llm.add_lora(LoRARequest("b", 5, b.lora_path))] == [True, False]  # fmt: skip
    assert llm.llm_engine.list_loras() == {1, 5}
    assert llm.pin_lora(5)
    assert engine.pinned == {"b"}
    assert not llm.pin_lora(9)
    assert (llm.remove_lora(5), llm.remove_lora(5), llm.list_loras()) == (True, False, {1})
    with pytest.raises(ValidationError, match="a LoRARequest"):
        llm.add_lora("b")


def test_the_stepwise_engine_takes_adapters(folder, a):
    client = page_model_engine.make(folder, enable_lora=True)
    scripted, engine = ScriptedAdapters(client.core), LLMEngine(client)
    engine.add_request("r", "x", SHORT, lora_request=a)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].lora_request == a
    assert scripted.sent == ["a"]
    assert engine.list_loras() == {1}
    engine.shutdown()


def test_many_streams_share_one_load(folder, a):
    client = page_model_engine.make(folder, enable_lora=True)
    scripted, llm = ScriptedAdapters(client.core), AsyncLLM.from_client(client)

    async def one(number: int) -> str:
        async for output in llm.generate("x", SHORT, f"r{number}", lora_request=a):
            last = output
        return last.lora_request.lora_name

    async def main() -> None:
        assert await asyncio.gather(*map(one, range(20))) == ["a"] * 20
        assert (scripted.loads, scripted.sent) == (1, ["a"] * 20)
        assert await llm.list_loras() == {1}
        assert await llm.pin_lora(1)
        assert not await llm.add_lora(a)
        assert await llm.remove_lora(1)
        with pytest.raises(ValidationError, match="no adapter is called 'a'; this engine has none"):
            await anext(llm.generate("x", SHORT, "late", lora_request="a"))

    asyncio.run(main())
    llm.shutdown()

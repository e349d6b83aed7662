"""Plug-ins with classes for vLLM, as its documentation shows them, through a whole server: streamed as whole, alone and beside our tables."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asgi import ask, browser, frames
from call_writers import TOOLS
from scripted import ScriptedEngine, make_state

from quire.errors import ConfigError
from quire.frontend.parsers.parser_classes import ReasoningParserManager, ToolParserManager
from quire.frontend.parsers.plugins import registry
from quire.server.plugin_calls import PluginCalls, PluginFailed

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
SAID = '[[hm, a call]]Look: <<f|{"count": 1}>> and <<get_weather|{"text": "Où"}>>.'
TOOL_CLASS = """
import json
from collections.abc import Sequence

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.protocol import (
    DeltaFunctionCall, DeltaMessage, DeltaToolCall, ExtractedToolCallInformation, FunctionCall, ToolCall,
)
from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
from vllm.logger import init_logger
from vllm.tokenizers import TokenizerLike

logger = init_logger(__name__)


@ToolParserManager.register_module(["mine", "other"])
class ExampleToolParser(ToolParser):
    def __init__(self, tokenizer: TokenizerLike):
        super().__init__(tokenizer)
        self.emitted = 0  # characters of the text
        self.open = False

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        request = super().adjust_request(request)
        if request.tools and request.tool_choice != "none":
            request.skip_special_tokens = False
        assert request.tools[0].function.name and request.tools[0].function.parameters["type"] == "object"
        return request

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        parts = model_output.split("<<")
        if len(parts) == 1:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        content, calls = parts[0], []
        for part in parts[1:]:
            call, _, rest = part.partition(">>")
            name, _, arguments = call.partition("|")
            calls.append(ToolCall(type="function", function=FunctionCall(name=name, arguments=arguments)))
            content += rest
        return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=content)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int], delta_token_ids: Sequence[int], request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        assert current_text == previous_text + delta_text
        assert [*previous_token_ids, *delta_token_ids] == list(current_token_ids)
        content, calls = "", []
        while self.emitted < len(current_text):
            rest = current_text[self.emitted :]
            if not self.open:
                before, mark, _ = rest.partition("<<")
                if not mark and before.endswith("<"):
                    before = before[:-1]
                if not mark and not before:
                    break
                content += before
                self.emitted += len(before) + len(mark)
                self.open = bool(mark)
                continue
            call, mark, _ = rest.partition(">>")
            if not mark:
                break
            name, _, arguments = call.partition("|")
            self.current_tool_id += 1
            function = DeltaFunctionCall(name=name, arguments=arguments).model_dump(exclude_none=True)
            calls.append(DeltaToolCall(index=self.current_tool_id, type="function", id=None, function=function))
            self.emitted += len(call) + len(mark)
            self.open = False
        return DeltaMessage(content=content or None, tool_calls=calls) if content or calls else None
"""
REASONING_CLASS = """
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.entrypoints.openai.protocol import DeltaMessage


class ExampleParser(ReasoningParser):
    def __init__(self, tokenizer, *args, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        self.options = kwargs["chat_template_kwargs"]

    def is_reasoning_end(self, input_ids):
        return "]]" in self.model_tokenizer.decode(input_ids)

    def extract_reasoning_streaming(self, previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids):
        def split(text):
            whole, mark, content = text.removeprefix("[[").partition("]]")
            reasoning = whole if mark else whole.removesuffix("]")
            return ("" if "[[".startswith(text) else reasoning), content
        (a, b), (c, d) = split(previous_text), split(current_text)
        if a == c and b == d:
            return None
        return DeltaMessage(reasoning=c[len(a):] or None, content=d[len(b):] or None)

    def extract_reasoning(self, model_output, request):
        reasoning, _, content = model_output.removeprefix("[[").partition("]]")
        return reasoning, content or None


ReasoningParserManager.register_lazy_module(
    name="mine", module_path="vllm.reasoning.example_reasoning_parser", class_name="ExampleParser"
)
"""


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    for manager in (ToolParserManager, ReasoningParserManager):
        manager.own.clear()
        manager.lazy.clear()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """The flags for both plug-ins."""
    found = {}
    for kind, text in (("tool", TOOL_CLASS), ("reasoning", REASONING_CLASS)):
        (file := tmp_path / f"{kind}.py").write_text(text)
        found[f"{kind}_parser_plugin"] = str(file)
    return found


def message_of(answer: Any) -> dict[str, Any]:
    """The message of a whole answer, or of the deltas of a stream, without the ids of its calls."""
    if isinstance(answer, list):
        message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
        for frame in answer:
            for choice in frame.get("choices", ()) if isinstance(frame, dict) else ():
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                message["reasoning"] += delta.get("reasoning") or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(message["tool_calls"]):
                        message["tool_calls"].append(
                            {"id": call["id"], "function": {"name": "", "arguments": ""}}
                        )
                    function = message["tool_calls"][call["index"]]["function"]
                    for name in ("name", "arguments"):
                        function[name] += call["function"].get(name) or ""
                message["finish"] = choice["finish_reason"]
    else:
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        message = {**choice["message"], "finish": choice["finish_reason"]}
    calls = message.get("tool_calls") or []
    assert all(call["id"] for call in calls)
    return {
        "content": message["content"] or "", "reasoning": message.get("reasoning") or "",
        "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        "finish": message["finish"],
    }  # fmt: skip


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def both(script: str, body: dict[str, Any], size: int = 3, **config: Any) -> dict[str, Any]:
    """The message, equal whole and streamed in deltas of every size up to `size`."""
    whole = message_of(ask(ScriptedEngine(script), "POST", CHAT, body, **config))
    for length in range(1, size + 1):
        engine = ScriptedEngine(*pieces(script, length))
        answer = ask(engine, "POST", CHAT, {**body, "stream": True}, **config)
        assert message_of(frames(answer.text)) == whole
    return whole


CALLS = [("f", '{"count": 1}'), ("get_weather", '{"text": "Où"}')]


def test_both_classes(files: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        found = both(SAID, BODY, 7, tool_call_parser="mine", reasoning_parser="mine", **files)
    assert found == {
        "content": "Look:  and .", "reasoning": "hm, a call", "calls": CALLS, "finish": "tool_calls",
    }  # fmt: skip


def test_a_class_beside_a_table(files: dict[str, str]) -> None:
    said = SAID.replace("[[", "<think>").replace("]]", "</think>")
    found = both(said, BODY, 5, tool_call_parser="other", reasoning_parser="qwen3", **files)
    assert (found["reasoning"], found["calls"]) == ("hm, a call", CALLS)
    said = '[[hm]]Ok.<tool_call>{"name": "f", "arguments": {"count": 1}}</tool_call>'
    found = both(said, BODY, 5, tool_call_parser="hermes", reasoning_parser="mine", **files)
    assert found == {
        "content": "Ok.", "reasoning": "hm", "calls": CALLS[:1], "finish": "tool_calls",
    }  # fmt: skip


def test_reasoning_without_tools_and_calls_without_reasoning(files: dict[str, str]) -> None:
    body = {"messages": BODY["messages"]}
    mine = {"tool_call_parser": "mine", "reasoning_parser": "mine", **files}
    found = both("[[hm]]Yes <<f|{}>>", body, **mine)
    assert found == {"content": "Yes <<f|{}>>", "reasoning": "hm", "calls": [], "finish": "stop"}
    found = both("Yes <<f|{}>>", BODY, **{**mine, "reasoning_parser": "none"})
    assert (found["content"], found["calls"]) == ("Yes ", [("f", "{}")])
    found = both("No call", BODY, **{**mine, "reasoning_parser": "none"})
    assert (found["content"], found["calls"], found["finish"]) == ("No call", [], "stop")


def test_a_prompt_that_ends_after_reasoning(files: dict[str, str]) -> None:
    body = {"messages": [{"role": "user", "content": "[[no]]"}]}
    found = both("Yes [[ ]]", body, reasoning_parser="mine", **files)
    assert (found["content"], found["reasoning"]) == ("Yes [[ ]]", "")


def test_the_class_changes_the_request_and_reasoning_is_counted(files: dict[str, str]) -> None:
    engine = ScriptedEngine(SAID)
    mine = {"tool_call_parser": "mine", "reasoning_parser": "mine", **files}
    answer = ask(engine, "POST", CHAT, BODY, **mine)
    assert engine.asked[0].params.skip_special_tokens is False
    assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] >= len(
        "hm, a call"
    )
    engine = ScriptedEngine("[[hm]]Yes")
    ask(engine, "POST", CHAT, {"messages": BODY["messages"]}, **mine)
    assert engine.asked[0].params.skip_special_tokens is True


def test_a_constraint_holds_from_the_first_token_so_there_is_no_reasoning(
    files: dict[str, str],
) -> None:
    mine = {"tool_call_parser": "mine", "reasoning_parser": "mine", **files}
    forced = json.dumps([{"name": "f", "parameters": {"count": 1}}])
    found = both(forced, {**BODY, "tool_choice": "required"}, **mine)
    assert (found["reasoning"], found["calls"]) == ("", [("f", '{"count": 1}')])


REST = '''
from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.entrypoints.openai.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall

@ToolParserManager.register_module("rest")
class Rest(ToolParser):
    """Streams half of the arguments, and knows all of them."""
    def __init__(self, tokenizer, tools):
        super().__init__(tokenizer, tools)
        assert tools[0].function.name == "get_weather"

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, *args):
        if previous_text:
            return None
        self.prev_tool_call_arr = [{"name": "f", "arguments": {"count": 12}}]
        self.streamed_args_for_tool = ['{"count": 1']
        call = DeltaToolCall(index=0, id="c", type="function", function=DeltaFunctionCall("f", '{"count": 1'))
        return DeltaMessage(tool_calls=[call])
'''


def test_arguments_that_the_class_has_not_streamed_come_at_the_end(tmp_path: Path) -> None:
    (file := tmp_path / "rest.py").write_text(REST)
    engine = ScriptedEngine("a", "b")
    config = {"tool_parser_plugin": str(file), "tool_call_parser": "rest"}
    answer = ask(engine, "POST", CHAT, {**BODY, "stream": True}, **config)
    assert message_of(frames(answer.text))["calls"] == [("f", '{"count": 12}')]


BAD = """
from vllm.tool_parsers import ToolParser, ToolParserManager
{more}
class Bad(ToolParser):
    {method}
ToolParserManager.register_module("bad", module=Bad)
"""
WAYS = {
    "raises": ("def extract_tool_calls(self, *args): raise ValueError('secret')", "raised ValueError"),
    "exits": ("def extract_tool_calls(self, *args): raise SystemExit(3)", "raised SystemExit"),
    "stops": ("def extract_tool_calls(self, *args): raise StopIteration", "raised StopIteration"),
    "returns nothing": ("def extract_tool_calls(self, *args): return None", "raised AttributeError"),
    "has no method": ("pass", "raised NotImplementedError"),
    "cannot be made": ("def __init__(self, tokenizer): 1 / 0", "raised ZeroDivisionError"),
    "adjusts badly": ("def adjust_request(self, request): request.nothing", "raised AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "stream"),
    [
        (way, stream)
        for way in WAYS
        for stream in (False, True)
        if not (stream and "nothing" in way)
    ],
)
def test_an_exception_ends_its_request_alone(way: str, stream: bool, tmp_path: Path) -> None:
    method, words = WAYS[way]
    if stream:
        method = method.replace("extract_tool_calls", "extract_tool_calls_streaming")
    (file := tmp_path / "bad.py").write_text(BAD.format(method=method, more=""))
    engine = ScriptedEngine("a", "b")
    state = make_state(engine, tool_parser_plugin=str(file), tool_call_parser="bad")
    answer = ask(engine, "POST", CHAT, {**BODY, "stream": stream}, state=state)
    assert words in answer.text
    assert "secret" not in answer.text
    assert (
        "500" in answer.text if stream and answer.status_code == 200 else answer.status_code == 500
    )
    assert state.plugin_calls.running == 0
    plain = ask(engine, "POST", CHAT, {"messages": BODY["messages"]}, state=state)
    assert plain.status_code == 200
    assert engine.aborted == [one for one in engine.closed if one in engine.aborted]


def test_code_that_does_not_return_holds_neither_the_loop_nor_others(tmp_path: Path) -> None:
    more = "import threading\nfree = threading.Event()"
    method = "def extract_tool_calls(self, *args): free.wait(60)"
    (file := tmp_path / "bad.py").write_text(BAD.format(method=method, more=more))
    engine = ScriptedEngine("a", "b")
    state = make_state(engine, tool_parser_plugin=str(file), tool_call_parser="bad")
    state.plugin_calls = PluginCalls(seconds=0.5, most=3)

    async def main() -> list[Any]:
        async with browser(state) as client:
            hung = [asyncio.create_task(client.post(CHAT, json=BODY)) for _ in range(3)]
            await asyncio.sleep(0.2)
            began = time.monotonic()
            other = await client.post(CHAT, json={"messages": BODY["messages"]})
            assert time.monotonic() - began < 0.2
            return [other, *await asyncio.gather(*hung), await client.post(CHAT, json=BODY)]

    other, *hung, refused = asyncio.run(main())
    assert other.status_code == 200
    assert all("did not return within 0.5 s" in one.text for one in hung)
    assert "3 calls of parser plug-ins" in refused.text
    parser = state.serving().front.formats.tool_class
    parser.extract_tool_calls.__globals__["free"].set()
    until = time.monotonic() + 10
    while state.plugin_calls.running and time.monotonic() < until:
        time.sleep(0.01)
    assert state.plugin_calls.running == 0


def test_a_client_that_leaves_while_the_code_runs() -> None:
    calls, entered, free = PluginCalls(), threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        free.wait(10)

    async def main() -> None:
        task = asyncio.create_task(calls.run(wait))
        await asyncio.to_thread(entered.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls.running == 1
        free.set()
        with pytest.raises(PluginFailed, match="raised KeyError"):
            await calls.run({}.__getitem__, 1)

    asyncio.run(main())
    until = time.monotonic() + 10
    while calls.running and time.monotonic() < until:
        time.sleep(0.01)
    assert calls.running == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import vllm\nfrom vllm.tool_parsers import ToolParserManager", "registers nothing"),
        ("from vllm.tool_parsers import Nothing", "Nothing"),
        ("from vllm.tool_parsers import ToolParserManager as M\nM.register_lazy_module('a', 'no_module', 'B')", "no_module"),
        ("from vllm.tool_parsers import ToolParserManager as M\nM.register_module('a', module=int)", "not a subclass"),
    ],
)  # fmt: skip
def test_classes_that_cannot_be_had_stop_the_start(text: str, says: str, tmp_path: Path) -> None:
    (file := tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.py.*" + says):
        registry([str(file)])

"""A chat request's outputs, read: thoughts, content and tool calls told apart in each delta.

Knows a model's formats, the request's wishes, and deltas. Does not know the shape of an answer. What the request
demands of its calls goes into its sampling parameters here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.config.server import ServerConfig
from quire.errors import ValidationError
from quire.frontend.parsers.constrain import calls_only, forced, strict_calls
from quire.frontend.parsers.engine import CallDelta, Parsed, Parser
from quire.frontend.parsers.model import ModelFormats, Reading
from quire.frontend.parsers.names import OFF
from quire.frontend.parsers.plugins import registry
from quire.logging import get_logger
from quire.protocol.constraint import StructuredOutputsParams
from quire.protocol.params import SamplingParams
from quire.server.engine import Prompt, TextEngine
from quire.server.errors import invalid
from quire.server.schemas import ChatRequest
from quire.server.state import ServerState
from quire.server.tools import Choice

if TYPE_CHECKING:
    from quire.server.generation import Delta

log = get_logger(__name__)


def formats_of(config: ServerConfig, engine: TextEngine | None) -> ModelFormats:
    """How the model writes; without an engine, only whether what was asked for exists.

    Raises:
        ConfigError: a name that is not known, or a plugin that fails.
    """
    plugins = [config.tool_parser_plugin, config.reasoning_parser_plugin]
    return ModelFormats(
        config.tool_call_parser,
        config.reasoning_parser,
        getattr(engine, "template_text", ""),
        getattr(engine, "special_texts", ()),
        registry([path for path in plugins if path]),
    )


def model_formats(state: ServerState, engine: TextEngine) -> ModelFormats:
    """Chosen once, and said."""
    if state.formats is None:
        found = state.formats = formats_of(state.config.server, engine)
        for what, choice in (("tool calls", found.tool_choice), ("thoughts", found.reasoning_choice)):  # fmt: skip
            log.info("format of %s: %s (%s)", what, choice.name or "none", choice.why)
    return state.formats


def reader_for(
    body: ChatRequest, choice: Choice, params: SamplingParams, prompt: Prompt,
    state: ServerState, engine: TextEngine,
) -> Reader | None:  # fmt: skip
    """None: outputs are content as they are. `params` gets what the request demands of its calls.

    Raises:
        ApiError: 400: calls in a format that nobody knows; or two demands on one output.
    """
    formats = model_formats(state, engine)
    last = body.messages[-1].get("content") if body.continue_final_message else None
    opened = formats.opened(prompt.text or "", last if isinstance(last, str) else "")
    if choice.kind == "auto" and formats.tools is None:
        hint = "it was started with --tool-call-parser none" if state.config.server.tool_call_parser in OFF else "start it with --tool-call-parser NAME"  # fmt: skip
        raise invalid(
            "`tools`: this server does not know how its model writes calls"
            f' ({formats.tool_choice.why}); {hint}, or ask with `tool_choice: "required"`',
            "tools",
        )
    reading = formats.reading(choice.tools, choice.must, opened)
    if reading is None:
        return None
    if (demand := demanded(body, choice, formats, opened)) is not None:
        if params.structured_outputs is None:
            params.structured_outputs = demand
        elif choice.must:
            said = params.structured_outputs.said
            raise invalid(f"`{said}` and a `tool_choice` that makes the model call a tool: an output can have one form only", said)  # fmt: skip
    if reading.marks_are_special:
        params.skip_special_tokens = False
    skip = params.skip_special_tokens

    def decode(tokens: list[int]) -> str:
        return engine.decode(tokens, skip_special=skip)

    return Reader(
        reading, decode, told=body.include_reasoning, parallel=body.parallel_tool_calls,
        named=choice.kind == "named",
    )  # fmt: skip


def demanded(
    body: ChatRequest, choice: Choice, formats: ModelFormats, opened: bool | None
) -> StructuredOutputsParams | None:
    """The form that calls must have."""
    tag: dict[str, Any] | None = None
    if choice.must:
        parallel = body.parallel_tool_calls and choice.kind == "required"
        tag = calls_only(forced(formats.tools), choice.tools, parallel, formats.reasoning, opened)
    elif choice.kind == "auto" and formats.tools is not None:
        tag = strict_calls(formats.tools, choice.tools)
    if tag is None:
        return None
    try:
        return StructuredOutputsParams(structural_tag=tag, said="tools")
    except ValidationError as error:
        raise invalid(f"`tools`: {error}", "tools") from error


@dataclass(slots=True)
class Reader:
    """Of one request's completions; each has a parser of its own."""

    reading: Reading
    decode: Callable[[list[int]], str]
    told: bool = True
    """Thoughts are shown."""
    parallel: bool = True
    named: bool = False
    reasoning_tokens: int = 0
    parsers: dict[int, Parser] = field(default_factory=dict)

    def read(self, delta: Delta) -> None:
        """Tell the delta's text apart."""
        parser = self.parsers.get(delta.index)
        if parser is None:
            parser = self.parsers[delta.index] = self.reading.parser()
        before, size = parser.thought, len(delta.text)
        parsed = parser.feed(delta.text)
        ended = delta.finish_reason is not None
        if ended:
            parsed.add(parser.finish())
        if self.reading.reasons:
            count = self._thoughts(parser, parser.thought - before, size, delta.tokens)
            self.reasoning_tokens += count
            if not self.told:
                self._hide(delta, parsed, count)
        delta.text, delta.reasoning = parsed.content, parsed.reasoning
        delta.calls = parsed.calls if self.parallel else [c for c in parsed.calls if c.index == 0]
        if ended:
            self._ended(delta, parser)

    def _thoughts(self, parser: Parser, thought: int, size: int, tokens: list[int]) -> int:
        """How many of the tokens are thoughts, which come first."""
        if not thought:
            return len(tokens) if parser.thinking and not size else 0
        if len(tokens) < 2 or parser.thinking or thought >= size:
            return len(tokens)
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if len(self.decode(tokens[:middle])) < thought:
                low = middle + 1
            else:
                high = middle
        return low

    def _hide(self, delta: Delta, parsed: Parsed, count: int) -> None:
        parsed.reasoning = ""
        delta.tokens = delta.tokens[count:]
        if delta.logprobs is not None:
            delta.logprobs = delta.logprobs[count:]

    def _ended(self, delta: Delta, parser: Parser) -> None:
        if parser.calls and delta.finish_reason == "stop" and not self.named:
            delta.finish_reason = "tool_calls"
        for reason in parser.reasons:
            log.warning_every(reason, 60, "an output was read as content in part: %s", reason)


def added(calls: list[CallDelta], later: list[CallDelta]) -> list[CallDelta]:
    """Calls with what came later of them."""
    known = {call.index: call for call in calls}
    for call in later:
        if (before := known.get(call.index)) is None:
            calls.append(call)
            known[call.index] = call
        else:
            before.arguments += call.arguments
    return calls

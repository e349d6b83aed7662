"""Tool call formats: tables for calls in JSON or Python syntax, and the list of all formats.

Knows what models write. `format_table` defines the notation; `tool_formats_xml` has the formats with one marker per
parameter.
"""

from __future__ import annotations

from dataclasses import replace

from quire.frontend.parsers import tool_formats_xml
from quire.frontend.parsers.format_table import CallTemplate, ParserState, ToolFormat


def json_calls(begin: str, end: str, *, detect: tuple[str, ...] = (), newline: str = "\n") -> ToolFormat:  # fmt: skip
    """`begin {"name": ..., "arguments": {...}} end`, repeated."""
    states = {
        "content": ParserState("content", {begin: "call"}),
        "call": ParserState("call", next_state="close"),
        "close": ParserState(
            "close", {end: "content"} if end else {}, fallback="" if end else "content"
        ),
    }
    template = CallTemplate(
        f'{begin}{newline}{{"name": "NAME", "arguments": ', f"}}{newline}{end}".rstrip(), "\n"
    )
    return ToolFormat(states, detect=detect, call=template)


def json_list(begin: str, end: str = "", *, detect: tuple[str, ...] = ()) -> ToolFormat:
    """`begin [{"name": ..., "arguments": {...}}, ...] end`."""
    closing = {end: "content"} if end else {}
    states = {
        "content": ParserState("content", {begin: "open"}),
        "open": ParserState("skip", {"[": "item"}),
        "item": ParserState("call", next_state="separator"),
        "separator": ParserState("close", {",": "item", "]": "closed"}),
        "closed": ParserState("close", closing, fallback="content"),
    }
    template = CallTemplate(
        '{"name": "NAME", "arguments": ', "}", ", ", prefix=f"{begin}[", suffix=f"]{end}"
    )
    return ToolFormat(states, call=template, detect=detect)


def pythonic(begin: str, end: str) -> dict[str, ParserState]:
    """`begin [f(a=1), g()] end`; the brackets are optional if there is an `end`."""
    closing = {end: "content"} if end else {}
    inner = {",": "item", "]": "closed"} | closing
    bare = "item" if end else ""
    states = {
        "list": ParserState("skip", {"[": "item"}, fallback=bare),
        "item": ParserState("python", next_state="separator"),
        "separator": ParserState("close", inner, fallback=bare),
        "closed": ParserState("close", closing, fallback="content"),
    }
    return states | {"content": ParserState("content", {begin: "list"} if begin else {})}


HERMES = json_calls("<tool_call>", "</tool_call>", detect=("<tool_call>", '"arguments"'))

# For outputs that consist of calls only. An output that begins otherwise is content, except after <|python_tag|>.
_BARE_OBJECT = {
    "content": ParserState("content", {"<|python_tag|>": "tag"}),
    "opening": ParserState("skip", {"<|python_tag|>": "tag", "{": "peek call"}, fallback="content"),
    "tag": ParserState("skip", {"{": "peek call"}),
    "call": ParserState("call", next_state="separator"),
    "separator": ParserState("close", {";": "tag", ",": "tag", "<|python_tag|>": "tag", "{": "peek call"}, fallback="content"),
}  # fmt: skip

_BARE_LIST = {
    "content": ParserState("content"),
    "opening": ParserState("skip", {"[": "item"}, fallback="content"),
    "item": ParserState("call", next_state="separator"),
    "separator": ParserState("close", {",": "item", "]": "closed"}),
    "closed": ParserState("close", fallback="content"),
}

LLAMA3 = ToolFormat(
    _BARE_OBJECT, start="opening", known_only=True, detect=('"parameters"', "<|start_header_id|>"),
    call=CallTemplate('{"name": "NAME", "parameters": ', "}", "; "),
)  # fmt: skip

XLAM_MARKS = {"[TOOL_CALLS]": "open", "<tool_call>": "open", "```json": "open"}
XLAM = ToolFormat(
    {
        "content": ParserState("content", {m: "open" for m in XLAM_MARKS if m != "```json"}),
        "opening": ParserState("skip", {**XLAM_MARKS, "[": "item", "{": "peek item"}, fallback="content"),
        "open": ParserState("skip", {"[": "item", "{": "peek item"}),
        "item": ParserState("call", next_state="separator"),
        "separator": ParserState(
            "close", {",": "item", "]": "closed", "</tool_call>": "content", "```": "content"},
            fallback="content",
        ),
        "closed": ParserState("close", {"</tool_call>": "content", "```": "content"}, fallback="content"),
    },
    start="opening",
    known_only=True,
    call=CallTemplate('{"name": "NAME", "arguments": ', "}", ", ", prefix="[", suffix="]"),
)  # fmt: skip

PYTHONIC = ToolFormat(
    pythonic("", "") | {"opening": ParserState("skip", {"[": "item"}, fallback="content")},
    start="opening",
    known_only=True,
    call=CallTemplate("NAME(", ")", ", ", prefix="[", suffix="]", dialect="python"),
)
LLAMA4 = ToolFormat(
    pythonic("<|python_start|>", "<|python_end|>")
    | {"opening": ParserState("skip", {"[": "item", "<|python_start|>": "list"}, fallback="content")},
    start="opening", known_only=True, detect=("<|python_start|>",),
    call=CallTemplate("NAME(", ")", ", ", "<|python_start|>[", "]<|python_end|>", dialect="python"),
)  # fmt: skip
OLMO3 = ToolFormat(
    pythonic("<function_calls>", "</function_calls>"),
    detect=("<function_calls>", "<functions>"),
    call=CallTemplate(
        "NAME(", ")\n", "", "<function_calls>\n", "</function_calls>", dialect="python"
    ),
)
LFM2 = ToolFormat(
    pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
    detect=("<|tool_call_start|>",),
    call=CallTemplate(
        "NAME(", ")", ", ", "<|tool_call_start|>[", "]<|tool_call_end|>", dialect="python"
    ),
)

# Old checkpoints write [TOOL_CALLS][{...}]; newer ones [TOOL_CALLS]name[ARGS]{...}, [ARGS] optional.
MISTRAL = ToolFormat(
    {
        "content": ParserState("content", {"[TOOL_CALLS]": "open"}),
        "open": ParserState("skip", {"[": "item"}, fallback="name"),
        "item": ParserState("call", next_state="separator"),
        "separator": ParserState("close", {",": "item", "]": "closed"}),
        "name": ParserState(
            "name", {"[ARGS]": "arguments", "[CALL_ID]": "id", "{": "peek arguments"}
        ),
        "id": ParserState("head", {"[ARGS]": "arguments", "{": "peek arguments"}),
        "arguments": ParserState("arguments", next_state="closed"),
        "closed": ParserState("close", {"[TOOL_CALLS]": "open"}, fallback="content"),
    },
    ids="short",
    detect=("[TOOL_CALLS]",),
    call=CallTemplate("[TOOL_CALLS]NAME[ARGS]", ""),
)

DEEPSEEK = {
    "content": ParserState("content", {"<｜tool▁calls▁begin｜>": "calls"}),
    "calls": ParserState("skip", {"<｜tool▁call▁begin｜>": "call"}),
    "more": ParserState(
        "close", {"<｜tool▁call▁begin｜>": "call", "<｜tool▁calls▁end｜>": "content"}
    ),
}
DEEPSEEK_V3 = ToolFormat(
    DEEPSEEK
    | {
        "call": ParserState("head", {"<｜tool▁sep｜>": "name"}),
        "name": ParserState("name", {"```json": "arguments"}),
        "arguments": ParserState("arguments", next_state="fence"),
        "fence": ParserState("close", {"```": "end"}),
        "end": ParserState("close", {"<｜tool▁call▁end｜>": "more"}),
    },
    detect=("<｜tool▁call▁begin｜>", "```json"),
    call=CallTemplate(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
        prefix="<｜tool▁calls▁begin｜>", suffix="<｜tool▁calls▁end｜>",
    ),
)  # fmt: skip
DEEPSEEK_V31 = ToolFormat(
    DEEPSEEK
    | {
        "call": ParserState("name", {"<｜tool▁sep｜>": "arguments"}),
        "arguments": ParserState("arguments", next_state="end"),
        "end": ParserState("close", {"<｜tool▁call▁end｜>": "more"}),
    },
    detect=("<｜tool▁call▁begin｜>",),
    call=CallTemplate(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        prefix="<｜tool▁calls▁begin｜>", suffix="<｜tool▁calls▁end｜>",
    ),
)  # fmt: skip
# [{"NAME": {...}}, ...]
APERTUS = ToolFormat(
    {
        "content": ParserState("content", {"<|tools_prefix|>": "open"}),
        "open": ParserState("skip", {"[": "item"}),
        "item": ParserState("skip", {"{": "quote"}),
        "quote": ParserState("skip", {'"': "name"}),
        "name": ParserState("name", {'"': "colon"}),
        "colon": ParserState("skip", {":": "arguments"}),
        "arguments": ParserState("arguments", next_state="end"),
        "end": ParserState("close", {"}": "separator"}),
        "separator": ParserState("close", {",": "item", "]": "closed"}),
        "closed": ParserState("close", {"<|tools_suffix|>": "content"}, fallback="content"),
    },
    detect=("<|tools_prefix|>",),
    call=CallTemplate(
        '{"NAME": ', "}", ", ", prefix="<|tools_prefix|>[", suffix="]<|tools_suffix|>"
    ),
)
COHERE = replace(
    json_list("<|START_ACTION|>", "<|END_ACTION|>", detect=("<|START_ACTION|>",)),
    call=CallTemplate(
        '\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": ', "}", ",",
        prefix="<|START_ACTION|>[", suffix="\n]<|END_ACTION|>",
    ),
)  # fmt: skip
MINIMAX_M1 = ToolFormat(
    {
        "content": ParserState("content", {"<tool_calls>": "open"}),
        "open": ParserState("skip", {"{": "peek call"}),
        "call": ParserState("call", next_state="more"),
        "more": ParserState("close", {"{": "peek call", "</tool_calls>": "content"}),
    },
    call=CallTemplate(
        '{"name": "NAME", "arguments": ', "}\n", prefix="<tool_calls>\n", suffix="</tool_calls>"
    ),
)
GIGACHAT3 = ToolFormat(
    {
        "content": ParserState(
            "content",
            {
                "<|message_sep|>\n\nfunction call<|role_sep|>": "call",
                "function call<|role_sep|>": "call",
                "<|function_call|>": "call",
            },
        ),
        "call": ParserState("call", next_state="content"),
    },
    detect=("function call", "<|role_sep|>"),
    call=CallTemplate(
        'function call<|role_sep|>\n{"name": "NAME", "arguments": ', "}", single=True
    ),
)

KIMI_K2 = ToolFormat(
    {
        "content": ParserState("content", {"<|tool_calls_section_begin|>": "calls"}),
        "calls": ParserState("skip", {"<|tool_call_begin|>": "head"}),
        "head": ParserState(
            "head", {"<|tool_call_argument_begin|>": "arguments"},
            routes=(("functions.", "arguments"), ("", "arguments")), is_call_id=True,
        ),
        "arguments": ParserState("arguments", next_state="end"),
        "end": ParserState("close", {"<|tool_call_end|>": "more"}),
        "more": ParserState(
            "close", {"<|tool_call_begin|>": "head", "<|tool_calls_section_end|>": "content"}
        ),
    },
    detect=("<|tool_calls_section_begin|>",),
    call=CallTemplate(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|>",
        prefix="<|tool_calls_section_begin|>", suffix="<|tool_calls_section_end|>", single=True,
    ),
)  # fmt: skip


def gemma_calls(begin: str, end: str, dialect: str) -> ToolFormat:
    """`begin call:NAME{key:value} end`."""
    states = {
        "content": ParserState("content", {begin: "call"}),
        "call": ParserState("skip", {"call:": "name"}),
        "name": ParserState("name", {"{": "peek arguments"}),
        "arguments": ParserState("arguments", next_state="close", dialect=dialect),
        "close": ParserState("close", {end: "content"}),
    }
    template = CallTemplate(f"{begin}call:NAME{{", f"}}{end}", dialect=dialect)
    return ToolFormat(states, detect=(begin,), call=template)


GEMMA4 = gemma_calls("<|tool_call>", "<tool_call|>", "gemma")
FUNCTIONGEMMA = gemma_calls("<start_function_call>", "<end_function_call>", "functiongemma")

_TURN_ENDS = {"<|end|>": "turn", "<|return|>": "turn", "<|call|>": "turn"}
_BODY = {**_TURN_ENDS, "<|start|>": "head", "<|channel|>": "head"}
HARMONY = ToolFormat(
    {
        "head": ParserState(
            "head", {"<|message|>": "content"}, allows_spaces=True,
            routes=(
                ("to=functions.", "arguments"), ("to=", "reasoning"), ("analysis", "reasoning"),
                ("", "content"),
            ),
        ),
        "reasoning": ParserState("reasoning", _BODY),
        "content": ParserState("content", _BODY),
        "arguments": ParserState("arguments", next_state="end"),
        "end": ParserState("close", _TURN_ENDS, fallback="content"),
        "turn": ParserState("close", {"<|start|>": "head", "<|channel|>": "head"}, fallback="content"),
    },
    start="head",
    detect=("<|channel|>", "<|message|>"),
    splits_reasoning=True,
    call=CallTemplate(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", single=True
    ),
)  # fmt: skip

TOOLS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "llama4_pythonic": LLAMA4,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
    "granite": json_list("<|tool_call|>", detect=("<|tool_call|>",)),
    "granite-20b-fc": json_calls("<function_call>", "", detect=("<function_call>",), newline=" "),
    "phi4_mini_json": json_list("functools", detect=("<|tool|>", "<|/tool|>")),
    "gemma4": GEMMA4,
    "functiongemma": FUNCTIONGEMMA,
    "olmo3": OLMO3,
    "xlam": XLAM,
    "internlm": replace(
        json_calls("<|action_start|><|plugin|>", "<|action_end|>", detect=("<|action_start|>", "<|plugin|>")),
        call=CallTemplate('<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ', "}<|action_end|>", "\n"),
    ),
    "jamba": json_list("<tool_calls>", "</tool_calls>", detect=("<tool_calls>",)),
    "lfm2": LFM2,
    "longcat": json_calls("<longcat_tool_call>", "</longcat_tool_call>", detect=("<longcat_tool_call>",)),
    "openai": HARMONY,
    "apertus": APERTUS,
    "cohere_command3": COHERE,
    "gigachat3": GIGACHAT3,
    "minimax": MINIMAX_M1,
    **tool_formats_xml.FORMATS,
}  # fmt: skip

# Constrained outputs use this format when a grammar cannot express the model's own.
ANY_CALLS = ToolFormat(
    _BARE_LIST,
    start="opening",
    call=CallTemplate('{"name": "NAME", "parameters": ', "}", ", ", prefix="[", suffix="]"),
)

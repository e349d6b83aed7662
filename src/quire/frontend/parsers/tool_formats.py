"""Tool call formats: tables for calls in JSON or Python syntax, and the list of all formats.

Knows what models write. `format_table` defines the notation; `tool_formats_xml` has the formats with one marker per
parameter.
"""

from __future__ import annotations

from dataclasses import replace

from quire.frontend.parsers import tool_formats_xml
from quire.frontend.parsers.format_table import ParserState, ToolFormat, Wrap


def tagged(
    begin: str, end: str, *, signs: tuple[str, ...] = (), separator: str = "\n", newline: str = "\n"
) -> ToolFormat:
    """`begin {"name": ..., "arguments": {...}} end`, repeated."""
    states = {
        "content": ParserState("content", {begin: "call"}),
        "call": ParserState("call", then="close"),
        "close": ParserState(
            "close", {end: "content"} if end else {}, other="" if end else "content"
        ),
    }
    wrap = Wrap(
        f'{begin}{newline}{{"name": "NAME", "arguments": ', f"}}{newline}{end}".rstrip(), separator
    )
    return ToolFormat(states, signs=signs, wrap=wrap)


def listed(
    begin: str, end: str = "", *, signs: tuple[str, ...] = (), ids: str = "random"
) -> ToolFormat:
    """`begin [{"name": ..., "arguments": {...}}, ...] end`."""
    closing = {end: "content"} if end else {}
    states = {
        "content": ParserState("content", {begin: "open"}),
        "open": ParserState("skip", {"[": "item"}),
        "item": ParserState("call", then="separator"),
        "separator": ParserState("close", {",": "item", "]": "closed"}),
        "closed": ParserState("close", closing, other="content"),
    }
    wrap = Wrap('{"name": "NAME", "arguments": ', "}", ", ", first=f"{begin}[", last=f"]{end}")
    return ToolFormat(states, wrap=wrap, signs=signs, ids="short" if ids == "short" else "random")


def pythonic(begin: str, end: str) -> dict[str, ParserState]:
    """`begin [f(a=1), g()] end`; the brackets are optional if there is an `end`."""
    closing = {end: "content"} if end else {}
    inner = {",": "item", "]": "closed"} | closing
    opening = (
        ParserState("skip", {"[": "item"}, other="item")
        if end
        else ParserState("skip", {"[": "item"})
    )
    separator = ParserState("close", inner, other="item") if end else ParserState("close", inner)
    states = {
        "list": opening,
        "item": ParserState("python", then="separator"),
        "separator": separator,
        "closed": ParserState("close", closing, other="content"),
    }
    return states | {"content": ParserState("content", {begin: "list"} if begin else {})}


HERMES = tagged("<tool_call>", "</tool_call>", signs=("<tool_call>", '"arguments"'))

# For outputs that consist of calls only. An output that begins otherwise is content, except after <|python_tag|>.
_BARE_OBJECT = {
    "content": ParserState("content", {"<|python_tag|>": "tag"}),
    "opening": ParserState("skip", {"<|python_tag|>": "tag", "{": "peek call"}, other="content"),
    "tag": ParserState("skip", {"{": "peek call"}),
    "call": ParserState("call", then="separator"),
    "separator": ParserState("close", {";": "tag", ",": "tag", "<|python_tag|>": "tag", "{": "peek call"}, other="content"),
}  # fmt: skip

_BARE_LIST = {
    "content": ParserState("content"),
    "opening": ParserState("skip", {"[": "item"}, other="content"),
    "item": ParserState("call", then="separator"),
    "separator": ParserState("close", {",": "item", "]": "closed"}),
    "closed": ParserState("close", other="content"),
}

LLAMA3 = ToolFormat(
    _BARE_OBJECT, start="opening", known_only=True, signs=('"parameters"', "<|start_header_id|>"),
    wrap=Wrap('{"name": "NAME", "parameters": ', "}", "; "),
)  # fmt: skip

XLAM_MARKS = {"[TOOL_CALLS]": "open", "<tool_call>": "open", "```json": "open"}
XLAM = ToolFormat(
    {
        "content": ParserState("content", {m: "open" for m in XLAM_MARKS if m != "```json"}),
        "opening": ParserState("skip", {**XLAM_MARKS, "[": "item", "{": "peek item"}, other="content"),
        "open": ParserState("skip", {"[": "item", "{": "peek item"}),
        "item": ParserState("call", then="separator"),
        "separator": ParserState(
            "close", {",": "item", "]": "closed", "</tool_call>": "content", "```": "content"},
            other="content",
        ),
        "closed": ParserState("close", {"</tool_call>": "content", "```": "content"}, other="content"),
    },
    start="opening",
    known_only=True,
    wrap=Wrap('{"name": "NAME", "arguments": ', "}", ", ", first="[", last="]"),
)  # fmt: skip

PYTHONIC = ToolFormat(
    pythonic("", "") | {"opening": ParserState("skip", {"[": "item"}, other="content")},
    start="opening",
    known_only=True,
    wrap=Wrap("NAME(", ")", ", ", first="[", last="]", dialect="python"),
)
LLAMA4 = ToolFormat(
    pythonic("<|python_start|>", "<|python_end|>")
    | {"opening": ParserState("skip", {"[": "item", "<|python_start|>": "list"}, other="content")},
    start="opening",
    known_only=True,
    signs=("<|python_start|>",),
    wrap=Wrap("NAME(", ")", ", ", "<|python_start|>[", "]<|python_end|>", dialect="python"),
)
OLMO3 = ToolFormat(
    pythonic("<function_calls>", "</function_calls>"),
    signs=("<function_calls>", "<functions>"),
    wrap=Wrap("NAME(", ")\n", "", "<function_calls>\n", "</function_calls>", dialect="python"),
)
LFM2 = ToolFormat(
    pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
    signs=("<|tool_call_start|>",),
    wrap=Wrap("NAME(", ")", ", ", "<|tool_call_start|>[", "]<|tool_call_end|>", dialect="python"),
)

# Old checkpoints write [TOOL_CALLS][{...}]; newer ones [TOOL_CALLS]name[ARGS]{...}, [ARGS] optional.
MISTRAL = ToolFormat(
    {
        "content": ParserState("content", {"[TOOL_CALLS]": "open"}),
        "open": ParserState("skip", {"[": "item"}, other="name"),
        "item": ParserState("call", then="separator"),
        "separator": ParserState("close", {",": "item", "]": "closed"}),
        "name": ParserState(
            "name", {"[ARGS]": "arguments", "[CALL_ID]": "id", "{": "peek arguments"}
        ),
        "id": ParserState("head", {"[ARGS]": "arguments", "{": "peek arguments"}),
        "arguments": ParserState("arguments", then="closed"),
        "closed": ParserState("close", {"[TOOL_CALLS]": "open"}, other="content"),
    },
    ids="short",
    signs=("[TOOL_CALLS]",),
    wrap=Wrap("[TOOL_CALLS]NAME[ARGS]", ""),
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
        "arguments": ParserState("arguments", then="fence"),
        "fence": ParserState("close", {"```": "end"}),
        "end": ParserState("close", {"<｜tool▁call▁end｜>": "more"}),
    },
    signs=("<｜tool▁call▁begin｜>", "```json"),
    wrap=Wrap(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        first="<｜tool▁calls▁begin｜>",
        last="<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK_V31 = ToolFormat(
    DEEPSEEK
    | {
        "call": ParserState("name", {"<｜tool▁sep｜>": "arguments"}),
        "arguments": ParserState("arguments", then="end"),
        "end": ParserState("close", {"<｜tool▁call▁end｜>": "more"}),
    },
    signs=("<｜tool▁call▁begin｜>",),
    wrap=Wrap(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        first="<｜tool▁calls▁begin｜>",
        last="<｜tool▁calls▁end｜>",
    ),
)
# [{"NAME": {...}}, ...]
APERTUS = ToolFormat(
    {
        "content": ParserState("content", {"<|tools_prefix|>": "open"}),
        "open": ParserState("skip", {"[": "item"}),
        "item": ParserState("skip", {"{": "quote"}),
        "quote": ParserState("skip", {'"': "name"}),
        "name": ParserState("name", {'"': "colon"}),
        "colon": ParserState("skip", {":": "arguments"}),
        "arguments": ParserState("arguments", then="end"),
        "end": ParserState("close", {"}": "separator"}),
        "separator": ParserState("close", {",": "item", "]": "closed"}),
        "closed": ParserState("close", {"<|tools_suffix|>": "content"}, other="content"),
    },
    signs=("<|tools_prefix|>",),
    wrap=Wrap('{"NAME": ', "}", ", ", first="<|tools_prefix|>[", last="]<|tools_suffix|>"),
)
COHERE = replace(
    listed("<|START_ACTION|>", "<|END_ACTION|>", signs=("<|START_ACTION|>",)),
    wrap=Wrap(
        '\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": ', "}", ",",
        first="<|START_ACTION|>[", last="\n]<|END_ACTION|>",
    ),
)  # fmt: skip
MINIMAX_M1 = ToolFormat(
    {
        "content": ParserState("content", {"<tool_calls>": "open"}),
        "open": ParserState("skip", {"{": "peek call"}),
        "call": ParserState("call", then="more"),
        "more": ParserState("close", {"{": "peek call", "</tool_calls>": "content"}),
    },
    wrap=Wrap(
        '{"name": "NAME", "arguments": ', "}\n", first="<tool_calls>\n", last="</tool_calls>"
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
        "call": ParserState("call", then="content"),
    },
    signs=("function call", "<|role_sep|>"),
    wrap=Wrap('function call<|role_sep|>\n{"name": "NAME", "arguments": ', "}", one=True),
)

KIMI_K2 = ToolFormat(
    {
        "content": ParserState("content", {"<|tool_calls_section_begin|>": "calls"}),
        "calls": ParserState("skip", {"<|tool_call_begin|>": "head"}),
        "head": ParserState(
            "head", {"<|tool_call_argument_begin|>": "arguments"},
            routes=(("functions.", "arguments"), ("", "arguments")), gives_id=True,
        ),
        "arguments": ParserState("arguments", then="end"),
        "end": ParserState("close", {"<|tool_call_end|>": "more"}),
        "more": ParserState(
            "close", {"<|tool_call_begin|>": "head", "<|tool_calls_section_end|>": "content"}
        ),
    },
    signs=("<|tool_calls_section_begin|>",),
    wrap=Wrap(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|>",
        first="<|tool_calls_section_begin|>", last="<|tool_calls_section_end|>", one=True,
    ),
)  # fmt: skip


def called(begin: str, end: str, dialect: str) -> ToolFormat:
    """`begin call:NAME{key:value} end`."""
    states = {
        "content": ParserState("content", {begin: "call"}),
        "call": ParserState("skip", {"call:": "name"}),
        "name": ParserState("name", {"{": "peek arguments"}),
        "arguments": ParserState("arguments", then="close", dialect=dialect),
        "close": ParserState("close", {end: "content"}),
    }
    return ToolFormat(
        states, signs=(begin,), wrap=Wrap(f"{begin}call:NAME{{", f"}}{end}", dialect=dialect)
    )


GEMMA4 = called("<|tool_call>", "<tool_call|>", "gemma")
FUNCTIONGEMMA = called("<start_function_call>", "<end_function_call>", "functiongemma")

_TURN_ENDS = {"<|end|>": "turn", "<|return|>": "turn", "<|call|>": "turn"}
_BODY = {**_TURN_ENDS, "<|start|>": "head", "<|channel|>": "head"}
HARMONY = ToolFormat(
    {
        "head": ParserState(
            "head", {"<|message|>": "content"}, spaced=True,
            routes=(
                ("to=functions.", "arguments"), ("to=", "reasoning"), ("analysis", "reasoning"),
                ("", "content"),
            ),
        ),
        "reasoning": ParserState("reasoning", _BODY),
        "content": ParserState("content", _BODY),
        "arguments": ParserState("arguments", then="end"),
        "end": ParserState("close", _TURN_ENDS, other="content"),
        "turn": ParserState("close", {"<|start|>": "head", "<|channel|>": "head"}, other="content"),
    },
    start="head",
    signs=("<|channel|>", "<|message|>"),
    whole=True,
    wrap=Wrap(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", one=True
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
    "granite": listed("<|tool_call|>", signs=("<|tool_call|>",)),
    "granite-20b-fc": tagged("<function_call>", "", signs=("<function_call>",), newline=" "),
    "phi4_mini_json": listed("functools", signs=("<|tool|>", "<|/tool|>")),
    "gemma4": GEMMA4,
    "functiongemma": FUNCTIONGEMMA,
    "olmo3": OLMO3,
    "xlam": XLAM,
    "internlm": replace(
        tagged(
            "<|action_start|><|plugin|>", "<|action_end|>", signs=("<|action_start|>", "<|plugin|>")
        ),
        wrap=Wrap(
            '<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ', "}<|action_end|>", "\n"
        ),
    ),
    "jamba": listed("<tool_calls>", "</tool_calls>", signs=("<tool_calls>",)),
    "lfm2": LFM2,
    "longcat": tagged(
        "<longcat_tool_call>", "</longcat_tool_call>", signs=("<longcat_tool_call>",)
    ),
    "openai": HARMONY,
    "apertus": APERTUS,
    "cohere_command3": COHERE,
    "gigachat3": GIGACHAT3,
    "minimax": MINIMAX_M1,
    **tool_formats_xml.FORMATS,
}

# Constrained outputs use this format when a grammar cannot express the model's own.
ANY_CALLS = ToolFormat(
    _BARE_LIST,
    start="opening",
    wrap=Wrap('{"name": "NAME", "parameters": ', "}", ", ", first="[", last="]"),
)

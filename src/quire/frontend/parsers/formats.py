"""The formats of tool calls, each a table.

Knows what models write. The notation is `table`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.frontend.parsers.table import Format, State, Wrap


def tagged(
    begin: str, end: str, *, signs: tuple[str, ...] = (), separator: str = "\n", newline: str = "\n"
) -> Format:
    """`begin {"name": ..., "arguments": {...}} end`, again and again."""
    states = {
        "content": State("content", {begin: "call"}),
        "call": State("call", then="close"),
        "close": State("close", {end: "content"} if end else {}, other="" if end else "content"),
    }
    wrap = Wrap(
        f'{begin}{newline}{{"name": "NAME", "arguments": ', f"}}{newline}{end}".rstrip(), separator
    )
    return Format(states, signs=signs, wrap=wrap)


def listed(
    begin: str, end: str = "", *, signs: tuple[str, ...] = (), ids: str = "random"
) -> Format:
    """`begin [{"name": ..., "arguments": {...}}, ...] end`."""
    closing = {end: "content"} if end else {}
    states = {
        "content": State("content", {begin: "open"}),
        "open": State("skip", {"[": "item"}),
        "item": State("call", then="separator"),
        "separator": State("close", {",": "item", "]": "closed"}),
        "closed": State("close", closing, other="content"),
    }
    wrap = Wrap('{"name": "NAME", "arguments": ', "}", ", ", first=f"{begin}[", last=f"]{end}")
    return Format(states, wrap=wrap, signs=signs, ids="short" if ids == "short" else "random")


def parameters(
    outer: tuple[str, str] | None,
    call: tuple[str, str, str],
    parameter: tuple[str, str, str],
    signs: tuple[str, ...],
    keyed: Mapping[str, str] | None = None,
) -> Format:
    """Parameters one by one: `outer (call NAME call (parameter KEY parameter VALUE parameter)* call)* outer`.

    `keyed`: marks after a key that say whether a value or a text follows.
    """
    begin, named, end = call
    first, after_key, last = parameter
    known = {first: "key", end: "end calls" if outer else "end content"}
    if outer is not None:
        known[outer[1]] = "end content"  # where the call's own end was left out
        states = {
            "content": State("content", {outer[0]: "calls"}),
            "calls": State("skip", {begin: "name"}),
            "more": State("close", {begin: "name", outer[1]: "content"}),
        }
        known[end] = "end more"
    else:
        states = {"content": State("content", {begin: "name"})}
    states |= {
        "name": State("name", {named: "parameters"}),
        "parameters": State("skip", known),
        "key": State("key", {after_key: "value", **(keyed or {})}),
        "value": State("value", {last: "parameters"}),
        "text": State("text", {last: "parameters"}),
    }
    return Format(states, signs=signs)


def pythonic(begin: str, end: str) -> dict[str, State]:
    """`begin [f(a=1), g()] end`; the brackets may be left out where there are marks around."""
    closing = {end: "content"} if end else {}
    inner = {",": "item", "]": "closed"} | closing
    opening = State("skip", {"[": "item"}, other="item") if end else State("skip", {"[": "item"})
    separator = State("close", inner, other="item") if end else State("close", inner)
    states = {
        "list": opening,
        "item": State("python", then="separator"),
        "separator": separator,
        "closed": State("close", closing, other="content"),
    }
    return states | {"content": State("content", {begin: "list"} if begin else {})}


HERMES = tagged("<tool_call>", "</tool_call>", signs=("<tool_call>", '"arguments"'))

# What an output of nothing but calls may begin with. Anything else is content to its end.
_BARE_OBJECT = {
    "content": State("content", {"<|python_tag|>": "tag"}),
    "opening": State("skip", {"<|python_tag|>": "tag", "{": "peek call"}, other="content"),
    "tag": State("skip", {"{": "peek call"}),
    "call": State("call", then="separator"),
    "separator": State("close", {";": "tag", ",": "tag", "<|python_tag|>": "tag", "{": "peek call"}, other="content"),
}  # fmt: skip

_BARE_LIST = {
    "content": State("content"),
    "opening": State("skip", {"[": "item"}, other="content"),
    "item": State("call", then="separator"),
    "separator": State("close", {",": "item", "]": "closed"}),
    "closed": State("close", other="content"),
}

LLAMA3 = Format(
    _BARE_OBJECT, start="opening", known_only=True, signs=('"parameters"', "<|start_header_id|>"),
    wrap=Wrap('{"name": "NAME", "parameters": ', "}", "; "),
)  # fmt: skip

XLAM_MARKS = {"[TOOL_CALLS]": "open", "<tool_call>": "open", "```json": "open"}
XLAM = Format(
    {
        "content": State("content", {m: "open" for m in XLAM_MARKS if m != "```json"}),
        "opening": State("skip", {**XLAM_MARKS, "[": "item", "{": "peek item"}, other="content"),
        "open": State("skip", {"[": "item", "{": "peek item"}),
        "item": State("call", then="separator"),
        "separator": State(
            "close", {",": "item", "]": "closed", "</tool_call>": "content", "```": "content"},
            other="content",
        ),
        "closed": State("close", {"</tool_call>": "content", "```": "content"}, other="content"),
    },
    start="opening",
    known_only=True,
)  # fmt: skip

PYTHONIC = Format(
    pythonic("", "") | {"opening": State("skip", {"[": "item"}, other="content")},
    start="opening",
    known_only=True,
)
LLAMA4 = Format(
    pythonic("<|python_start|>", "<|python_end|>")
    | {"opening": State("skip", {"[": "item", "<|python_start|>": "list"}, other="content")},
    start="opening",
    known_only=True,
    signs=("<|python_start|>",),
)
OLMO3 = Format(pythonic("<function_calls>", "</function_calls>"), signs=("<function_calls>", "<functions>"))  # fmt: skip
LFM2 = Format(pythonic("<|tool_call_start|>", "<|tool_call_end|>"), signs=("<|tool_call_start|>",))

# [TOOL_CALLS][{...}] in old checkpoints; [TOOL_CALLS]name[ARGS]{...}, or without [ARGS], in newer ones.
MISTRAL = Format(
    {
        "content": State("content", {"[TOOL_CALLS]": "open"}),
        "open": State("skip", {"[": "item"}, other="name"),
        "item": State("call", then="separator"),
        "separator": State("close", {",": "item", "]": "closed"}),
        "name": State("name", {"[ARGS]": "arguments", "[CALL_ID]": "id", "{": "peek arguments"}),
        "id": State("head", {"[ARGS]": "arguments", "{": "peek arguments"}),
        "arguments": State("arguments", then="closed"),
        "closed": State("close", {"[TOOL_CALLS]": "open"}, other="content"),
    },
    ids="short",
    signs=("[TOOL_CALLS]",),
    wrap=Wrap("[TOOL_CALLS]NAME[ARGS]", ""),
)

DEEPSEEK = {
    "content": State("content", {"<｜tool▁calls▁begin｜>": "calls"}),
    "calls": State("skip", {"<｜tool▁call▁begin｜>": "call"}),
    "more": State("close", {"<｜tool▁call▁begin｜>": "call", "<｜tool▁calls▁end｜>": "content"}),
}
DEEPSEEK_V3 = Format(
    DEEPSEEK
    | {
        "call": State("head", {"<｜tool▁sep｜>": "name"}),
        "name": State("name", {"```json": "arguments"}),
        "arguments": State("arguments", then="fence"),
        "fence": State("close", {"```": "end"}),
        "end": State("close", {"<｜tool▁call▁end｜>": "more"}),
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
DEEPSEEK_V31 = Format(
    DEEPSEEK
    | {
        "call": State("name", {"<｜tool▁sep｜>": "arguments"}),
        "arguments": State("arguments", then="end"),
        "end": State("close", {"<｜tool▁call▁end｜>": "more"}),
    },
    signs=("<｜tool▁call▁begin｜>",),
    wrap=Wrap(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        first="<｜tool▁calls▁begin｜>",
        last="<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK_V32 = parameters(
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    ('<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>"),
    ("｜DSML｜",),
    {'" string="true">': "text", '" string="false">': "value"},
)
KIMI_K2 = Format(
    {
        "content": State("content", {"<|tool_calls_section_begin|>": "calls"}),
        "calls": State("skip", {"<|tool_call_begin|>": "head"}),
        "head": State(
            "head", {"<|tool_call_argument_begin|>": "arguments"},
            routes=(("functions.", "arguments"), ("", "arguments")), gives_id=True,
        ),
        "arguments": State("arguments", then="end"),
        "end": State("close", {"<|tool_call_end|>": "more"}),
        "more": State(
            "close", {"<|tool_call_begin|>": "head", "<|tool_calls_section_end|>": "content"}
        ),
    },
    signs=("<|tool_calls_section_begin|>",),
    wrap=Wrap(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|>",
        first="<|tool_calls_section_begin|>", last="<|tool_calls_section_end|>", one=True,
    ),
)  # fmt: skip

QWEN3_CODER = parameters(
    ("<tool_call>", "</tool_call>"),
    ("<function=", ">", "</function>"),
    ("<parameter=", ">", "</parameter>"),
    ("<tool_call>", "<function=", "<parameter="),
)
SEED_OSS = parameters(
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<function=", ">", "</function>"),
    ("<parameter=", ">", "</parameter>"),
    ("<seed:tool_call>",),
)
MINIMAX_M2 = parameters(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', '">', "</parameter>"),
    ("<minimax:tool_call>",),
)
# The name ends where the first parameter begins, or the call ends.
GLM45 = Format(
    {
        "content": State("content", {"<tool_call>": "name"}),
        "name": State("name", {"<arg_key>": "peek parameters", "</tool_call>": "end content"}),
        "parameters": State("skip", {"<arg_key>": "key", "</tool_call>": "end content"}),
        "key": State("key", {"</arg_key>": "between"}),
        "between": State("skip", {"<arg_value>": "value"}),
        "value": State("value", {"</arg_value>": "parameters"}),
    },
    signs=("<tool_call>", "<arg_key>"),
)


def called(begin: str, end: str, dialect: str) -> Format:
    """`begin call:NAME{key:value} end`."""
    states = {
        "content": State("content", {begin: "call"}),
        "call": State("skip", {"call:": "name"}),
        "name": State("name", {"{": "peek arguments"}),
        "arguments": State("arguments", then="close", dialect=dialect),
        "close": State("close", {end: "content"}),
    }
    return Format(states, signs=(begin,))


GEMMA4 = called("<|tool_call>", "<tool_call|>", "gemma")
FUNCTIONGEMMA = called("<start_function_call>", "<end_function_call>", "functiongemma")

_TURN_ENDS = {"<|end|>": "turn", "<|return|>": "turn", "<|call|>": "turn"}
_BODY = {**_TURN_ENDS, "<|start|>": "head", "<|channel|>": "head"}
HARMONY = Format(
    {
        "head": State(
            "head", {"<|message|>": "content"}, spaced=True,
            routes=(
                ("to=functions.", "arguments"), ("to=", "reasoning"), ("analysis", "reasoning"),
                ("", "content"),
            ),
        ),
        "reasoning": State("reasoning", _BODY),
        "content": State("content", _BODY),
        "arguments": State("arguments", then="end"),
        "end": State("close", _TURN_ENDS, other="content"),
        "turn": State("close", {"<|start|>": "head", "<|channel|>": "head"}, other="content"),
    },
    start="head",
    signs=("<|channel|>", "<|message|>"),
    whole=True,
    wrap=Wrap(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", one=True
    ),
)  # fmt: skip

TOOLS: dict[str, Format] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "llama4_pythonic": LLAMA4,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "qwen3_coder": QWEN3_CODER,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "glm45": GLM45,
    "kimi_k2": KIMI_K2,
    "granite": listed("<|tool_call|>", signs=("<|tool_call|>",)),
    "granite-20b-fc": tagged("<function_call>", "", signs=("<function_call>",), newline=" "),
    "phi4_mini_json": listed("functools", signs=("<|tool|>", "<|/tool|>")),
    "minimax_m2": MINIMAX_M2,
    "gemma4": GEMMA4,
    "functiongemma": FUNCTIONGEMMA,
    "olmo3": OLMO3,
    "seed_oss": SEED_OSS,
    "xlam": XLAM,
    "internlm": tagged(
        "<|action_start|><|plugin|>", "<|action_end|>", signs=("<|action_start|>", "<|plugin|>")
    ),
    "jamba": listed("<tool_calls>", "</tool_calls>", signs=("<tool_calls>",)),
    "lfm2": LFM2,
    "longcat": tagged(
        "<longcat_tool_call>", "</longcat_tool_call>", signs=("<longcat_tool_call>",)
    ),
    "openai": HARMONY,
}

# What a constraint makes of an output where the model's own format is none that it can write.
ANY_CALLS = Format(
    _BARE_LIST,
    start="opening",
    wrap=Wrap('{"name": "NAME", "parameters": ', "}", ", ", first="[", last="]"),
)

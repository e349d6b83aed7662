"""Tool call formats in XML style: each parameter has markers of its own.

Knows what models write. `format_table` defines the notation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.frontend.parsers.format_table import Parameter, ParserState, ToolFormat, Wrap

GAP = "\n"
"""Line break that a grammar writes between parts. Within outer markers it belongs to a call's end: llguidance matches
the longest token, so no text that may follow a call may begin like the outer end marker."""


def tagged_parameters(
    outer: tuple[str, str] | None,
    call: tuple[str, str, str],
    parameter: tuple[str, str, str],
    signs: tuple[str, ...],
    *,
    typed: tuple[str, str] | None = None,
    lines: bool = False,
    exact: bool = False,
    together: bool = True,
) -> ToolFormat:
    """`outer (call NAME call (parameter KEY parameter VALUE parameter)* call)* outer`.

    Args:
        typed: markers after a key, for a string value and for any other value.
        lines: values are on lines of their own.
        exact: line breaks around a value belong to it.
        together: one pair of outer markers encloses several calls.
    """
    begin, named, end = call
    first, after_key, last = parameter
    known = {first: "key", end: "end content"}
    states = {"content": ParserState("content", {begin: "name"})}
    if outer is not None:
        known |= {end: "end more", outer[1]: "end content"}  # the model may omit the call's own end
        states = {
            "content": ParserState("content", {outer[0]: "calls"}),
            "calls": ParserState("skip", {begin: "name"}),
            "more": ParserState("close", {begin: "name", outer[1]: "content"}),
        }
    marks = {after_key: "value"} | ({typed[0]: "text", typed[1]: "value"} if typed else {})
    states |= {
        "name": ParserState("name", {named: "parameters"}),
        "parameters": ParserState("skip", known),
        "key": ParserState("key", marks),
        "value": ParserState("value", {last: "parameters"}, exact=exact),
        "text": ParserState("text", {last: "parameters"}, exact=exact),
    }
    around = GAP if lines else ""
    spelled = Parameter(f"{first}KEY{after_key}{around}", last, before_end=around)
    if typed:
        spelled = Parameter(f"{first}KEY{typed[1]}", last, f"{first}KEY{typed[0]}")
    wrap = Wrap(f"{begin}NAME{named}{GAP}", end, GAP, parameter=spelled)
    if outer is not None and together:
        wrap = _together(wrap, outer)
    elif outer is not None:
        wrap = Wrap(f"{outer[0]}{GAP}{wrap.begin}", f"{end}{GAP}{outer[1]}", GAP, parameter=spelled)
    return ToolFormat(states, signs=signs, wrap=wrap)


def _together(wrap: Wrap, outer: tuple[str, str]) -> Wrap:
    """The same wrap for calls within one pair of outer markers."""
    return replace(wrap, end=wrap.end + GAP, between="", first=outer[0] + GAP, last=outer[1])


def functions(mark: str, signs: tuple[str, ...], exact: bool = False) -> ToolFormat:
    return tagged_parameters(
        (f"<{mark}>", f"</{mark}>"),
        ("<function=", ">", "</function>"),
        ("<parameter=", ">", "</parameter>"),
        signs,
        lines=not exact,
        exact=exact,
        together=False,
    )


def invokes(mark: str, outer: str, signs: tuple[str, ...], typed: bool = False) -> ToolFormat:
    return tagged_parameters(
        (f"<{outer}>", f"</{outer}>"),
        (f'<{mark}invoke name="', '">', f"</{mark}invoke>"),
        (f'<{mark}parameter name="', '">', f"</{mark}parameter>"),
        signs,
        typed=('" string="true">', '" string="false">') if typed else None,
    )


def pairs(
    call: tuple[str, str], outer: tuple[str, str] | None, named: str, signs: tuple[str, ...],
    mark: str = "", more: Mapping[str, ParserState] | None = None,
) -> ToolFormat:  # fmt: skip
    """`call NAME named (<arg_key>KEY</arg_key> <arg_value>VALUE</arg_value>)* call`; `named` may be empty.

    `mark` is a prefix of `arg_key` and `arg_value`; `more` replaces or adds states.
    """
    begin, end = call
    key, value = f"{mark}arg_key>", f"{mark}arg_value>"
    after = "end more" if outer else "end content"
    # The first parameter or the end of the call also ends a name.
    ends = {f"<{key}": "peek parameters", **({named: "parameters"} if named else {})}
    states = {
        "content": ParserState(
            "content", {outer[0] if outer else begin: "calls" if outer else "name"}
        ),
        "name": ParserState("name", {**ends, end: after}),
        "parameters": ParserState("skip", {f"<{key}": "key", end: after}),
        "key": ParserState("key", {f"</{key}": "between"}),
        "between": ParserState("skip", {f"<{value}": "value"}),
        "value": ParserState("value", {f"</{value}": "parameters"}),
    }
    if outer is not None:
        states["calls"] = ParserState("skip", {begin: "name"})
        states["more"] = ParserState("close", {begin: "name", outer[1]: "content"})
    spelled = Parameter(f"<{key}KEY</{key}{GAP}<{value}", f"</{value}")
    wrap = Wrap(f"{begin}NAME{named}{GAP}", end, GAP, parameter=spelled)
    if outer is not None:
        wrap = _together(wrap, outer)
    return ToolFormat(states | dict(more or {}), signs=signs, wrap=wrap)


def also(suffix: str, format: ToolFormat) -> ToolFormat:
    """The format that also accepts each marker with `suffix` before its `>`."""
    states = {
        name: replace(state, on={**{f"{mark[:-1]}{suffix}>": to for mark, to in state.on.items()}, **state.on})
        for name, state in format.states.items()
    }  # fmt: skip
    return replace(format, states=states)


_QWEN = ("<tool_call>", "<function=", "<parameter=")
_MINICPM5 = tagged_parameters(
    None,
    ('<function name="', '">', "</function>"),
    ('<param name="', '">', "</param>"),
    ('<function name="', '<param name="'),
)
_STEP3 = tagged_parameters(
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    ('<steptml:invoke name="', '">', "</steptml:invoke>"),
    ('<steptml:parameter name="', '">', "</steptml:parameter>"),
    ("<steptml:",),
)

FORMATS: dict[str, ToolFormat] = {
    "qwen3_coder": functions("tool_call", _QWEN),
    "mimo": functions("tool_call", (), exact=True),
    "seed_oss": functions("seed:tool_call", ("<seed:tool_call>",)),
    "minimax_m2": invokes("", "minimax:tool_call", ("<minimax:tool_call>",)),
    "dots": invokes("", "dots_function_call", ("<dots_function_call>",)),
    "deepseek_v32": invokes("｜DSML｜", "｜DSML｜function_calls", ("｜DSML｜function_calls",), typed=True),
    "deepseek_v4": invokes("｜DSML｜", "｜DSML｜tool_calls", ("｜DSML｜tool_calls",), typed=True),
    "deepseek_v41": invokes("｜DSML｜ ", "｜DSML｜ calls", ("｜DSML｜ calls",), typed=True),
    "glm45": pairs(("<tool_call>", "</tool_call>"), None, "", ("<tool_call>", "<arg_key>")),
    "hy_v3": also(
        ":opensource",
        pairs(
            ("<tool_call>", "</tool_call>"), ("<tool_calls>", "</tool_calls>"), "<tool_sep>",
            ("<tool_call", "<arg_key", "<tool_sep"),
        ),
    ),
    # A call may be JSON. A parameter may state its type, which is ignored: the tool's schema has it.
    "k2_horizon": pairs(
        ("<ifm|tool_call>", "</ifm|tool_call>"), ("<ifm|tool_calls>", "</ifm|tool_calls>"), "",
        ("<ifm|tool_call>",), "ifm|",
        {
            "calls": ParserState("skip", {"<ifm|tool_call>": "form"}),
            "more": ParserState("close", {"<ifm|tool_call>": "form", "</ifm|tool_calls>": "content"}),
            "form": ParserState("skip", {"{": "peek call"}, other="name"),
            "call": ParserState("call", then="end"),
            "end": ParserState("close", {"</ifm|tool_call>": "more"}),
            "between": ParserState("skip", {"<ifm|arg_type>": "type", "<ifm|arg_value>": "value"}),
            "type": ParserState("head", {"</ifm|arg_type>": "between"}),
        },
    ),
    # A value inside <![CDATA[ ]]> may be any text.
    "minicpm5": ToolFormat(
        {
            **_MINICPM5.states,
            "key": ParserState("key", {'"': "opened"}),
            "opened": ParserState("skip", {"><![CDATA[": "data", ">": "value"}),
            "data": ParserState("value", {"]]></param>": "parameters"}, exact=True),
        },
        signs=_MINICPM5.signs,
        wrap=Wrap('<function name="NAME">', "</function>", GAP, parameter=Parameter('<param name="KEY">', "</param>")),
    ),
    "step3": ToolFormat(
        {
            **_STEP3.states,
            "calls": ParserState("skip", {"<｜tool_call_begin｜>": "kind"}),
            "kind": ParserState("head", {"<｜tool_sep｜>": "invoke"}),
            "invoke": ParserState("skip", {'<steptml:invoke name="': "name"}),
            "parameters": ParserState("skip", {'<steptml:parameter name="': "key", "</steptml:invoke>": "end closing"}),
            "closing": ParserState("close", {"<｜tool_call_end｜>": "more"}),
            "more": ParserState("close", {"<｜tool_call_begin｜>": "kind", "<｜tool_calls_end｜>": "content"}),
        },
        signs=_STEP3.signs,
        wrap=Wrap(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n',
            "</steptml:invoke><｜tool_call_end｜>\n", "", "<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>",
            parameter=Parameter('<steptml:parameter name="KEY">', "</steptml:parameter>"),
        ),
    ),
}  # fmt: skip

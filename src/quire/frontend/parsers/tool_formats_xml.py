"""Tool call formats in XML style: each parameter has markers of its own.

Knows what models write. `format_table` defines the notation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.frontend.parsers.format_table import CallTemplate, Parameter, ParserState, ToolFormat

GAP = "\n"
"""Line break that a grammar writes between parts. Within outer markers it belongs to a call's end: llguidance matches
the longest token, so no text that may follow a call may begin like the outer end marker."""


def parameter_tags(
    outer: tuple[str, str] | None,
    call: tuple[str, str, str],
    parameter: tuple[str, str, str],
    detect: tuple[str, ...],
    *,
    typed: tuple[str, str] | None = None,
    lines: bool = False,
    verbatim: bool = False,
    together: bool = True,
) -> ToolFormat:
    """`outer (call NAME call (parameter KEY parameter VALUE parameter)* call)* outer`.

    Args:
        typed: markers after a key, for a string value and for any other value.
        lines: values are on lines of their own.
        verbatim: line breaks around a value belong to it.
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
        "value": ParserState("value", {last: "parameters"}, verbatim=verbatim),
        "text": ParserState("text", {last: "parameters"}, verbatim=verbatim),
    }
    around = GAP if lines else ""
    spelled = Parameter(f"{first}KEY{after_key}{around}", last, before_end=around)
    if typed:
        spelled = Parameter(f"{first}KEY{typed[1]}", last, f"{first}KEY{typed[0]}")
    template = CallTemplate(f"{begin}NAME{named}{GAP}", end, GAP, parameter=spelled)
    if outer is not None and together:
        template = with_outer_markers(template, outer)
    elif outer is not None:
        template = CallTemplate(
            f"{outer[0]}{GAP}{template.begin}", f"{end}{GAP}{outer[1]}", GAP, parameter=spelled
        )
    return ToolFormat(states, detect=detect, call=template)


def with_outer_markers(template: CallTemplate, outer: tuple[str, str]) -> CallTemplate:
    """The same template for calls within one pair of outer markers."""
    return replace(
        template, end=template.end + GAP, separator="", prefix=outer[0] + GAP, suffix=outer[1]
    )


def function_tags(mark: str, detect: tuple[str, ...], verbatim: bool = False) -> ToolFormat:
    return parameter_tags(
        (f"<{mark}>", f"</{mark}>"),
        ("<function=", ">", "</function>"),
        ("<parameter=", ">", "</parameter>"),
        detect,
        lines=not verbatim,
        verbatim=verbatim,
        together=False,
    )


def invoke_tags(mark: str, outer: str, detect: tuple[str, ...], typed: bool = False) -> ToolFormat:
    return parameter_tags(
        (f"<{outer}>", f"</{outer}>"),
        (f'<{mark}invoke name="', '">', f"</{mark}invoke>"),
        (f'<{mark}parameter name="', '">', f"</{mark}parameter>"),
        detect,
        typed=('" string="true">', '" string="false">') if typed else None,
    )


def key_value_tags(
    call: tuple[str, str], outer: tuple[str, str] | None, named: str, detect: tuple[str, ...],
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
    template = CallTemplate(f"{begin}NAME{named}{GAP}", end, GAP, parameter=spelled)
    if outer is not None:
        template = with_outer_markers(template, outer)
    return ToolFormat(states | dict(more or {}), detect=detect, call=template)


def with_marker_suffix(suffix: str, format: ToolFormat) -> ToolFormat:
    """The format that also accepts each marker with `suffix` before its `>`."""
    states = {
        name: replace(state, markers={**{f"{mark[:-1]}{suffix}>": to for mark, to in state.markers.items()}, **state.markers})
        for name, state in format.states.items()
    }  # fmt: skip
    return replace(format, states=states)


_QWEN = ("<tool_call>", "<function=", "<parameter=")
_MINICPM5 = parameter_tags(
    None,
    ('<function name="', '">', "</function>"),
    ('<param name="', '">', "</param>"),
    ('<function name="', '<param name="'),
)
_STEP3 = parameter_tags(
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    ('<steptml:invoke name="', '">', "</steptml:invoke>"),
    ('<steptml:parameter name="', '">', "</steptml:parameter>"),
    ("<steptml:",),
)

FORMATS: dict[str, ToolFormat] = {
    "qwen3_coder": function_tags("tool_call", _QWEN),
    "mimo": function_tags("tool_call", (), verbatim=True),
    "seed_oss": function_tags("seed:tool_call", ("<seed:tool_call>",)),
    "minimax_m2": invoke_tags("", "minimax:tool_call", ("<minimax:tool_call>",)),
    "dots": invoke_tags("", "dots_function_call", ("<dots_function_call>",)),
    "deepseek_v32": invoke_tags("｜DSML｜", "｜DSML｜function_calls", ("｜DSML｜function_calls",), typed=True),
    "deepseek_v4": invoke_tags("｜DSML｜", "｜DSML｜tool_calls", ("｜DSML｜tool_calls",), typed=True),
    "deepseek_v41": invoke_tags("｜DSML｜ ", "｜DSML｜ calls", ("｜DSML｜ calls",), typed=True),
    "glm45": key_value_tags(("<tool_call>", "</tool_call>"), None, "", ("<tool_call>", "<arg_key>")),
    "hy_v3": with_marker_suffix(
        ":opensource",
        key_value_tags(
            ("<tool_call>", "</tool_call>"), ("<tool_calls>", "</tool_calls>"), "<tool_sep>",
            ("<tool_call", "<arg_key", "<tool_sep"),
        ),
    ),
    # A call may be JSON. A parameter may state its type, which is ignored: the tool's schema has it.
    "k2_horizon": key_value_tags(
        ("<ifm|tool_call>", "</ifm|tool_call>"), ("<ifm|tool_calls>", "</ifm|tool_calls>"), "",
        ("<ifm|tool_call>",), "ifm|",
        {
            "calls": ParserState("skip", {"<ifm|tool_call>": "form"}),
            "more": ParserState("close", {"<ifm|tool_call>": "form", "</ifm|tool_calls>": "content"}),
            "form": ParserState("skip", {"{": "peek call"}, fallback="name"),
            "call": ParserState("call", next_state="end"),
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
            "data": ParserState("value", {"]]></param>": "parameters"}, verbatim=True),
        },
        detect=_MINICPM5.detect,
        call=CallTemplate('<function name="NAME">', "</function>", GAP, parameter=Parameter('<param name="KEY">', "</param>")),
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
        detect=_STEP3.detect,
        call=CallTemplate(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n',
            "</steptml:invoke><｜tool_call_end｜>\n", "", "<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>",
            parameter=Parameter('<steptml:parameter name="KEY">', "</steptml:parameter>"),
        ),
    ),
}  # fmt: skip

"""Regexes, choices, grammars and tags: admitted texts, and refused constraints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from grammar_reader import Reader

from quire.errors import ValidationError
from quire.features.structured.validate import check_constraint
from quire.frontend.parsers.formats import REASONING
from quire.frontend.parsers.tool_constraints import answer_or_calls
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import StructuredOutputsParams as Form

PAD, BOS = 0, 1  # special tokens of tests/tiny_llama.py
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def new(format: Any) -> Form:
    return Form(structural_tag={"type": "structural_tag", "format": format})


def tag(begin: str = "<t>", content: Any = NUMBER, end: Any = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**more: Any) -> Form:
    return new({"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag()], **more})


CALLS = Form(
    structural_tag={
        "type": "structural_tag",
        "triggers": ["<f="],
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
        ],
    }
)  # fmt: skip
SEPARATED = {"type": "tags_with_separator", "separator": ",", "tags": [tag()]}

ADMITS: list[tuple[Form, list[Any], list[Any]]] = [
    (Form(regex="[a-c]+"), ["a", "abc"], ["", "d", "abd"]),
    (Form(regex="a|bc"), ["a", "bc"], ["abc", "b", "ac"]),  # the whole output, not a part of it
    (Form(regex="(a/b)?\\n."), ["a/b\nx", "\ny"], ["a/b", "\n"]),
    (Form(regex="\\d{2}-\\p{L}"), ["12-é"], ["1-a", "12-1"]),
    (Form(regex=""), [""], ["a"]),
    (Form(choice=["yes", "no", "not"]), ["yes", "no", "not"], ["y", "noo", ""]),
    (Form(choice=['a"b', "c\\d", "é\n", "🙂"]), ['a"b', "c\\d", "é\n", "🙂"], ["a", "c"]),
    (Form(choice=["a", "a"]), ["a"], ["aa"]),
    (Form(choice=[f"choice {n}" for n in range(4000)]), ["choice 0", "choice 3999"], ["choice 4000", "choice"]),
    (Form(json_object=True), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{", '"a"']),
    (Form(grammar='root ::= "a" b*\nb ::= [0-9] | "(" b ")"'), ["a", "a1(2)((3))"], ["b", "a(", "a(1"]),
    (Form(grammar='root ::= ("x" | y){2,3}\ny ::= "y"?'), ["xx", "xyx", ""], ["xxxx"]),
    (Form(grammar='start: "a" n ["!"]\nn: /[0-9]+/ | "(" n ")"\n'), ["a1", "a(12)!"], ["a", "a(1"]),
    (Form(grammar='?start: "a" | n\n?n: /[0-9]/ -> digit'), ["a", "1"], ["", "b"]),
    (Form(grammar='!start.1: "a" n\nn.-2 : B\nB.5: "b.5:"'), ["ab.5:"], ["a", "ab:"]),
    (Form(grammar="start: %json {\"type\": \"integer\"}"), ["12"], ["x", "1.5"]),
    (CALLS, ["", "hi", 'x <f=a>{"x":1}</f> y', '<f=b>1</f><f=a>{"x":2}</f>', "a < f= <f"], ["<f=", "<f=c>", "<f=b>x</f>", "<f=b>1"]),
    (new(tag(content={"type": "any_text"}, begin="", end="</think>")), ["</think>", "a < b</think>"], ["<think>a", "a", "a</think>b"]),
    (new(tag(content={"type": "any_text"}, begin="<think>", end="</think>")), ["<think></think>", "<think>a < b</think>"], ["<think>a", "a", "<think>a</think>b"]),
    (new(tag(end=["</t>", "!"])), ["<t>1</t>", "<t>1!"], ["<t>1", "<t>x!"]),
    (new(tag(content={"type": "any_text"}, end=["]", "}"])), ["<t>a]", "<t>b}"], ["<t>a", "<t>a]b]"]),
    (triggered(), ["", "a", "<t>1</t>", "a<t>1</t>b<t>2</t>"], ["<t>", "<t>x", "a<t>1"]),
    (triggered(at_least_one=True), ["<t>1</t>", "<t>1</t>a<t>2</t>"], ["", "a"]),
    (triggered(stop_after_first=True), ["a", "b<t>1</t>"], ["<t>1</t>a", "<t>1</t><t>2</t>"]),
    (triggered(at_least_one=True, stop_after_first=True), ["<t>1</t>"], ["", "a", "<t>1</t>a"]),
    (new(SEPARATED), ["", "<t>1</t>", "<t>1</t>,<t>2</t>"], ["<t>1</t>,", "<t>1</t><t>2</t>", ","]),
    (new(SEPARATED | {"at_least_one": True, "stop_after_first": True}), ["<t>1</t>"], ["", "<t>1</t>,<t>2</t>"]),
    (new({"type": "sequence", "elements": [tag(content={"type": "any_text"}), {"type": "regex", "pattern": "[0-9/]+"}]}), ["<t>a</t>1/2"], ["<t>a</t>", "1"]),
    (new({"type": "or", "elements": [{"type": "const_string", "value": "yes"}, {"type": "grammar", "grammar": 'root ::= "n" "o"+'}]}), ["yes", "noo"], ["n", "y"]),
    (new({"type": "any_text", "excludes": ["bad", "x/y"]}), ["", "good", "ba d"], ["a bad one", "x/y"]),
    (new({"type": "star", "content": {"type": "const_string", "value": "ab"}}), ["", "abab"], ["a", "aba"]),
    (new({"type": "plus", "content": NUMBER}), ["1", "12"], [""]),
    (new({"type": "optional", "content": NUMBER}), ["", "12"], ["x"]),
    # special tokens are themselves, in tags; their spelling in bytes is other text
    (new(tag("<|bos|>", NUMBER, "<|pad|>")), [(BOS, "12", PAD)], [(BOS, "12"), ("<", "|bos|>12", PAD)]),
    (new({"type": "triggered_tags", "triggers": ["<|bos|>"], "tags": [tag("<|bos|>call:", NUMBER, "<|pad|>")]}),
     ["hi", ("hi", BOS, "call:3", PAD), ("a", BOS, "call:3", PAD, "b", BOS, "call:4", PAD)], [("hi", BOS), (BOS, "x"), ("hi", PAD)]),
    (new(tag("<a>", {"type": "any_text"}, "<|pad|>")), [("<a>foo", PAD)], ["<a>foo", ("<a>foo", BOS)]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ADMITS)))
def test_forms(reader: Reader, number: int):
    form, admits, refuses = ADMITS[number]
    for text in admits:
        assert reader.admits(form, *([text] if isinstance(text, str) else text)), text
    for text in refuses:
        assert not reader.admits(form, *([text] if isinstance(text, str) else text)), text


REFUSED: list[tuple[Form, str]] = [
    (Form(regex="("), "unclosed group"),
    (Form(regex="(?=a)b"), "look-around"),
    (Form(regex="(a)\\1"), "backreferences"),
    (Form(regex="\\bfoo"), "not supported"),
    (Form(regex="a" * (1 << 20) + "a"), "the limit is"),
    (Form(choice=["x"] * 5000), "the limit is 4096"),
    (Form(grammar=" "), "empty"),
    (Form(grammar='root ::= "a" missing'), "missing"),
    (Form(grammar='other ::= "a"'), "root"),
    (Form(grammar="start: a\n"), '"a"'),
    (Form(structural_tag="["), "not JSON"),
    (Form(structural_tag={}), "`format`"),
    (new({"type": "qwen_xml_parameter", "json_schema": {}}), "qwen_xml_parameter"),
    (new({"type": "token", "token": 3}), "'token'"),
    (new(tag(content={"type": "json_schema", "json_schema": {"not": {}}})), "not"),
    (new(tag(end=None)), "`end`"),
    (new({"type": "tag", "content": NUMBER, "end": "</t>"}), "`begin`"),
    (new({"type": "sequence", "elements": []}), "`elements`"),
    (new({"type": "sequence", "elements": [{"type": "any_text"}, NUMBER]}), "any_text must come last"),
    (new({"type": "sequence", "elements": [triggered().structural_tag["format"], NUMBER]}), "triggered_tags must come last"),  # type: ignore[index]
    (triggered(triggers=["<x>"]), "none of the triggers"),
    (triggered(triggers=["<t>", "<u>"]), "no tag starts with"),
    (triggered(excludes=["a"]), "excludes"),
    (Form(json={}, whitespace_pattern="("), "regex"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals_contain_the_reason(number: int):
    form, says = REFUSED[number]
    with pytest.raises(ValidationError) as caught:
        check_constraint(form)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"structured_outputs.{form.kind}: ")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (Form(json={"type": "objct"}), "structured_outputs.json: Invalid type: objct"),
        (Form(json={"type": "objct"}, field_name="response_format"), "response_format: Invalid type: objct"),
        (Form(regex="a(("), 'structured_outputs.regex: invalid regex "a((" (in regex): regex parse error:\n    a((\n      ^\nerror: unclosed group'),
        (Form(grammar='start: "a" é'), "structured_outputs.grammar: "),
        (Form(grammar='start: "é" b'), 'structured_outputs.grammar: unknown name: "b"\n   1 | start: "é" b\n              ^'),
    ],
)  # fmt: skip
def test_errors_show_the_clients_text_and_no_other(form: Form, says: str):
    """The grammar around it, for a model with reasoning, is not shown, and the field is the client's."""
    for one in (form, answer_or_calls(form, REASONING["qwen3"], True)):
        with pytest.raises(ValidationError) as caught:
            check_constraint(one)
        assert str(caught.value).rstrip().startswith(says)
        assert "%llguidance" not in str(caught.value)
        assert "r0" not in str(caught.value)
        assert caught.value.parameter == form.field_name


# -- the parameter --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"json": {}, "regex": "a"}, {"json": 5}, {"regex": 5}, {"choice": "ab"}, {"choice": [1]}, {"choice": []}, {"choice": 5},
        {"choice": {"a": 1}}, {"choice": ["a", ""]}, {"json_object": "yes"}, {"json_object": False}, {"structural_tag": 5},
        {"regex": "a", "disable_any_whitespace": "no"},
    ],
)  # fmt: skip
def test_invalid_constraints_are_refused(fields: dict[str, Any]):
    with pytest.raises(ValidationError, match="structured_outputs"):
        Form(**fields)


def test_the_same_on_the_wire():
    for form, *_ in ADMITS:
        params = SamplingParams(structured_outputs=form.plain())
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
        assert again == params
        assert again.structured_outputs is not None
        assert again.structured_outputs.key == form.plain().key


def test_older_names_and_shapes(caplog: pytest.LogCaptureFixture):
    assert SamplingParams(guided_decoding=Form(regex="a")).structured_outputs == Form(regex="a")
    assert SamplingParams(
        structured_outputs={"choice": ["a"], "regex": None}
    ).structured_outputs == Form(choice=["a"])  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="old name"):
        SamplingParams(guided_decoding=Form(regex="a"), structured_outputs=Form(regex="a"))
    with pytest.raises(ValidationError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs="[0-9]")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="yaml"):
        SamplingParams(structured_outputs={"yaml": "a"})  # type: ignore[arg-type]


def test_a_pydantic_class_is_its_schema(reader: Reader):
    model = SimpleNamespace(model_json_schema=lambda: {"const": 5})
    assert reader.admits(Form(json=model), "5")  # type: ignore[arg-type]

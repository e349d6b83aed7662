"""The engine xgrammar: what it is given it enforces, and what it would drop in silence it is not given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from constraint_cases import KINDS
from grammar_reader import Reader
from msgspec.structs import replace
from schema_cases import CASES, INT, STR, obj
from test_schemas import TEXTS, written

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

from engines import engine

from quire.config.engine_args import EngineArgs
from quire.config.structured import structured_options
from quire.config.validate import check_options
from quire.errors import ConfigError, ValidationError
from quire.features.structured import validate, xgrammar_subset
from quire.features.structured.compiler import GrammarCompiler
from quire.features.structured.errors import UnsupportedConstraint
from quire.features.structured.validate import check_constraint
from quire.frontend.request_manager import RequestManager
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import StructuredOutputsParams as Form

have = pytest.mark.skipif(not validate.has_xgrammar(), reason="needs xgrammar")
SHORTER = ("minLength", "maxLength")  # counts an escape as several characters, so it writes none


def refusal(form: Form) -> str | None:
    try:
        xgrammar_subset.check(form.plain())
    except UnsupportedConstraint as error:
        return str(error)
    return None


def admits(reader: Reader, form: Form, text: str) -> bool:
    made = check_constraint(form, "xgrammar")
    matcher = reader.matcher(made)
    tokens = reader.compiler.vocabulary.tokenizer.tokenize_str(text)
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


@have
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_schema_is_enforced_exactly_or_refused(reader: Reader, number: int):
    keyword, schema, good, bad = CASES[number]
    form = Form(json=schema)
    if refusal(form) is not None:
        return
    for value in good:
        for text in written(value):
            escaped = "\\" in text and keyword in SHORTER
            assert escaped or admits(reader, form, text), text
    for value in bad:
        for text in written(value):
            assert not admits(reader, form, text), text


@have
@pytest.mark.parametrize(("schema", "text", "fits"), TEXTS)
def test_texts_that_only_look_right(reader: Reader, schema: Any, text: str, fits: bool):
    form = Form(json=schema)
    if refusal(form) is None and not fits:
        assert not admits(reader, form, text)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (Form(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Form(json={"allOf": [INT]}), "allOf"),
        (Form(json={"type": "string", "not": {}}), "not"),
        (Form(json=obj({"a": INT})), "additionalProperties"),
        (Form(json={"type": "string", "format": "phone"}), "phone"),
        (Form(json={"type": "string", "pattern": "b"}), "pattern"),
        (Form(json=INT, whitespace_pattern=" "), "whitespace_pattern"),
        (Form(grammar="start: /a/"), "Lark"),
        (Form(regex="(?=a)b"), "(?"),
        (Form(regex="a{5000}"), "repetition"),
        (Form(regex="(a|^b)"), "anchor"),
        (Form(structural_tag={"type": "structural_tag"}), "structural_tag"),
    ],
)
def test_unsupported_features_are_refused_by_name(form: Form, says: str):
    assert says in (refusal(form) or "")


def test_enough_is_enforced():
    served = sum(refusal(Form(json=schema)) is None for _, schema, _, _ in CASES)
    assert served >= 70


@have
def test_options(reader: Reader):
    closed = Form(json=obj({"a": INT}, ["a"]), disable_additional_properties=True, disable_any_whitespace=True)  # fmt: skip
    assert admits(reader, closed, '{"a":1}')
    assert not admits(reader, closed, '{"a": 1}')
    assert not admits(reader, closed, '{"a":1,"b":2}')


@have
def test_regexes_with_another_meaning_are_refused(reader: Reader):
    """Its dot is any character, and its anchors are ignored: ours come out as everywhere else."""
    for pattern, text, fits in [
        ("^.$", "a", True), (".", "\n", False), ("[.]", "x", False), ("\\.", ".", True), ("^a|b$", "b", True),
        ("^a|b$", "ab", False), ("[$^]+", "^$", True), ("a\\$", "a$", True), ("x.*y", "x\ny", False),
    ]:  # fmt: skip
        assert admits(reader, Form(regex=pattern), text) is fits, (pattern, text)


def test_guidance_serves_constraints_unsupported_by_xgrammar(monkeypatch: pytest.MonkeyPatch):
    tags = {"type": "structural_tag", "format": {"type": "any_text"}}
    monkeypatch.setattr(validate, "has_xgrammar", lambda: True)
    for form in (Form(json=obj({"a": INT})), Form(grammar="start: /a/"), Form(structural_tag=tags)):
        assert check_constraint(form, "xgrammar").engine == "guidance", form
    assert check_constraint(Form(json=INT), "xgrammar").engine == "xgrammar"
    monkeypatch.setattr(validate, "has_xgrammar", lambda: False)
    assert check_constraint(Form(json=INT), "xgrammar").engine == "guidance"
    with pytest.raises(ValidationError, match=r"^structured_outputs.json: not: this keyword"):
        check_constraint(Form(json={"not": {}}), "xgrammar")


@have
def test_guidance_compiles_constraints_that_xgrammar_refuses(reader: Reader):
    """An empty rule name shows only in xgrammar's compiler; llguidance names the fault."""
    compiler = GrammarCompiler(reader.compiler.vocabulary)
    for form, fails in ((Form(json=INT), None), (Form(grammar="root ::= nothing"), "nothing")):
        made = compiler.submit(replace(form.plain(), engine="xgrammar"))
        if fails:
            with pytest.raises(UnsupportedConstraint, match=fails):
                made.result(60)
        else:
            assert made.result(60).alive


def test_auto_uses_xgrammar_where_guidance_refuses(monkeypatch: pytest.MonkeyPatch):
    names = {"type": "object", "propertyNames": {"type": "string", "pattern": "^[a-z]{3}$"}}
    for found in (True, False):
        monkeypatch.setattr(validate, "has_xgrammar", lambda found=found: found)
        if found:
            assert check_constraint(Form(json=names)).engine == "xgrammar"
            assert check_constraint(Form(json=INT)).engine == "guidance"
    with pytest.raises(ValidationError, match="propertyNames"):
        check_constraint(Form(json=names))


# -- on an engine ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def kinds() -> list[str]:
    return ["regex", "fixed", "choice", "ebnf", "json_object"]


@have
def test_every_constraint_is_satisfied(kinds: list[str]):
    config = {"structured_outputs_config": {"backend": "xgrammar"}}
    free = ("whitespace_pattern",)
    with engine("quire-tiny", max_num_seqs=16, **config) as one:
        front = RequestManager(one.client)
        forms = [Form(**{k: v for k, v in plain(KINDS[kind][0]).items() if k not in free}) for kind in kinds]  # fmt: skip
        forms.append(Form(json=obj({"a": STR, "b": INT}, ["a", "b"], additionalProperties=False)))
        params = [SamplingParams(structured_outputs=form, max_tokens=60, seed=3) for form in forms]
        asked = [front.accept("Tell", each, id="x").children[0] for each in params]
        assert {child.params.structured_outputs.engine for child in asked} == {"xgrammar"}  # type: ignore[union-attr]
        runs = one.run([child.tokens for child in asked], [child.params for child in asked])
        ended = 0
        for kind, outputs in zip([*kinds, ""], runs, strict=True):
            tokens = [t for o in outputs for t in o.tokens]
            text = front.need_tokenizer().decode(tokens, skip_special_tokens=True)
            if outputs[-1].finish == "stop":
                ended += 1
                assert KINDS[kind][1](text) if kind else set(json.loads(text)) == {"a", "b"}, text
        assert ended >= 2
        bad = SamplingParams(structured_outputs=Form(grammar="root ::= nothing"), max_tokens=5)
        child = front.accept("Tell", bad, id="y").children[0]
        one.client.submit(child)
        (output,) = [o for o in one.client.outputs() if o.finish] or one.client.outputs()
        assert (output.finish, output.error_kind) == ("error", "invalid")
        assert "structured_outputs.grammar" in (output.error or "")


def plain(form: Form) -> dict[str, Any]:
    return {name: value for name in form.__struct_fields__ if (value := getattr(form, name))}


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch):
    from quire.features.structured import xgrammar_backend

    monkeypatch.setattr(xgrammar_backend, "installed", lambda: False)
    with pytest.raises(ConfigError, match="pip install"):
        xgrammar_backend.XCompiler(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "serves", "says"),
    [
        ("outlines", "auto", "outlines: llguidance"),
        ("lm-format-enforcer", "auto", "lm-format-enforcer: llguidance"),
        ("xgrammar:no-fallback", "xgrammar", "xgrammar is not installed"),
        ("guidance", "guidance", ""),
    ],
)
def test_the_start_says_once_which_library_serves(
    name: str, serves: str, says: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = {"backend": name}
    assert structured_options(given).backend == serves
    with caplog.at_level("WARNING", logger="quire"):
        check_options(EngineArgs(structured_outputs_config=given).create_engine_config())
    lines = [
        r.getMessage() for r in caplog.records if "structured_outputs_config" in r.getMessage()
    ]
    assert len(lines) == bool(says)
    assert says in "".join(lines)

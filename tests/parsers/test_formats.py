"""Every format: generated calls parse to the same calls for any chunking; damaged output raises no error."""

from __future__ import annotations

import json
import random

import pytest
from asymptotic import LIMIT, TIMES, growth
from call_writers import ALONE, THOUGHTS, TOOLS, WRITERS, calls
from parsed_text import cuts, parser, together

from quire.frontend.parsers.format_table import READERS
from quire.frontend.parsers.formats import REASONING
from quire.frontend.parsers.formats import TOOLS as FORMATS
from quire.frontend.parsers.stream_parser import CUT_OFF

WORDS = ("Ok.", "I look it up:", "1 < 2 & [a]", "A {b} c", "so\n\nthen", "naïve ☃", "<tool", "f(x)")
SPLITTING = {name for name, format in FORMATS.items() if format.splits_reasoning}
FORMS = [(name, at) for name, writers in WRITERS.items() for at in range(len(writers))]


def content_around(rng: random.Random, name: str, text: str) -> tuple[str, str]:
    """The text with content before it, where the format may have some; and that content."""
    if name in ALONE or rng.random() < 0.3:
        return text, ""
    before = rng.choice(WORDS)
    return before + rng.choice(["\n", "\n\n", " "]) + text, before


def test_every_format_has_a_writer() -> None:
    assert set(WRITERS) == set(FORMATS)
    assert set(THOUGHTS) == set(REASONING)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_calls_are_read_back(name: str, form: int) -> None:
    rng = random.Random(f"{name} {form}")
    for _ in range(10):
        wanted = calls(rng)
        text, before = content_around(rng, name, WRITERS[name][form](wanted))
        whole = together(parser(name), [text])
        assert whole.calls == wanted, text
        assert whole.content == before
        assert whole.reasons == []
        for _ in range(3):
            assert together(parser(name), cuts(rng, text)) == whole


SPLIT = sorted(
    set(THOUGHTS) - {"openai_gptoss", "inkling", "minimax_m2_append_think"}
)  # those that tell thoughts apart
PAIRS = [(n, t) for n in SPLIT for t in ("hermes", "mistral", "kimi_k2", "llama3_json")]


@pytest.mark.parametrize(
    ("name", "tools"),
    [("openai_gptoss", "openai"), ("inkling", "inkling"), *PAIRS],
)
def test_thoughts_come_before_content_and_calls(name: str, tools: str) -> None:
    rng = random.Random(name + tools)
    before, after = THOUGHTS[name]
    for _ in range(8):
        thought, wanted = rng.choice(WORDS), calls(rng)
        text = f"{before}{thought}{after}{WRITERS[tools][0](wanted)}"
        whole = together(parser(tools, name), [text])
        assert (whole.reasoning, whole.content, whole.calls) == (thought, "", wanted)
        assert together(parser(tools, name), cuts(rng, text)) == whole


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("tools", ["hermes", "llama3_json"])
def test_marks_of_thoughts_and_answers_are_not_shown(name: str, tools: str) -> None:
    """Also where an answer might have been a call."""
    rng = random.Random(name)
    before, after = THOUGHTS[name]
    answer = '{"name": "Ada"} is an answer'
    text = before + "hm" + after + answer + "".join(REASONING[name].answer_frame[1:2])
    whole = together(parser(tools, name), [text])
    assert (whole.reasoning, whole.content) == ("hm", answer)
    assert together(parser(tools, name), cuts(rng, text)) == whole


@pytest.mark.parametrize("name", SPLIT)
def test_the_prompt_may_have_opened_or_closed_the_thoughts(name: str) -> None:
    start, after = THOUGHTS[name]
    opened = together(parser("hermes", name, opened=True), [f"hm{after}Yes."])
    assert (opened.reasoning, opened.content) == ("hm", "Yes.")
    closed = together(parser("hermes", name, opened=False), ["Yes."])
    assert (closed.reasoning, closed.content) == ("", "Yes.")
    cut = together(parser("hermes", name, opened=True), [f"{start}so far"])
    assert (cut.reasoning, cut.content) == ("so far", "")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_text_without_calls_is_unchanged_content(name: str) -> None:
    rng = random.Random(name)
    for _ in range(20):
        text = "".join(rng.choice([*WORDS, "\n", "  ", "\n\n"]) for _ in range(5))
        assert together(parser(name), cuts(rng, text)).content == text


def without_marks(name: str, text: str) -> str:
    """And without white space: marks that are out of place are not shown."""
    for state in FORMATS[name].states.values():
        for mark in state.markers:
            text = text.replace(mark, "") if len(mark) > 1 else text
    return "".join(text.split())


def damaged(rng: random.Random, text: str) -> str:
    for _ in range(rng.randrange(1, 4)):
        at, size = rng.randrange(len(text) + 1), rng.randrange(12)
        match rng.randrange(4):
            case 0:
                text = text[:at] + text[at + size :]
            case 1:
                text = text[:at] + rng.choice(["{", "]", '"', ",", "\\", "(", "<", "}}", "\n", "x"]) + text[at:]  # fmt: skip
            case 2:
                text = text[:at]
            case _:
                text = text[:at] + text[at : at + size] + text[at:]
    return text


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_damaged_output_parses_the_same_for_any_chunking(name: str, form: int) -> None:
    rng = random.Random(f"damage {name} {form}")
    for _ in range(20):
        text = damaged(rng, "Well. " * (name not in ALONE) + WRITERS[name][form](calls(rng)))
        whole = together(parser(name), [text])
        for _ in range(3):
            assert together(parser(name), cuts(rng, text)) == whole, text
        if not whole.names and name not in SPLITTING and not is_cut(name, whole.reasons):
            assert without_marks(name, whole.content) == without_marks(name, text), text


def is_cut(name: str, reasons: list[str]) -> bool:
    """Whether the beginning of a call, at the end of the output, is not text."""
    format = FORMATS[name]
    return (format.cut_starts_call or bool(format.cut_marker)) and CUT_OFF in reasons


@pytest.mark.parametrize("name", sorted(set(FORMATS) - SPLITTING))
def test_a_malformed_call_is_content_with_a_reason(name: str) -> None:
    """From the first mark on that opens a call."""
    states = FORMATS[name].states
    for state in {FORMATS[name].start, "content"}:
        for mark, target in states[state].markers.items():
            if target.startswith(("peek", "drop", "show")) or states[target.split()[-1]].fallback:
                continue
            text = (
                f"{mark}\t}}\t and so on"
                if states[target.split()[-1]].kind not in READERS
                else f"{mark} ;;"
            )
            read = together(parser(name), [text])
            assert read.content == text
            assert read.calls == []
            assert read.reasons, text


BITS = (
    *"{}[]\"',:()=\\\n -x1", "\\u00", "\n\n", "f", "get_weather", "name", "true", "None", "</", "null", "é☃", "```", '"name"',
    '"arguments"', '"f"', "count", '"count": 1', '{"name": "f", "arguments": {',
)  # fmt: skip


def test_random_markers_parse_the_same_for_any_chunking() -> None:
    """And arguments are an object of JSON wherever nothing went wrong."""
    rng = random.Random(11)
    thoughts = [mark for one in REASONING.values() for mark in (*one.starts, *one.ends)]
    for _ in range(400):
        name = rng.choice(list(FORMATS))
        reasoning = rng.choice(["", *REASONING])
        if name in SPLITTING or (reasoning and REASONING[reasoning].tool_format):
            reasoning = ""
        marks = [mark for state in FORMATS[name].states.values() for mark in state.markers]
        kinds = [marks, marks, BITS, BITS, thoughts]
        text = "".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randrange(1, 25)))
        text += WRITERS[name][0](calls(rng, 1)) if rng.random() < 0.3 else ""
        opened = rng.choice([None, True, False])
        whole = together(parser(name, reasoning, opened), [text])
        assert together(parser(name, reasoning, opened), cuts(rng, text)) == whole, text
        if not whole.reasons:
            assert all(isinstance(found, dict) for _, found in whole.calls)


def test_damaged_output_loses_and_repeats_no_text() -> None:
    """Words that stand between calls, all different."""
    rng = random.Random(5)
    for name in sorted(set(WRITERS) - ALONE):
        if FORMATS[name].ends_text:
            continue
        for _ in range(10):
            parts = []
            for number in range(6):
                parts.append(f"word{number}")
                call = WRITERS[name][0](calls(rng, 1))
                parts.append(
                    call if rng.random() < 0.5 else call[: rng.randrange(len(call) // 2)] + " "
                )
            text = "\n".join(parts)
            read = together(parser(name), cuts(rng, text))
            out = " ".join([read.content, *read.arguments])
            for number in range(6):
                assert out.count(f"word{number}") == 1, (text, read)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_hostile_text_parses_in_linear_time(name: str) -> None:
    """Marks again and again, as long as a megabyte: it must not take longer than letters by much."""
    seen = {mark for state in FORMATS[name].states.values() for mark in state.markers}
    begin = WRITERS[name][0]([("f", {"text": "x", "tags": [[]]})])
    texts = [*seen, "[", "{", "(", '"', "\\", begin, begin[: len(begin) // 2], "<think>"]
    for text in texts:
        grows = growth(
            lambda size, text=text: together(parser(name, "qwen3"), [text * (size // len(text))]),
            5_000,
        )
        assert grows < LIMIT, (
            f"{text!r}: {grows:.1f} times as long for each character of eight times as many"
        )


@pytest.mark.parametrize(
    ("name", "cut"),
    [("hermes", 1 << 20), ("hermes", 4096), ("pythonic", 4096), ("openai", 1 << 20)],
)
def test_a_megabyte_of_opening_tags(name: str, cut: int) -> None:
    tag = next(iter(FORMATS[name].states["content"].markers), "[")

    def read(size: int) -> None:
        text = tag * (size // len(tag))
        made = together(parser(name), [text[at : at + cut] for at in range(0, len(text), cut)])
        assert len(made.content) == len(text) or name == "openai"

    assert growth(read, (1 << 20) // TIMES) < LIMIT


def test_ids() -> None:
    assert together(parser("hermes"), [WRITERS["hermes"][0]([("f", {})])]).ids == ["random"]
    assert together(parser("mistral"), [WRITERS["mistral"][0]([("f", {})])]).ids == ["short"]
    two = WRITERS["kimi_k2"][0]([("f", {}), ("get_weather", {})])
    assert together(parser("kimi_k2"), [two]).ids == ["functions.f:0", "functions.get_weather:1"]


def test_arguments_in_other_shapes() -> None:
    for written in (
        '{"arguments": {"count": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"count\\": 1}"}',
        '{"type": "function", "name": "f", "id": 7, "parameters": {"count" :1}}',
    ):
        read = together(parser("hermes"), [f"<tool_call>{written}</tool_call>"])
        assert (read.names, read.arguments) == (["f"], ['{"count": 1}'])
    for written in ('{"name": "f"}', '{"name": "f", "arguments": null}'):
        assert together(parser("hermes"), [f"<tool_call>{written}"]).arguments == ["{}"]


def test_arguments_are_streamed() -> None:
    """They are not kept until the call ends."""
    text = json.dumps({"text": "word " * 40})
    made = parser("hermes")
    given = made.feed(f'<tool_call>{{"name": "f", "arguments": {text[:100]}')
    assert "".join(call.arguments for call in given.calls) == text[:100]
    made = parser("qwen3_coder")
    given = made.feed("<tool_call><function=f><parameter=text>first words")
    assert "".join(call.arguments for call in given.calls) == '{"text": "first words'


def test_bare_json_is_a_call_only_for_known_tools() -> None:
    text = '{"name": "Ada", "parameters": {}}'
    read = together(parser("llama3_json"), [text])
    assert (read.content, read.calls) == (text, [])
    assert TOOLS  # f is known
    assert together(parser("llama3_json"), [text.replace("Ada", "f")]).calls == [("f", {})]

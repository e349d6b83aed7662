"""Structural tags: free text with tags around constrained parts, converted to one Lark grammar.

    {"type": "structural_tag", "format": {"type": "tag", "begin": ..., "content": {...}, "end": ...}}
    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}      the older form

Knows both forms and Lark. Does not know tokens, except the names of special ones: where the text of a tag contains
one, the grammar requires the token itself, because a model tokenizes the same characters differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.features.structured.cost import check_regex, check_text
from quire.features.structured.errors import UnsupportedConstraint
from quire.features.structured.grammar_dialect import read_grammar
from quire.features.structured.json_schema import MAX_BYTES, most_nested, parse_json, read_schema
from quire.protocol.structured_outputs import StructuredOutputsParams

ANY = r"(.|\n)*"
KINDS = (
    "const_string, json_schema, regex, grammar, any_text, sequence, or, optional, star, plus, tag,"
    " triggered_tags, tags_with_separator"
)
REPEATED = {"optional": "?", "star": "*", "plus": "+"}


def tags_to_grammar(
    value: str | dict[str, Any],
    constraint: StructuredOutputsParams,
    specials: Mapping[str, int],
) -> str:
    """Convert a structural tag to a grammar for llguidance.

    Raises:
        UnsupportedConstraint: it has neither form, or a part that cannot be enforced.
    """
    format = parse_json(value, 2 * most_nested())
    if not isinstance(format, dict):
        raise UnsupportedConstraint("it must be a JSON object")
    writer = _Writer(constraint, specials)
    if "format" in format:
        root = writer.part(format["format"], last=True)
    elif "structures" in format:
        root = writer.part(_from_older_form(format), last=True)
    else:
        raise UnsupportedConstraint("it needs `format`, or `structures` and `triggers`")
    return writer.whole(root)


def _from_older_form(format: dict[str, Any]) -> dict[str, Any]:
    structures, triggers = format["structures"], format.get("triggers")
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        raise UnsupportedConstraint(
            "`structures` must be a list of objects with begin, schema and end"
        )
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one.get("end"),
        }
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


@dataclass
class _Writer:
    """Collects rules; each method returns the Lark expression of one part."""

    constraint: StructuredOutputsParams
    specials: Mapping[str, int]
    rules: list[str] = field(default_factory=list)
    grammars: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = sorted(self.specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None

    def whole(self, root: str) -> str:
        lark = "\n".join(["%llguidance {}", f"start: {root}", *self.rules])
        if len(lark) > 4 * MAX_BYTES:
            raise UnsupportedConstraint("it is too long")
        first = {"name": "tags", "lark_grammar": lark}
        return json.dumps({"grammars": [first, *self.grammars]}) if self.grammars else lark

    def rule(self, body: str, options: str = "", terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def literal(self, text: str) -> str:
        """A literal text; special tokens in it become token ids."""
        pieces, start = [], 0
        for found in self._special.finditer(text) if self._special is not None else ():
            if found.start() > start:
                pieces.append(_quoted(text[start : found.start()]))
            pieces.append(f"<[{self.specials[found[0]]}]>")
            start = found.end()
        if start < len(text) or not pieces:
            pieces.append(_quoted(text[start:]))
        return " ".join(pieces)

    # -- parts ----------------------------------------------------------------------------------
    def part(self, format: Any, last: bool, end: str | None = None) -> str:
        """Convert one format. `last`: the output ends after it; `end`: this text follows it."""
        if not isinstance(format, dict):
            raise UnsupportedConstraint("a format must be an object with a `type`")
        kind = format.get("type")
        make = getattr(self, f"_{kind}", None) if isinstance(kind, str) else None
        if make is None or kind not in KINDS.split(", "):
            raise UnsupportedConstraint(
                f"a format of type {kind!r} cannot be enforced; choose from {KINDS}"
            )
        if kind in ("any_text", "triggered_tags", "sequence", "tag"):
            return str(make(format, last, end))
        return str(make(format)) + (f" {self.literal(end)}" if end else "")

    def _const_string(self, format: dict[str, Any]) -> str:
        return self.literal(_text(format, "value"))

    def _json_schema(self, format: dict[str, Any]) -> str:
        try:
            return f"%json {read_schema(format.get('json_schema', {}), self.constraint)}"
        except UnsupportedConstraint as error:
            raise UnsupportedConstraint(f"json_schema: {error}") from error

    def _regex(self, format: dict[str, Any]) -> str:
        pattern = _text(format, "pattern")
        check_regex(pattern)
        return self.rule(f"/{_slashed(pattern)}/", terminal=True)

    def _grammar(self, format: dict[str, Any]) -> str:
        text = _text(format, "grammar")
        name = f"g{len(self.grammars)}"
        try:
            self.grammars.append({"name": name, "lark_grammar": read_grammar(text)})
        except UnsupportedConstraint as error:
            raise UnsupportedConstraint(f"grammar: {error}") from error
        return f"@{name}"

    def _any_text(self, format: dict[str, Any], last: bool, end: str | None) -> str:
        without = _texts(format, "excludes") if format.get("excludes") else []
        if end:
            # The shortest text before `end`, so that the first `end` ends it.
            if self._special is not None and self._special.search(end):
                return f"{self._free(without)} {self.literal(end)}"
            return self.rule(
                self._free_regex(without), f"[suffix={_quoted(end)}]" if not without else "[lazy]"
            )
        if not last:
            raise UnsupportedConstraint("any_text must come last, or before the `end` of its tag")
        return self._free(without)

    def _free(self, without: Sequence[str]) -> str:
        return self.rule(self._free_regex(without), terminal=True)

    def _free_regex(self, without: Sequence[str]) -> str:
        if not without:
            return f"/{ANY}/"
        barred = "|".join(_slashed(re.escape(text)) for text in without)
        return f"/{ANY}/ & ~/{ANY}({barred}){ANY}/"

    def _sequence(self, format: dict[str, Any], last: bool, end: str | None) -> str:
        parts = _formats(format, "elements")
        made = [self.part(one, last=False) for one in parts[:-1]]
        return " ".join([*made, f"({self.part(parts[-1], last, end)})"])

    def _or(self, format: dict[str, Any]) -> str:
        made = (self.part(one, last=False) for one in _formats(format, "elements"))
        return f"({' | '.join(made)})"

    def _repeated(self, format: dict[str, Any]) -> str:
        return f"({self.part(format.get('content'), last=False)}){REPEATED[format['type']]}"

    _optional = _star = _plus = _repeated

    # -- tags -----------------------------------------------------------------------------------
    def _tag(self, format: dict[str, Any], last: bool, end: str | None, skip: int = 0) -> str:
        """A tag. `skip`: this many characters of its `begin` are already written."""
        begin = _text(format, "begin", may_be_empty=True)[skip:]
        ends = format.get("end")
        closing = ends if isinstance(ends, list) else [ends]
        if not closing or not all(isinstance(one, str) for one in closing):
            raise UnsupportedConstraint("the `end` of a tag must be a string, or a list of strings")
        content, made = format.get("content"), []
        for one in closing:
            made.append(self.part(content, last=last and not one and not end, end=one or None))
        body = made[0] if len(made) == 1 else f"({' | '.join(made)})"
        whole = f"{self.literal(begin)} {body}" if begin else body
        return whole + (f" {self.literal(end)}" if end else "")

    def _triggered_tags(self, format: dict[str, Any], last: bool, end: str | None) -> str:
        """Free text in which a trigger may occur only as the start of a tag."""
        if not last or end:
            raise UnsupportedConstraint(
                "triggered_tags must come last, because their free text has no end"
            )
        triggers, tags = _texts(format, "triggers"), _formats(format, "tags")
        without = _texts(format, "excludes") if format.get("excludes") else []
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        for tag in tags:
            begin = _text(tag, "begin")
            fits = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not fits:
                raise UnsupportedConstraint(f"the tag {begin!r} starts with none of the triggers")
            by_trigger[fits[0]].append(self._tag(tag, False, None, skip=len(fits[0])))
            whole.append(self._tag(tag, False, None))
        segments = []
        for trigger, rest in by_trigger.items():
            if not rest:
                raise UnsupportedConstraint(f"no tag starts with the trigger {trigger!r}")
            bodies = self.rule(" | ".join(f"({one})" for one in rest))
            if self._special is not None and self._special.search(trigger):
                opening = f"{self._free(without)} {self.literal(trigger)}"
            elif without:
                raise UnsupportedConstraint(
                    "triggered_tags: `excludes` is not supported with a plain-text trigger"
                )
            else:
                text = self.rule(f"/{ANY}/", terminal=True)
                opening = self.rule(f"{text} {_quoted(trigger)}", "[lazy]")
            segments.append(f"({opening} {bodies})")
        segment, rest_ = self.rule(" | ".join(segments)), self._free(without)
        first = self.rule(" | ".join(f"({one})" for one in whole))
        must, once = bool(format.get("at_least_one")), bool(format.get("stop_after_first"))
        if once:
            return first if must else f"({segment} | {rest_})"
        return f"{first} {segment}* {rest_}" if must else f"{segment}* {rest_}"

    def _tags_with_separator(self, format: dict[str, Any]) -> str:
        made = (f"({self._tag(tag, False, None)})" for tag in _formats(format, "tags"))
        tag = self.rule(" | ".join(made))
        between = _text(format, "separator", may_be_empty=True)
        more = f"({self.literal(between)} {tag})*" if between else f"{tag}*"
        many = tag if format.get("stop_after_first") else f"{tag} {more}"
        return many if format.get("at_least_one") else f"({many})?"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    r"""Escape a regex for use between slashes: each unescaped slash becomes \/, each line break \n."""
    return re.sub(r"\\.|/", lambda m: m[0] if m[0] != "/" else r"\/", pattern, flags=re.S).replace(
        "\n", r"\n"
    )


def _text(format: Any, name: str, may_be_empty: bool = False) -> str:
    value = format.get(name) if isinstance(format, dict) else None
    if not isinstance(value, str) or not (value or may_be_empty):
        raise UnsupportedConstraint(f"`{name}` must be a non-empty string")
    if name not in ("grammar", "pattern"):
        check_text(value)
    return value


def _texts(format: dict[str, Any], name: str) -> list[str]:
    values = format.get(name)
    if not isinstance(values, list) or not values:
        raise UnsupportedConstraint(f"`{name}` must be a list of strings")
    return [_text({name: value}, name) for value in values]


def _formats(format: dict[str, Any], name: str) -> list[Any]:
    values = format.get(name)
    if not isinstance(values, list) or not values:
        raise UnsupportedConstraint(f"`{name}` must be a non-empty list")
    return values

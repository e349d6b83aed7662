"""The constraints that xgrammar (0.2.8) enforces exactly. It drops many keywords silently, so all else is refused.

Knows JSON Schema and the tested keywords (tests/structured/test_xgrammar.py tests every schema of the table against
instances). Does not import xgrammar: the frontend runs this check.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from quire.features.structured.cost import check_grammar, check_regex, check_schema
from quire.features.structured.errors import UnsupportedConstraint
from quire.features.structured.json_schema import most_nested, parse_json
from quire.protocol.structured_outputs import StructuredOutputsParams

MAX_BYTES = 64 << 10  # its compiler takes a hundred times as long as llguidance's
MOST = 1000  # largest count in a constraint
NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
     "$defs", "definitions", "strict")
)  # fmt: skip
OF_TYPE: dict[str, frozenset[str]] = {
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "string": frozenset(("pattern", "format", "minLength", "maxLength")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties", "propertyNames")),
    "boolean": frozenset(),
    "null": frozenset(),
}
# Not date and date-time: its dates begin in a year 0000.
FORMATS = "time email ipv4 ipv6 uuid hostname uri duration".split()
ALONE = ("enum", "const", "anyOf", "$ref")
POINTER = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
ODD_IN_PATTERN = re.compile(r"\(\?(?!:)|\\[^\W_nrtfvxu0]|\[[^\]]*(&&|--|~~|\[)")


def check(constraint: StructuredOutputsParams) -> None:
    """Raises UnsupportedConstraint: xgrammar is not known to enforce the constraint."""
    kind = constraint.kind
    if constraint.whitespace_pattern is not None:
        raise UnsupportedConstraint("whitespace_pattern: the backend xgrammar cannot enforce it")
    value: Any = getattr(constraint, kind)
    if isinstance(value, str) and len(value) > MAX_BYTES:
        raise UnsupportedConstraint(
            f"it has {len(value)} characters; the limit for the backend xgrammar is {MAX_BYTES}"
        )
    match kind:
        case "json":
            schema = schema_of(constraint)
            check_schema(schema)
            try:
                _Reader(schema).read(schema)
            except (
                TypeError,
                AttributeError,
            ) as error:  # for example a list in place of a string
                raise UnsupportedConstraint(f"it is not a schema: {error}") from error
        case "json_object":
            return
        case "choice":
            if sum(map(len, value)) > MAX_BYTES:
                raise UnsupportedConstraint(
                    f"its strings have more than {MAX_BYTES} characters in total"
                )
        case "regex":
            anchored_regex(value)
        case "grammar":
            if "::=" not in value:
                raise UnsupportedConstraint(
                    "the backend xgrammar reads EBNF (`root ::= ...`); Lark needs guidance"
                )
            check_grammar(value)
        case _:
            raise UnsupportedConstraint(
                f"{kind}: the backend xgrammar is not used for it; it needs guidance"
            )


def schema_of(constraint: StructuredOutputsParams) -> Any:
    """The parsed schema, closed if the constraint disables additional properties.

    Raises:
        UnsupportedConstraint: it is not JSON, or nested too deep.
    """
    schema = parse_json(str(constraint.json), most_nested())
    return _closed(schema) if constraint.disable_additional_properties else schema


def _closed(schema: Any) -> Any:
    """Forbid additional properties in objects that do not mention them, wherever `_Reader` allows a schema."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(parts := made.get(name), dict):
            made[name] = {key: _closed(part) for key, part in parts.items()}
    for name in ("anyOf", "prefixItems"):
        if isinstance(parts := made.get(name), list):
            made[name] = [_closed(part) for part in parts]
    for name in ("items", "additionalProperties"):
        if name in made:
            made[name] = _closed(made[name])
    if "properties" in made:
        made.setdefault("additionalProperties", False)
    return made


def _no(what: str) -> UnsupportedConstraint:
    return UnsupportedConstraint(f"{what}: not supported by the backend xgrammar")


class _Reader:
    def __init__(self, root: Any):
        self.root = root

    def read(self, schema: Any) -> None:
        """Check one schema and its subschemas."""
        if schema is True:
            return
        if not isinstance(schema, dict):
            raise _no("a schema that is no object" if schema is not False else "false")
        for name in ("$defs", "definitions"):
            for part in schema.get(name, {}).values() if isinstance(schema.get(name), dict) else ():
                self.read(part)
        schema = {name: value for name, value in schema.items() if name not in NOTES}
        if not schema:
            return
        alone = [name for name in ALONE if name in schema]
        if alone:
            self._alone(alone[0], schema)
        else:
            self._typed(schema)

    def _alone(self, name: str, schema: dict[str, Any]) -> None:
        """Check a keyword that must be alone; enum and const may have a `type`, which must be their values' type."""
        value = schema.pop(name)
        kind = schema.pop("type", None) if name in ("enum", "const") else None
        if schema:
            raise _no(f"{', '.join(sorted(schema))} beside {name}")
        if name == "anyOf":
            if not isinstance(value, list) or not value:
                raise _no("anyOf that is no list")
            for part in value:
                self.read(part)
        elif name == "$ref":
            found = POINTER.fullmatch(value) if isinstance(value, str) else None
            if found is None or found[2] not in self.root.get(found[1], {}):
                raise _no(f"$ref {value!r}")
        else:
            values = value if name == "enum" else [value]
            if not isinstance(values, list) or not values:
                raise _no(f"{name} that is no list")
            for one in values:
                if isinstance(one, dict | list):
                    raise _no(f"{name} of objects and lists")
                if kind is not None and kind != _type_of(one):
                    raise _no(f"{name} with values that are no {kind}")

    def _typed(self, schema: dict[str, Any]) -> None:
        kind = schema.pop("type", None)
        if isinstance(kind, list) and all(one in OF_TYPE for one in kind):
            if schema:
                raise _no(f"{', '.join(sorted(schema))} beside several types")
            return
        if not isinstance(kind, str) or kind not in OF_TYPE:
            raise _no(f"{', '.join(sorted(schema)) or 'type'} without one type")
        if strange := sorted(set(schema) - OF_TYPE[kind]):
            raise UnsupportedConstraint(
                f"{', '.join(strange)}: the backend xgrammar cannot enforce"
                f" {'these keywords' if len(strange) > 1 else 'this keyword'}; leave it out, or use guidance"
            )
        getattr(self, f"_{kind}", lambda schema: None)(schema)

    def _number(self, schema: dict[str, Any], kinds: tuple[type, ...] = (int, float)) -> None:
        for name, value in schema.items():
            if type(value) not in kinds:
                raise _no(f"{name} of {value!r}")
        _ordered(schema, "minimum", "maximum")

    def _integer(self, schema: dict[str, Any]) -> None:
        self._number(schema, (int,))

    def _string(self, schema: dict[str, Any]) -> None:
        if len({"pattern", "format"} & set(schema)) and len(schema) > 1:
            raise _no(" beside ".join(sorted(schema)))
        if "format" in schema and schema["format"] not in FORMATS:
            raise _no(f"format {schema['format']!r}")
        _count(schema, "minLength", "maxLength")
        if (pattern := schema.get("pattern")) is not None:
            anchored_regex = isinstance(pattern, str) and re.fullmatch(r"\^[^|]*\$", pattern)
            if not anchored_regex or re.search(r"(?<!\\)[$^.]|\[\^", pattern[1:-1]):
                raise _no("pattern that is not `^...$`, or has other anchors, dots or [^ in it")
            _pattern(pattern)
            _within_a_string(pattern)

    def _array(self, schema: dict[str, Any]) -> None:
        _count(schema, "minItems", "maxItems")
        if "prefixItems" in schema and len(schema) > 1 and set(schema) != {"prefixItems", "items"}:
            raise _no("prefixItems beside a count")
        self._each(schema.get("prefixItems", []))
        if "items" in schema and schema["items"] is not False:
            self.read(schema["items"])

    def _object(self, schema: dict[str, Any]) -> None:
        own, needed = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(own, dict) or not isinstance(needed, list) or not set(needed) <= set(own):
            raise _no("required names that are no properties")
        if any(re.search(r'["\\\x00-\x1f]', name) for name in own):
            raise _no("a name with quotes, backslashes or control characters")
        rest = schema.get("additionalProperties", True)
        if own and rest is not False:
            raise UnsupportedConstraint(
                "additionalProperties: beside properties the backend xgrammar would accept a name twice; set it to"
                " false (disable_additional_properties does), or use guidance"
            )
        if "propertyNames" in schema and (own or rest is not True):
            raise _no("propertyNames beside properties")
        self._each([*own.values(), *([] if isinstance(rest, bool) else [rest])])
        self.read(schema.get("propertyNames", True))

    def _each(self, parts: Any) -> None:
        if not isinstance(parts, Iterable):
            raise _no("a list of schemas that is none")
        for part in parts:
            self.read(part)


def _count(schema: dict[str, Any], *names: str) -> None:
    for name in names:
        value = schema.get(name, 0)
        if type(value) is not int or not 0 <= value <= MOST:
            raise _no(f"{name} of {value!r}")
    _ordered(schema, *names)


def _ordered(schema: dict[str, Any], least: str, most: str) -> None:
    if least in schema and most in schema and schema[least] > schema[most]:
        raise UnsupportedConstraint(f"Unsatisfiable schema: {least} is greater than {most}")


def _pattern(pattern: str) -> None:
    if (odd := ODD_IN_PATTERN.search(pattern)) is not None:
        raise _no(f"{odd[0]!r} in a pattern")
    if any(
        int(n) > MOST for n in re.findall(r"\d+", " ".join(re.findall(r"\{([\d, ]+)\}", pattern)))
    ):
        raise _no(f"a repetition of more than {MOST}")


def _within_a_string(pattern: str) -> None:
    """Refuse patterns that need JSON escapes, which xgrammar omits, and others that it misreads within a string."""
    if '"' in pattern or re.search(r"\\[\\\w]|[\x00-\x1f]", pattern):
        raise _no("a pattern with a quote, or an escape that is not of punctuation,")
    if "(" in pattern and "{" in pattern:  # `(a{2})?` admits one a
        raise _no("a group and a count in one pattern")
    for ends in re.findall(r"(\\?.)-(\\?.)", pattern):
        if ends[1] != "]" and not any(
            re.fullmatch(f"[{kind}][{kind}]", "".join(ends)) for kind in ("a-z", "A-Z", "0-9")
        ):
            raise _no(f"the range {'-'.join(ends)} in a pattern")


PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def anchored_regex(pattern: str) -> str:
    """Adapt a regex that must match the whole output: xgrammar's dot matches line breaks, and it ignores inner anchors.

    Raises:
        UnsupportedConstraint: it has an anchor inside, or `_pattern` or `check_regex` refuses it.
    """
    _pattern(pattern)
    check_regex(pattern)
    pieces = PIECE.findall(pattern)
    pieces = pieces[pieces[:1] == ["^"] :]
    if pieces[-1:] == ["$"]:
        pieces.pop()
    if {"^", "$"} & set(pieces):
        raise _no("an anchor within a regex")
    return "".join("[^\\n]" if piece == "." else piece for piece in pieces)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return kinds.get(type(value), "")

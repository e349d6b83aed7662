"""JSON schemas: parses them, checks limits, and rewrites what llguidance would enforce only loosely.

Knows the structure of JSON Schema and the limits. llguidance decides which keywords it can enforce, and its errors name
the keyword; this module rewrites or refuses what llguidance accepts but does not enforce exactly.
"""

from __future__ import annotations

import json
from typing import Any

from quire import env
from quire.features.structured.cost import check_regex, check_schema
from quire.features.structured.errors import UnsupportedConstraint
from quire.features.structured.regex_dialect import to_rust_regex
from quire.protocol.structured_outputs import StructuredOutputsParams

MAX_BYTES = 1 << 20  # of a schema, a regex or a grammar
MAX_PROPERTIES = 1000  # of one object: compile time is quadratic, half a second for this many
MAX_ALL_PROPERTIES = 4000
OPTIONS = "x-guidance"  # llguidance's options, removed from user schemas: one of them ignores unknown keywords
SPACES = r"[\x20\x0A\x0D\x09]{1,2}"  # JSON white space; bounded: small models write it without end
SINCE_YEAR_1 = "^(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-"  # llguidance's dates begin in a year 0000
ESCAPES = 'nrbtf\\"'  # no \uXXXX: it spells a key in a second way, which would count as another key

# Keywords that contain schemas. All other values are data and are copied unchanged.
IN_ONE = frozenset(
    ("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties",
     "propertyNames", "contains", "not", "if", "then", "else", "contentSchema")
)  # fmt: skip
IN_LIST = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
IN_BRANCH = frozenset(("const", "enum", "title", "description", "type"))
NAMED = frozenset(("properties", "patternProperties"))
IN_MAP = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


def read_schema(value: Any, constraint: StructuredOutputsParams) -> str:
    """The schema as text for llguidance, with the constraint's options for white space and additional properties.

    Raises:
        UnsupportedConstraint: it is not a schema, or exceeds a limit.
    """
    schema = parse_json(value, most_nested())
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise UnsupportedConstraint("a schema must be a JSON object")
    check_schema(schema)
    if constraint.whitespace_pattern is not None:
        check_regex(constraint.whitespace_pattern)
    made = _Strict(constraint.disable_additional_properties).copy(schema)
    options: dict[str, Any] = {"json_allowed_escapes": ESCAPES}
    if constraint.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = constraint.whitespace_pattern or SPACES
    made[OPTIONS] = options
    text = json.dumps(made)
    if len(text) > 2 * MAX_BYTES:
        raise UnsupportedConstraint(f"it has {len(text)} characters; the limit is {2 * MAX_BYTES}")
    return text


def parse_json(value: Any, levels: int) -> Any:
    """A JSON value, decoded if it is text.

    Raises:
        UnsupportedConstraint: it is not JSON, or nested deeper than `levels`.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UnsupportedConstraint(f"it is not JSON: {error}") from error
    if depth(value) > levels:
        raise UnsupportedConstraint(f"it is nested deeper than {levels} levels")
    return value


def most_nested() -> int:
    """Maximum nesting depth of a schema."""
    return int(env.get("MAX_SCHEMA_NESTING"))


def depth(value: Any) -> int:
    """Nesting depth of objects and lists; stops counting beyond twice the limit."""
    level, reached, most = [value], 0, 2 * most_nested()
    while level and reached <= most:
        reached += 1
        inner: list[Any] = []
        for one in level:
            within = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
            inner += [v for v in within if isinstance(v, dict | list)]
        level = inner
    return reached


class _Strict:
    """Copies a schema so that llguidance enforces every part exactly.

    Args:
        closed: objects without `additionalProperties` allow none.
    """

    def __init__(self, closed: bool):
        self.closed, self.properties = closed, 0

    def copy(self, schema: Any) -> Any:
        """Raises UnsupportedConstraint: too many properties, or a pattern that regex dialects read differently."""
        if not isinstance(schema, dict):
            return schema
        made: dict[str, Any] = {}
        for name, value in schema.items():
            if name == OPTIONS or (name == "uniqueItems" and value is False):
                continue
            made[name] = self._within(name, value)
        if isinstance(own := made.get("properties"), dict):
            self._count(len(own))
            if self.closed:
                made.setdefault("additionalProperties", False)
        if made.get("format") in ("date", "date-time"):
            made["allOf"] = [*made.get("allOf", []), {"pattern": SINCE_YEAR_1}]
        if _only_a_pattern(made.get("propertyNames")) and not NAMED & made.keys():
            pattern = made.pop("propertyNames")["pattern"]
            made["patternProperties"] = {pattern: made.get("additionalProperties", True)}
            made["additionalProperties"] = False
        if _distinct(made.get("oneOf")) and "anyOf" not in made:
            made["anyOf"] = made.pop("oneOf")  # equivalent, as no value fits two branches
        return made

    def _within(self, name: str, value: Any) -> Any:
        if name == "pattern" and isinstance(value, str):
            return to_rust_regex(value)
        if name in IN_MAP and isinstance(value, dict):
            rename = to_rust_regex if name == "patternProperties" else str
            return {rename(key): self.copy(one) for key, one in value.items()}
        if name in IN_LIST and isinstance(value, list):
            return [self.copy(one) for one in value]
        return self.copy(value) if name in IN_ONE else value

    def _count(self, own: int) -> None:
        self.properties += own
        if own > MAX_PROPERTIES or self.properties > MAX_ALL_PROPERTIES:
            raise UnsupportedConstraint(
                f"properties: {own} of one object, {self.properties} in all; the limits are {MAX_PROPERTIES} and"
                f" {MAX_ALL_PROPERTIES}"
            )


def _only_a_pattern(names: Any) -> bool:
    """Whether a schema of property names is a string's pattern, which `patternProperties` can express."""
    if not isinstance(names, dict) or not isinstance(names.get("pattern"), str):
        return False
    return names in ({"pattern": names["pattern"]}, {"type": "string", "pattern": names["pattern"]})


def _distinct(branches: Any) -> bool:
    """Whether each branch is a list of values (`const`, `enum`), and no value occurs twice."""
    seen: list[str] = []
    for branch in branches if isinstance(branches, list) else [None]:
        if not isinstance(branch, dict) or not set(branch) <= IN_BRANCH:
            return False
        values = [branch["const"]] if "const" in branch else branch.get("enum")
        if not isinstance(values, list) or any(isinstance(v, float | dict | list) for v in values):
            return False  # 1 and 1.0 are equal to JSON Schema
        seen += map(json.dumps, values)
    return len(seen) == len(set(seen))

"""JSON schemas: read, bounded, and made as strict as they say.

Knows JSON and the limits on a schema. Which keywords can be enforced is llguidance's word, and its refusals
name the keyword; what it would take and not enforce is refused here.
"""

from __future__ import annotations

import json
from typing import Any

from quire.errors import ValidationError
from quire.protocol.constraint import FIELD, StructuredOutputsParams

MAX_BYTES = 1 << 20  # of a schema, a regex or a grammar
MAX_NESTING = 64


def wrong(why: str) -> ValidationError:
    return ValidationError(f"{FIELD}.json: {why}", parameter=f"{FIELD}.json")


def read_schema(value: str | dict[str, Any] | bool, constraint: StructuredOutputsParams) -> str:
    """The schema as text, with what the constraint says of spaces and further properties.

    Raises:
        ValidationError: it is no schema, or beyond a limit.
    """
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise wrong(f"it is no JSON: {error}") from error
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise wrong("a schema must be a JSON object")
    if _depth(schema) > MAX_NESTING:
        raise wrong(f"it is nested more than {MAX_NESTING} deep")
    options: dict[str, Any] = {}
    if constraint.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if constraint.whitespace_pattern is not None:
        options["whitespace_pattern"] = constraint.whitespace_pattern
    if constraint.disable_additional_properties:
        schema = _closed(schema)
    if options:
        schema = {**schema, "x-guidance": options}
    return json.dumps(schema)


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        depth += 1
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += [v for v in one.values() if isinstance(v, dict | list)]
            elif isinstance(one, list):
                inner += [v for v in one if isinstance(v, dict | list)]
        level = inner
        if depth > MAX_NESTING:
            break
    return depth


def _closed(schema: Any) -> Any:
    """Objects that say nothing of further properties get none."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _closed(one) for name, one in schema.items()}
    if "properties" in made and isinstance(made["properties"], dict):
        made.setdefault("additionalProperties", False)
    return made

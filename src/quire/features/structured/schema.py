"""JSON schemas: read, bounded, and made as strict as they say.

Knows JSON and the limits on a schema. Which keywords can be enforced is llguidance's word, and its refusals
name the keyword; what it would take and not enforce is refused here.
"""

from __future__ import annotations

import json
from typing import Any

from quire.features.structured.refusal import Refused
from quire.protocol.constraint import StructuredOutputsParams

MAX_BYTES = 1 << 20  # of a schema, a regex or a grammar
MAX_NESTING = 64


def read_schema(value: Any, constraint: StructuredOutputsParams) -> str:
    """The schema as text, with what the constraint says of spaces and further properties.

    Raises:
        Refused: it is no schema, or beyond a limit.
    """
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Refused(f"it is no JSON: {error}") from error
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise Refused("a schema must be a JSON object")
    if depth(schema) > MAX_NESTING:
        raise Refused(f"it is nested more than {MAX_NESTING} deep")
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


def depth(value: Any) -> int:
    """How deep objects and lists stand in one another; counted no further than MAX_NESTING allows."""
    level, reached = [value], 0
    while level:
        reached += 1
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += [v for v in one.values() if isinstance(v, dict | list)]
            elif isinstance(one, list):
                inner += [v for v in one if isinstance(v, dict | list)]
        level = inner
        if reached > 2 * MAX_NESTING:
            break
    return reached


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

"""JSON schemas of values, and objects as text in pieces, each with the weight that the loss gives it.

A server that enforces a schema writes the keys itself, and the model does not see the schema: it is to learn the values after
keys that are given, and not to begin an answer with a brace by itself. After a value the brace that ends the object counts more than
a comma: a server forbids it while a key is missing, and a schema may allow other keys without end.
"""

import json
from typing import Any

from tools.tiny_model.scenes import Field

Piece = tuple[str, float]  # text, weight in the loss
GIVEN, SPACE, COMMA, VALUE = 0.0, 0.2, 0.2, 1.0


def schema_of(value: Any) -> dict[str, Any]:
    """Return the schema that a client would send for such a value."""
    if isinstance(value, Field):
        if value.options:
            return {"type": "string", "enum": list(value.options)}
        return {"type": value.kind} if value.kind else schema_of(value.value)
    if isinstance(value, dict):
        properties = {key: schema_of(one) for key, one in value.items()}
        return {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}  # fmt: skip
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0]) if value else {"type": "string"}}  # fmt: skip
    if value is None:
        return {"type": ["string", "null"]}
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[type(value)]}


def plain(value: Any) -> Any:
    """Return a copy of `value` in which each Field is replaced by the value of the Field."""
    if isinstance(value, Field):
        return plain(value.value)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def pieces(value: Any, tight: bool = False, keys: float = GIVEN) -> list[Piece]:
    """Return the JSON text of a value in pieces; `keys`: the weight of braces and keys; `tight`: without spaces."""
    value = value.value if isinstance(value, Field) else value
    space = "" if tight else " "
    if isinstance(value, dict):
        made: list[Piece] = []
        for number, (key, one) in enumerate(value.items()):
            mark = [(",", max(COMMA, keys)), (space, max(SPACE, keys))] if number else [("{", keys)]
            made += [*mark, (json.dumps(key, ensure_ascii=False) + ":", keys)]
            made += [(space, max(SPACE, keys)), *pieces(one, tight, keys)]
        return [*made, ("}", VALUE)]
    if isinstance(value, list):
        made = [("[", keys)]
        for number, one in enumerate(value):
            made += [("," + space, VALUE)] * bool(number) + pieces(one, tight, keys)
        return [*made, ("]", VALUE)]
    return [(json.dumps(value, ensure_ascii=False), VALUE)]

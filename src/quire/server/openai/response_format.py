"""The output constraint of a request, from any of the fields that can set one.

    response_format          OpenAI's
    structured_outputs       Quire's and vLLM's
    guided_json, ...         older names for the parts of structured_outputs

Knows these fields' names and shapes. `frontend` checks whether a schema or grammar can be enforced.
"""

from __future__ import annotations

from typing import Any

from quire.errors import ValidationError
from quire.logging import get_logger
from quire.protocol.structured_outputs import StructuredOutputsParams
from quire.server.errors import invalid
from quire.server.schemas import Sampling

log = get_logger(__name__)

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def constraint(request: Sampling) -> StructuredOutputsParams | None:
    """None: no constraint.

    Raises:
        ApiError: 400: several constraints, or a malformed one.
    """
    form = of_format(request.response_format)
    ours = from_ours(request.structured_outputs)
    guided = from_guided(request)
    if ours is not None and guided is not None:
        raise invalid(
            f"`{guided.field_name}` is an old name of a field of `structured_outputs`; give only one of them",
            guided.field_name,
        )
    other = ours or guided
    if form is not None and other is not None and form.kind != other.kind:
        raise invalid(
            f"`response_format` sets {form.kind} and `{other.field_name}` sets {other.kind}: an output has one"
            " constraint; leave one of them out",
            "response_format",
        )
    return form or other


def of_format(value: Any, field_name: str = "response_format") -> StructuredOutputsParams | None:
    """The constraint in `response_format`, or in another protocol's equivalent field, named `field_name`.

    Chat requests have the schema in `json_schema.schema`, the other protocols in `schema`.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return structured_outputs_of(field_name, json_object=True)
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict | bool):
            ours = field_name == "response_format" or "json_schema" in value
            where = f"{field_name}.json_schema.schema" if ours else f"{field_name}.schema"
            raise invalid(f"`{where}` must be a JSON schema", field_name)
        return structured_outputs_of(field_name, json=schema)
    if kind == "structural_tag":
        return structured_outputs_of(field_name, structural_tag=value)
    raise invalid(
        f"`{field_name}.type` is {kind!r}; it must be one of {', '.join(FORMATS)}", field_name
    )


def from_ours(value: dict[str, Any] | None) -> StructuredOutputsParams | None:
    if value is None:
        return None
    try:
        return StructuredOutputsParams.read(value)
    except ValidationError as error:
        raise invalid(str(error), "structured_outputs") from error


def from_guided(request: Sampling) -> StructuredOutputsParams | None:
    given = {name: value for name in GUIDED if (value := getattr(request, name)) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise invalid(f"`{'` and `'.join(given)}`: an output has one constraint; give only one of them", next(iter(given)))  # fmt: skip
    ((name, value),) = given.items()
    log.warning_every("guided", 3600, "`%s` is an old name: use `structured_outputs: {%r: ...}`", name, GUIDED[name])  # fmt: skip
    more = {}
    if request.guided_whitespace_pattern is not None:
        more["whitespace_pattern"] = request.guided_whitespace_pattern
    return structured_outputs_of(name, **{GUIDED[name]: value}, **more)


def structured_outputs_of(field_name: str, **fields: Any) -> StructuredOutputsParams:
    """Errors name the field that the client wrote."""
    try:
        return StructuredOutputsParams(field_name=field_name, **fields)
    except ValidationError as error:
        raise invalid(f"`{field_name}`: {error}", field_name) from error

"""StructuredOutputsParams: the format that an output must have, exactly one of six kinds.

Knows the fields and that exactly one kind is given. Does not know what a schema or a grammar means:
`features/structured` does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from quire.errors import ValidationError
from quire.protocol import validators as read

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FIELD = "structured_outputs"
INTERNAL_FIELDS = ("field_name",)


class StructuredOutputsParams(Struct, omit_defaults=True, kw_only=True):
    """How an output is constrained. Exactly one of the first six fields is given.

    Raises:
        ValidationError: none or several of the six are given, or a value has the wrong type.
    """

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as text, an object, or the class of a pydantic model."""
    regex: str | None = None
    """The whole output matches this regular expression."""
    choice: list[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """EBNF (`root ::= ...`) or Lark (`start: ...`)."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text in which tags start constrained parts; JSON, as text or as an object."""
    disable_any_whitespace: bool = False
    """JSON is written without spaces and line breaks."""
    disable_additional_properties: bool = False
    """Treat a schema without `additionalProperties` as if it were false."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between JSON tokens."""
    field_name: str = FIELD
    """The name of the field that the user set, for error messages."""

    def __post_init__(self) -> None:
        self._read_schema()
        if self.json_object is not None:
            self.json_object = read.truth("structured_outputs.json_object", self.json_object)
            if not self.json_object:
                self.json_object = None
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            setattr(self, name, read.truth(f"{FIELD}.{name}", getattr(self, name)))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise read.wrong(f"{FIELD}.{name}", value, "text")
        self._read_choice()
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            what = "has none" if not kinds else f"has {' and '.join(kinds)}"
            raise ValidationError(
                f"{FIELD} must have exactly one of {', '.join(KINDS)}; it {what}",
                parameter=FIELD,
                value=kinds,
            )

    def _read_schema(self) -> None:
        if (schema := getattr(self.json, "model_json_schema", None)) is not None:
            self.json = schema()
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is None or isinstance(value, str | dict):
                continue
            if name == "json" and isinstance(value, bool):
                continue
            raise read.wrong(f"{FIELD}.{name}", value, "a JSON object, or a string with one")

    def _read_choice(self) -> None:
        if self.choice is None:
            return
        choice: Any = self.choice
        is_list = isinstance(choice, Collection) and not isinstance(choice, str | Mapping)
        if not is_list or not all(isinstance(c, str) for c in choice):
            raise read.wrong(f"{FIELD}.choice", self.choice, "a list of strings")
        self.choice = list(self.choice)
        if not self.choice or not all(self.choice):
            raise ValidationError(
                f"{FIELD}.choice must have at least one string, and no empty string",
                parameter=FIELD,
                value=self.choice,
            )

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsParams | None:
        """A constraint as programs give it: an object of this class, a dict of its fields (from JSON, or an older program), or None.

        Raises:
            ValidationError: something else.
        """
        if given is None or isinstance(given, StructuredOutputsParams):
            return given
        if isinstance(given, dict):
            return cls.read(given)
        raise read.wrong(FIELD, given, "a StructuredOutputsParams")

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> StructuredOutputsParams:
        """Parse an object from HTTP, or a dict of an older program. None, and json_object=False, count as not given.

        Raises:
            ValidationError: an unknown field, and as the constructor.
        """
        fields = {name: value for name, value in data.items() if value is not None}
        for name in INTERNAL_FIELDS:
            fields.pop(name, None)
        for name in ("json_object", "backend", "_backend", "_backend_was_auto"):
            if fields.get(name) is False or name.startswith(("_", "backend")):
                fields.pop(name, None)
        names = [name for name in cls.__struct_fields__ if name not in INTERNAL_FIELDS]
        if unknown := sorted(set(fields) - set(names)):
            raise ValidationError(
                f"{FIELD} has no field {', '.join(unknown)}; the fields are {', '.join(names)}",
                parameter=FIELD,
                value=unknown,
            )
        return cls(**fields)

    @property
    def kind(self) -> str:
        """Which of the six kinds is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def plain(self) -> StructuredOutputsParams:
        """A copy with objects converted to text, the form that the engine hashes.

        Raises:
            ValidationError: an object cannot be written as JSON, or a text not as UTF-8.
        """
        changed: dict[str, str] = {}
        try:
            for name in ("json", "structural_tag"):
                value = getattr(self, name)
                if value is not None and not isinstance(value, str):
                    changed[name] = json.dumps(value, ensure_ascii=False, allow_nan=False)
            params = msgspec.structs.replace(self, **changed) if changed else self
            for text in (getattr(params, params.kind), params.whitespace_pattern):
                for string in text if isinstance(text, list) else [text]:
                    str(string).encode()
        except (ValueError, TypeError, RecursionError) as error:
            is_surrogate = isinstance(error, UnicodeError)
            reason = "it contains a lone surrogate" if is_surrogate else str(error)
            raise ValidationError(
                f"{self.field_name}: {self.kind} cannot be written as JSON in UTF-8: {reason}",
                parameter=self.field_name,
            ) from error
        return params

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal constraints; call it on the result of `plain`."""
        return (
            self.json, self.regex, self.grammar, self.json_object, self.structural_tag,
            None if self.choice is None else tuple(self.choice),
            self.disable_any_whitespace, self.disable_additional_properties, self.whitespace_pattern,
        )  # fmt: skip

"""Bodies of type multipart/form-data, read into memory within limits.

Knows parts, names and bytes. Does not know what a field means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.server.errors import ApiError, invalid

MOST_PARTS = 64
MOST_HEADER = 4096  # bytes of a part's headers
MOST_TEXT = 1 << 18  # bytes of all fields that are no file
PACKAGE = "python-multipart"


@dataclass(slots=True)
class FormFile:
    name: str
    data: bytes


@dataclass(slots=True)
class Form:
    """`fields`: of each name all values, in order. `files`: by field."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, FormFile] = field(default_factory=dict)


class _Part:
    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.name, self.value = bytearray(), bytearray()
        self.field, self.filename = "", ""
        self.is_file = False
        self.data = bytearray()


class FormReader:
    """Callbacks of python-multipart's parser. Raises ApiError 400: the body has too many parts, or one without a name."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self._text = 0

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin, "on_part_data": self._data, "on_header_field": self._name,
            "on_header_value": self._value, "on_header_end": self._header, "on_headers_finished": self._described,
        }  # fmt: skip

    def _begin(self) -> None:
        if len(self.parts) >= MOST_PARTS:
            raise invalid(f"the form has more than {MOST_PARTS} fields")
        self.parts.append(_Part())

    def _name(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        part.name += data[start:end]
        self._check(len(part.name))

    def _value(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        part.value += data[start:end]
        self._check(len(part.value))

    def _check(self, length: int) -> None:
        if length > MOST_HEADER or len(self.parts[-1].headers) > 16:
            raise invalid("a part of the form has headers that are too long")

    def _header(self) -> None:
        part = self.parts[-1]
        part.headers.append((bytes(part.name).lower(), bytes(part.value)))
        part.name, part.value = bytearray(), bytearray()

    def _described(self) -> None:
        part = self.parts[-1]
        value = next((value for name, value in part.headers if name == b"content-disposition"), b"")
        _, options = _options(value)
        name = options.get(b"name")
        if name is None:
            raise invalid("a part of the form has no name")
        part.field = name.decode("utf-8", "replace")
        part.is_file = b"filename" in options
        part.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        if not part.is_file:
            self._text += end - start
            if self._text > MOST_TEXT:
                raise invalid(f"the fields of the form have more than {MOST_TEXT} bytes of text")
        part.data += memoryview(data)[start:end]

    def form(self) -> Form:
        form = Form()
        for part in self.parts:
            if part.is_file:
                if part.field in form.files:
                    raise invalid(
                        f"the form has two files in the field {part.field[:40]!r}", part.field[:40]
                    )
                form.files[part.field] = FormFile(part.filename, bytes(part.data))
            else:
                form.fields.setdefault(part.field, []).append(part.data.decode("utf-8", "replace"))
        return form


def _options(value: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    import python_multipart.multipart as library

    found: tuple[bytes, dict[bytes, bytes]] = library.parse_options_header(value)
    return found


def boundary_of(content_type: str) -> bytes:
    """Raises ApiError 400: the body is no form."""
    kind, options = _options(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise invalid(
            "the body must be a form with a file: Content-Type multipart/form-data (curl: -F file=@speech.wav)"
        )
    return boundary


async def read_form(body: bytes, boundary: bytes) -> Form:
    """Raises ApiError 400: the body is no such form."""
    import python_multipart.multipart as library

    reader = FormReader()
    parser = library.MultipartParser(boundary, reader.callbacks())
    try:
        parser.write(body)
        parser.finalize()
    except ApiError:
        raise
    except library.FormParserError:
        raise invalid("the form is damaged: its parts do not fit its boundary") from None
    return reader.form()

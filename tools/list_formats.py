"""Writes the tables of docs/quantization.md from the formats that tests write, and from the types of GGUF blocks.

    python -m tools.list_formats            rewrite the page's tables
    python -m tools.list_formats --check    exit with 1 if they are not what this would write

Knows tests/quantization/writers.py and quantization/gguf_forms.py. Loads no model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from quire.config.checkpoint_quantization import CheckpointQuantization
from quire.config.quantization_config import stored_quantization
from quire.quantization.codebooks import READ
from quire.quantization.gguf_forms import FORMS as BLOCKS
from tests.quantization.writers import FORMS
from tools.generated_tables import DOCS, main

PAGE = DOCS / "quantization.md"

CLASSES = {
    "int4": "`int4`: 0.5 bytes of a weight are read in a step",
    "int8": "`int8`: 1 byte",
    "requantized": "`int8`, rounded again: 1 byte",
    "plain": "bfloat16: 2 bytes",
}
"""`Form.becomes` -> the class of its speed on a CPU."""

NUMBERS = {
    "int4": "exactly the stored weights",
    "int8": "exactly the stored weights",
    "requantized": "within half a step of int8",
    "plain": "exactly the stored weights, in the model's dtype",
}


def formats() -> Iterator[str]:
    yield "| config.json says | on a CPU | on a GPU | weights | variants tested |"
    yield "|---|---|---|---|---|"
    rows: dict[tuple[str, ...], list[str]] = {}
    for form in FORMS:
        stored = stored_quantization({"quantization_config": form.config})
        assert stored is not None
        readers = {scheme.reader for scheme in stored.schemes()}
        coded = bool(readers & READ.keys())
        speed = "its codes in 4 bits, as `int4`" if coded else CLASSES[form.becomes]
        numbers = NUMBERS[form.becomes]
        if "bnb-4bit" in readers:
            numbers = "the stored codes; on a CPU their values are rounded, as said above"
        row = (_stored(stored), speed, _on_gpu(stored), numbers)
        rows.setdefault(row, []).append(form.name)
    for row, names in rows.items():
        yield f"| {' | '.join(row)} | {', '.join(names)} |"


def _stored(stored: CheckpointQuantization) -> str:
    said = {
        f"{scheme.bits} bits, {scheme.reader or scheme.strategy}" for scheme in stored.schemes()
    }
    return f"`{stored.method}`: {'; '.join(sorted(said))}"


def _on_gpu(stored: CheckpointQuantization) -> str:
    return "; ".join(sorted({scheme.describe(True) for scheme in stored.schemes()}))


def blocks() -> Iterator[str]:
    yield "| type | bits of a weight in the file | in memory | 4 bits are looked up in a table |"
    yield "|---|---|---|---|"
    for kind, form in BLOCKS.items():
        stored, kept = form.size * 8 / form.block, form.record * 8 / 32 / form.block
        yield f"| {kind} | {stored:.2f} | {kept:.2f} | {'yes' if form.codes else ''} |"


TABLES = {"formats": formats, "blocks": blocks}


if __name__ == "__main__":
    sys.exit(main(__doc__, {PAGE: TABLES}))
